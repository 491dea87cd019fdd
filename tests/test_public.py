"""Rules for every public name, and for every file of the package."""

import ast
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import jaxkit

ROOT = pathlib.Path(jaxkit.__file__).parent
TESTS = pathlib.Path(__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TOPICS = [path.parent.name for path in FILES if path.name == "__init__.py"][1:]
PUBLIC = [
    f"{topic}.{name}"
    for topic in TOPICS
    for name in dir(importlib.import_module(f"jaxkit.{topic}"))
    if name[0] != "_"
]
# The functions that no Case covers, since they are not functions of arrays.
HOST_SIDE = {
    "ot.fit_objective": "checks values, and trains",
    "ot.fit_regression": "checks values, and takes lists of pairs of different sizes",
    "spectral.describe": "writes a table of labels",
    "spectral.label_params": "reads names and shapes, returns strings",
    "train.create": "copies buffers and places them, before anything is traced",
    "train.fit": "takes a step, and donates its state",
    "train.loop": "progress bar, files and signals",
    "train.restore": "reads files, and frees its state",
    "train.make_step": "joins an estimator and an optimizer that have cases of their own",
}
SECTIONS = ["Args", "Attributes", "Returns", "Raises", "Example", "Source", "Cost"]
OPTIONAL = "chex distrax flax orbax ott rich sklearn tensorflow_probability".split()
FORBIDDEN = re.compile(
    r"jax\.(_src|core|interpreters)\b|\b(pure_callback|io_callback|checkify|host_callback)\b"
    r"|\bdebug\.(breakpoint|callback|print)\b"
)


def short(path):
    return str(path.relative_to(ROOT))


def names_in(path):
    """Returns what a file imports, and every dotted name in its code, as strings."""
    imports, dotted = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{short(path)} must import by full names"
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            dotted.add(ast.unparse(node))
    return imports, dotted


@functools.cache
def covered():
    """Returns the public names that the cases of all test files cover."""
    names = set()
    for path in sorted(TESTS.glob("*/test_*.py")):
        # The module that pytest has collected, or a copy if this file runs alone.
        loaded = (m for m in list(sys.modules.values()) if getattr(m, "__file__", "") == str(path))
        module = next(loaded, None)
        if module is None:
            spec = importlib.util.spec_from_file_location(f"cases_of_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        for test in vars(module).values():
            for case in getattr(test, "cases", ()):
                names |= {f"{path.parent.name}.{name}" for name in case.covers}
    return names


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("public", PUBLIC)
def test_docstring_has_its_sections(public):
    """Every public name says what it is, in sections, and names every parameter or field."""
    topic, name = public.split(".")
    value = getattr(importlib.import_module(f"jaxkit.{topic}"), name)
    doc = inspect.cleandoc(value.__doc__)
    first = doc.split("\n\n")[0]
    assert re.fullmatch(r"[A-Z`].*\.", first), f"{first!r} must be one sentence on one line"
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", doc, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(found) == [x for x in SECTIONS if x in found], f"sections in order {list(found)}"
    is_data = inspect.isclass(value) and (
        hasattr(value, "_fields") or "__dataclass_fields__" in vars(value)
    )
    wanted = list(inspect.signature(value).parameters)
    listed = found.get("Attributes" if is_data else "Args", "")
    for parameter in wanted:
        assert re.search(rf"^  (\w+, )*\*{{0,2}}{parameter}\b[^:\n]*:", listed, re.MULTILINE), (
            parameter
        )
    if not inspect.isclass(value):
        missing = {"Returns", "Example", "Source", "Cost"} - set(found)
        assert not missing, f"no {sorted(missing)}"
        assert ">>> " in found["Example"]


@pytest.mark.parametrize("public", PUBLIC)
def test_function_occurs_in_a_case(public):
    """Every public function passes the contract, or is listed with the reason why it cannot."""
    topic, name = public.split(".")
    if not inspect.isclass(getattr(importlib.import_module(f"jaxkit.{topic}"), name)):
        assert (public in covered()) != (public in HOST_SIDE)


def test_lists_hold_public_names_only():
    """No case and no exception is of a name that is gone."""
    assert set(HOST_SIDE) | covered() <= set(PUBLIC)


def test_import_loads_only_jaxkit_and_optax():
    """``import jaxkit`` adds only its own modules to what ``import optax`` loads."""
    result = run_python(
        "import sys, optax; before = set(sys.modules); import jaxkit\n"
        "print(*sorted(x for x in set(sys.modules) - before if x.split('.')[0] != 'jaxkit'))"
    )
    assert (result.stdout.strip(), result.returncode) == ("", 0), result.stderr


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_import_leaves_the_garbage_collector_as_it_was(before):
    """It is off while jaxkit loads, and then on again if it was on."""
    result = run_python(
        "import gc, optax; runs = []; gc.callbacks.append(lambda *args: runs.append(args))\n"
        f"gc.{before}(); import jaxkit; is_on = gc.isenabled(); gc.callbacks.clear()\n"
        "print(is_on, len(runs))"
    )
    on, runs = result.stdout.split()
    assert (on, int(runs) < 3) == (str(before == "enable"), True), result.stderr


def test_training_works_without_the_optional_packages():
    """Without distrax, ott and the packages of the loop everything else trains."""
    result = run_python(
        f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))\n"
        "import jax, jax.numpy as jnp\n"
        "from jaxkit import spectral, train\n"
        "tx = spectral.muon(0.1)\n"
        "loss_fn = lambda params, batch, key: jnp.sum((params['w'] - batch) ** 2)\n"
        "state = train.create({'w': jnp.ones((4, 2))}, tx, jax.random.key(0))\n"
        "step = train.make_step(train.backprop(loss_fn), tx)\n"
        "state, metrics = train.fit(step, state, jnp.zeros((3, 4, 2)))\n"
        "assert metrics['loss'][-1] < metrics['loss'][0]"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("topic", "blocked", "names"),
    [
        ("ot", "ott", {"SlicedInitializer"}),
        ("blr", "distrax", {"MultivariateQGaussian", "QGaussian", "posterior"}),
    ],
)
def test_few_names_need_a_package_that_is_loaded_at_their_first_use(topic, blocked, names):
    """Without it these names fail to load, all others are there, and no other topic is lazy."""
    result = run_python(
        f"import sys; sys.modules[{blocked!r}] = None\n"
        f"from jaxkit import {topic} as topic\n"
        "for name in dir(topic):\n"
        "    try: getattr(topic, name)\n"
        "    except ImportError: print(name)"
    )
    assert (set(result.stdout.split()), result.returncode) == (names, 0), result.stderr
    lazy = {p.parent.name for p in FILES if "def __getattr__" in p.read_text()}
    assert lazy == {"ot", "blr"}


