"""The README: its examples run, its commands are there, and it stays short."""

import doctest
import pathlib
import re

import jax

from jaxkit import blr, denoise, metrics, ot, rl, spectral, train, zo

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_examples_run():
    """Every example of the README prints what it says, with JAX's own default settings."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed, tried = doctest.testfile(
            str(ROOT / "README.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
        )
    assert tried >= 15 and failed == 0


def test_examples_are_short():
    """An example has at most 8 lines."""
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        assert sum(line.startswith((">>>", "...")) for line in block.splitlines()) <= 8


def test_opens_with_the_two_commands_and_stays_short():
    """The main job and the tests come before the first heading; 200 lines at most."""
    opening = TEXT.split("\n## ")[0]
    install = "python3 -m venv .venv && .venv/bin/pip install -e "
    assert f"{install}'.[bench]' && .venv/bin/python -m benchmarks\n" in opening
    assert f"{install}'.[test]' && .venv/bin/pytest\n" in opening
    assert TEXT.count("\n") <= 200


def test_every_public_name_and_linked_file_is_there():
    """The table of topics names what exists, and links lead somewhere."""
    for topic in (spectral, zo, blr, denoise, ot, metrics, rl, train):
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{topic.__name__}`"))
        names = re.findall(r"`(\w+)`", row.split("|")[2])
        assert names and all(hasattr(topic, name) for name in names)
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link
