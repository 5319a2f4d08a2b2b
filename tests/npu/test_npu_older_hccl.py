"""An HCCL of older releases, without the functions that take a configuration: the plain ones serve."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from npu_ranks import caught, emulated, memory_used, use_device
from npu_starts import exchange_works, start_with_table, write_table

import alltoallv_emulator as emulator
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError
from alltoallv.testing import Ranks

MISSING = ("HcclCommInitRootInfoConfig", "HcclCommInitClusterInfoConfig")


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator's libhccl with other names in its table of symbols, for processes that start from here on."""
    library = (emulator.library_folder() / "libhccl.so").read_bytes()
    for name in MISSING:
        symbol = b"\0" + name.encode() + b"\0"
        assert symbol in library
        library = library.replace(symbol, symbol.swapcase())
    (tmp_path / "libhccl.so").write_bytes(library)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}{os.pathsep}{os.environ['LD_LIBRARY_PATH']}")


@pytest.mark.slow  # four programs
@pytest.mark.usefixtures("older")
def test_without_the_functions_that_take_a_configuration(ranks: Ranks, tmp_path: Path) -> None:
    def check(rank: int, size: int, table: str) -> None:
        device = use_device(rank)
        library = ctypes.CDLL("libhccl.so")
        assert hasattr(library, "HcclCommInitRootInfo")
        assert not any(hasattr(library, name) for name in MISSING)
        before = memory_used(device)
        with Communicator.from_env("sized:300", backend="hccl", timeout=30) as comm:
            assert memory_used(device) - before == 2 * 200 << 20  # of which rank 0 warns
            exchange_works(comm, device)
        with emulated(faults="HcclCommInitRootInfo=fail:24"):
            error = caught(lambda: Communicator.from_env("sized:300", backend="hccl", timeout=30))
        assert isinstance(error, AllToAllVError)
        for part in ("HcclCommInitRootInfo returned 24", "HCCL_BUFFSIZE"):
            assert part in str(error)
        assert "sized:300" not in str(error)  # to change that would be of no use
        start_with_table(rank, table)
        with Communicator.from_env(backend="hccl", timeout=30) as comm:
            exchange_works(comm, device)
        assert torch.npu.current_device() == rank

    run = ranks(2, communicator=False, fresh=True, preloaded=False, outcomes=True)
    outcomes = run(check, write_table(tmp_path / "table.json", [2]))
    for outcome in outcomes:
        assert outcome.error is None, outcome
    assert "'sized:300' asks for a buffer of that many MB, which this HCCL does not support" in outcomes[0].output
