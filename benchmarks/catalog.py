"""Which benchmarks there are, found by their files, and their settings."""

import ast
import importlib
import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent


def discover():
    """Returns the names of all benchmarks, ``topic.method``, sorted."""
    files = sorted(HERE.glob("*/bench_*.py"))
    return [f"{path.parent.name}.{path.stem.removeprefix('bench_')}" for path in files]


def load(name):
    """Returns the module of a benchmark."""
    topic, method = name.split(".")
    return importlib.import_module(f"benchmarks.{topic}.bench_{method}")


def summary(name):
    """Returns the first line of a benchmark's docstring without importing it."""
    topic, method = name.split(".")
    source = (HERE / topic / f"bench_{method}.py").read_text()
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def settings(topic):
    """Returns ``{method: settings}`` of a topic, as they are committed."""
    path = HERE / topic / "settings.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_settings(topic, method, entry):
    """Writes the settings of one benchmark; those of the others stay."""
    content = json.dumps({**settings(topic), method: entry}, indent=1)
    (HERE / topic / "settings.json").write_text(content + "\n")
