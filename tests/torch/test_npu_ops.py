"""alltoallv.npu_ops: torch_npu's operators on CPU tensors, against the references that the emulator's tests use."""

from __future__ import annotations

import os
from pathlib import Path

import fused_cases
import fused_trouble
import pytest
from backend_groups import joined
from operators import families

from alltoallv.testing import Ranks


def test_operators_compute_their_formulas(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> None:
        import torch

        for cases in families().values():
            for case in cases:
                for dtype in case.dtypes:
                    case.call(torch.device("cpu"), dtype)
                if case.gradient:
                    case.differentiate(torch.device("cpu"))

    ranks(1, communicator=False)(check)


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (4, "alltoallv")])
def test_fused_operators_compute_their_formulas(ranks: Ranks, tmp_path: Path, size: int, backend: str) -> None:
    def check(rank: int, size: int, file: str, backend: str) -> None:
        import torch

        os.environ["ALLTOALLV_NPU_LIMITS"] = "relax"
        with joined(rank, size, file, backend=backend) as group:
            for cases in fused_cases.FAMILIES.values():
                for case in cases:
                    case.call(torch.device("cpu"), group.group_name, rank, size)
            fused_trouble.check(torch.device("cpu"), group.group_name, rank, size)

    ranks(size, communicator=False)(check, str(tmp_path / "store"), backend)
