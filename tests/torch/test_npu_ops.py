"""alltoallv.npu_ops: torch_npu's operators on CPU tensors, against the references that the emulator's tests use."""

from __future__ import annotations

import os

import fused_cases
import fused_trouble
import pytest
import torch.distributed as dist
from backend_groups import Grouped
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


def check_gradients(group: str, rank: int, size: int) -> None:
    """npu_gmm_alltoallv computes the gradients of npu_alltoallv_gmm, as programs for NPUs write it."""
    import torch

    from alltoallv import npu_ops

    torch.manual_seed(rank)
    x, weight = torch.randn(2 * size * 2, 8).requires_grad_(), torch.randn(2, 8, 3).requires_grad_()
    place = group, size, [2] * (2 * size), [2] * (2 * size)
    y, _, rows = npu_ops.npu_alltoallv_gmm(x, weight, *place, permute_out_flag=True)
    grad = torch.randn(y.shape)
    y.backward(grad)
    expected, _ = npu_ops.npu_gmm_alltoallv(grad, weight.detach(), *place, trans_gmm_weight=True)
    assert torch.allclose(x.grad, expected)
    parts = zip(rows.detach().chunk(2), grad.chunk(2), strict=True)
    assert torch.allclose(weight.grad, torch.stack([part.t() @ one for part, one in parts]), atol=1e-5)


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (4, "alltoallv")])
def test_fused_operators_compute_their_formulas(grouped: Grouped, size: int, backend: str) -> None:
    def check(rank: int, size: int, group: dist.ProcessGroup) -> None:
        import torch

        os.environ["ALLTOALLV_NPU_LIMITS"] = "relax"
        for cases in fused_cases.FAMILIES.values():
            for case in cases:
                case.call(torch.device("cpu"), group.group_name, rank, size)
        check_gradients(group.group_name, rank, size)
        fused_trouble.check(torch.device("cpu"), group.group_name, rank, size)

    grouped(size, backend=backend)(check)
