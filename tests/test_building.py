"""What a build lacks is named, with the command that installs it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_packages_that_compiling_needs(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("backend_of_this_test", ROOT / ".ci" / "backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    for name in ("nanobind", "numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match="compiled with nanobind and numpy: pip install nanobind numpy"):
        backend.install(tmp_path)
