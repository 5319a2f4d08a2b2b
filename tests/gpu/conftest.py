"""These tests need an NVIDIA GPU; elsewhere each is skipped, with what is missing as the reason."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torch").origin is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line("tests/gpu left out: torch is not installed (pip install torch)", yellow=True)

else:
    sys.path.append(str(HERE.parent / "torch"))  # for what the tests of groups share
    import torch
    from backend_groups import Grouped
    from torch.distributed import is_nccl_available

    from alltoallv.testing import Ranks

    def missing() -> str:
        """What the tests need and this machine has not."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no NVIDIA GPU, or no driver for CUDA {torch.version.cuda}"
        return "" if is_nccl_available() else f"torch {torch.__version__} has no NCCL"

    def pytest_report_header() -> str:
        if reason := missing():
            return f"GPU: none: {reason}"
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        card = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        compiler = shutil.which("cc") or shutil.which("gcc") or "no C compiler"
        return f"GPU: {card}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}; {compiler}"

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        if reason := missing():
            for item in items:
                if item.path.is_relative_to(HERE):
                    item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.fixture(scope="session")
    def ranks_preload() -> tuple[str, ...]:
        return ("alltoallv.torch",)

    @pytest.fixture
    def grouped(ranks: Ranks, tmp_path: Path) -> Grouped:
        """``grouped(1)(function)`` calls ``function(rank, size, group)`` on a rank of a default group."""
        return Grouped(ranks, tmp_path)