@pytest.mark.parametrize("path", FILES, ids=short)
def test_file_is_short_and_uses_what_is_stable(path):
    """A file has under 400 lines, no private name of jax, no host callback, no other topic."""
    assert len(path.read_text().splitlines()) < 400
    imports, dotted = names_in(path)
    assert not [name for name in imports | dotted if FORBIDDEN.search(name)]
    own = path.relative_to(ROOT).parts[0]
    others = {f"jaxkit.{topic}" for topic in TOPICS if topic != own}
    crossing = [name for name in imports if ".".join(name.split(".")[:2]) in others]
    assert path == ROOT / "__init__.py" or not crossing


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != ROOT], ids=short)
def test_file_has_its_test_or_only_exports(path):
    """A method has a test file of the same name; an ``__init__`` has explicit public exports."""
    topic = path.parent.name
    if path.name != "__init__.py":
        assert (TESTS / topic / f"test{path.name}").exists()
        return
    for node in ast.parse(path.read_text()).body[1:]:
        if isinstance(node, ast.ImportFrom):
            assert re.fullmatch(rf"jaxkit(\.{topic})?\._\w+", node.module)
            assert all(x.name == x.asname and x.name[0] != "_" for x in node.names)
        elif isinstance(node, ast.FunctionDef):
            assert node.name in ("__getattr__", "__dir__")
        else:
            assert isinstance(node, ast.Assign) and node.targets[0].id[0] == "_"
