"""alltoallv.npu_ops: torch_npu's operators on CPU tensors, against the references that the emulator's tests use."""

from __future__ import annotations

import os
from typing import Any

import fused_cases
import fused_trouble
import pytest
import torch.distributed as dist
from backend_groups import Grouped
from operators import families

from alltoallv.errors import PeerMismatchError
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


def test_arguments_go_with_the_schema(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> None:
        import torch

        from alltoallv import npu_ops

        x, gamma, known = torch.ones(2, 4), torch.ones(4), "input, gamma, epsilon"
        for arguments, names, words in (
            ((x, gamma), {"eps": 1e-2}, f"there is no argument eps, expected {known}"),
            ((x, gamma, 1e-2, 3), {}, f"4 arguments are given by place, expected 3 at most: {known}"),
            ((x, gamma, 1e-2), {"epsilon": 1e-6}, "epsilon is given by place and by name, expected once"),
            ((x,), {}, "gamma is missing, expected input, gamma"),
        ):
            with pytest.raises(TypeError, match=f"npu::npu_rms_norm: {words}"):
                npu_ops.npu_rms_norm(*arguments, **names)
        with pytest.raises(TypeError, match="npu::npu_moe_re_routing: 3 arguments are given by place, expected 2 at"):
            npu_ops.npu_moe_re_routing(x, torch.ones(1, 2, dtype=torch.int32), None)

    ranks(1, communicator=False)(check)


def check_names(group: str, rank: int, size: int) -> None:
    """All ranks raise what one of them gets wrong, and the next call works."""
    import torch

    from alltoallv import npu_ops

    x, scale = (torch.ones(2 * size, 4), torch.ones(4, 3), group), torch.ones(3)
    for place, names, kind, words in (
        ((size,), {"bais": None}, TypeError, "there is no argument bais"),
        ((size, None), {}, TypeError, "5 arguments are given by place, expected 4 at most"),
        ((), {}, TypeError, "world_size is missing, expected input, x2, hcom, world_size"),
        ((size,), {"x2_scale": scale, "output_dtype": 9}, NotImplementedError, "output_dtype is 9"),
    ):
        for operator in ("npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"):
            call, text = getattr(npu_ops, operator), f"npu::{operator}: {words}"
            text = f"^{text}" if rank == 1 else f"^rank 1 refuses {operator}: {text}"
            with pytest.raises(kind if rank == 1 else PeerMismatchError, match=text):
                call(*x, *(place if rank == 1 else (size,)), **(names if rank == 1 else {}))
            call(*x, size)


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
        check_names(group.group_name, rank, size)
        fused_trouble.check(torch.device("cpu"), group.group_name, rank, size)

    grouped(size, backend=backend)(check)
