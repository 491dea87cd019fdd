"""Every notebook runs from top to bottom, and its committed outputs show a figure."""

import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _read(path):
    return pytest.importorskip("nbformat").read(path, as_version=4)


def _figures(document):
    outputs = [out for cell in document.cells for out in cell.get("outputs", ())]
    return [out for out in outputs if "image/png" in out.get("data", {})]


def test_there_are_notebooks():
    """An empty folder would test nothing."""
    assert NOTEBOOKS


# The client and the kernel's sockets warn about their own transport and event loop.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::RuntimeWarning")
@notebook
def test_runs_and_draws(path, monkeypatch):
    """No cell fails, and a figure comes out, with one CPU device and JAX's default settings."""
    client = pytest.importorskip("nbclient")
    inherited = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, inherited)))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    document = _read(path)
    for cell in document.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(path.parent)}}
    # The kernel of this interpreter, whatever kernels are installed beside it.
    kernel = client.NotebookClient(
        document, timeout=300, kernel_name="python3", resources=resources
    )
    kernel.execute()
    assert _figures(document)


@notebook
def test_committed_outputs_are_clean(path):
    """What is shown has a figure, and neither an error nor a path of somebody's machine."""
    document = _read(path)
    assert _figures(document)
    text = path.read_text()
    assert "Traceback" not in text
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|usr|Users)/", text)
    for cell in document.cells:
        if cell.cell_type == "code":
            assert not any(out.output_type == "error" for out in cell.outputs)
