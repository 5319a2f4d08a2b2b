"""What a package without its compiled part says."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alltoallv


@pytest.mark.parametrize("code", ["import alltoallv; alltoallv.Communicator", "import alltoallv.numpy"])
def test_no_extension(tmp_path, code):
    error = import_error(tmp_path, code)
    for words in ("compiled part is missing", "has none", "pip install -e .", "make build"):
        assert words in error


def test_extension_of_another_python(tmp_path):
    error = import_error(tmp_path, "import alltoallv.numpy", "_core.cpython-37m-x86_64-linux-gnu.so")
    assert "has only _core.cpython-37m-x86_64-linux-gnu.so, of other Pythons" in error


def import_error(folder: Path, code: str, *modules: str) -> str:
    """Runs code on a copy of the package with these extension modules; returns the ImportError."""
    source = Path(alltoallv.__file__).parent
    shutil.copytree(source, folder / "alltoallv", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in modules:
        (folder / "alltoallv" / module).touch()
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("ImportError: "), result.stderr
    return error


def test_a_function_of_the_front_ends_is_looked_for_in_the_package() -> None:
    homes = r"it is in alltoallv\.numpy, alltoallv\.torch, alltoallv\.mindspore and alltoallv\.paddle$"
    with pytest.raises(AttributeError, match=rf"no attribute 'all_to_all_v': {homes}"):
        alltoallv.all_to_all_v  # noqa: B018
    with pytest.raises(ImportError, match=rf"'all_to_all_v' from 'alltoallv': {homes}"):
        from alltoallv import all_to_all_v  # noqa: F401
    assert not hasattr(alltoallv, "all_to_all_v")
    with pytest.raises(
        AttributeError, match=r"it is in alltoallv\.numpy, alltoallv\.mindspore\.distributed and alltoallv"
    ):
        alltoallv.all_gather_object  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'all_to_nobody'$"):
        alltoallv.all_to_nobody  # noqa: B018
    with pytest.raises(ImportError, match=r"from 'alltoallv.numpy': it is in alltoallv.torch and alltoallv.mindspore$"):
        from alltoallv.numpy import Received  # noqa: F401
    with pytest.raises(ImportError, match=r"'AllToAllVParam' from 'alltoallv.numpy': it is in alltoallv$"):
        from alltoallv.numpy import AllToAllVParam  # noqa: F401
    with pytest.raises(ImportError, match=r"'AlltoAllVParam' from 'alltoallv': did you mean 'AllToAllVParam'\?$"):
        from alltoallv import AlltoAllVParam  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'alltoallv.numpy.functional'"):
        importlib.import_module("alltoallv.numpy.functional")


def test_the_citation_has_the_version() -> None:
    citation = Path(__file__).resolve().parents[1] / "CITATION.cff"
    assert f"\nversion: {alltoallv.__version__}\n" in citation.read_text()
