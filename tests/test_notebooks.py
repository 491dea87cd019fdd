"""Every notebook runs from top to bottom, and its committed outputs show a figure."""

import os
import pathlib
import re

import nbclient
import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# A folder of the file system, not the slashes of "Dense_0/kernel", an address or base64.
_ABSOLUTE = re.compile(r"(?<![\w.:/+=-])(/[\w.-]+){2,}|\b[A-Z]:\\\w")


def _outputs(document):
    return [out for cell in document.cells for out in cell.get("outputs", ())]


def _figures(document):
    return [out for out in _outputs(document) if "image/png" in out.get("data", {})]


def _shown(out):
    """The text of an output: all of it but the images."""
    data = {kind: text for kind, text in out.get("data", {}).items() if "image" not in kind}
    return "\n".join(map(str, [out.get("text", ""), *data.values(), out.get("traceback", "")]))


@pytest.fixture
def kernel_folders(tmp_path, monkeypatch):
    """The kernel is this interpreter, and reads and writes nothing in the user's folders."""
    write_kernel_spec(tmp_path / "kernels" / "python3")
    for name in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), inherited])))
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):  # as a reader has them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # else no figure reaches the notebook


def test_there_are_notebooks():
    """An empty folder would test nothing."""
    assert NOTEBOOKS


@notebook
def test_runs_and_draws(path, kernel_folders):
    """No cell fails, and a figure comes out, with one CPU device and JAX's default settings."""
    document = nbformat.read(path, as_version=4)
    for cell in document.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(
        document, timeout=120, kernel_name="python3", resources=resources
    ).execute()
    assert _figures(document)


@notebook
def test_committed_outputs_are_clean(path):
    """What is shown has a figure, and no error, warning or path of somebody's machine."""
    document = nbformat.read(path, as_version=4)
    assert _figures(document)
    for out in _outputs(document):
        assert out.output_type != "error"
        assert out.get("name") != "stderr"
    text = "\n".join([*map(_shown, _outputs(document)), *(cell.source for cell in document.cells)])
    assert "Traceback" not in text
    assert not _ABSOLUTE.search(text), _ABSOLUTE.search(text)


@notebook
def test_notebook_is_as_executed(path):
    """Cells are numbered from one as they stand, and carry no time of execution."""
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(cell.metadata for cell in cells)
