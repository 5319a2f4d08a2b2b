"""torch_npu's own operators on the emulator: each against its documented formula, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fused_cases
import fused_elastic
import fused_tp
import fused_trouble
import operator_page
import pytest
import torch
import torch.distributed as dist
from npu_ranks import caught, group, use_device
from on_ranks import on_ranks
from operator_case import called
from operators import families

from alltoallv.errors import PeerMismatchError
from alltoallv.npu_ops import names, schemas
from alltoallv.npu_ops.registry import formulas


@pytest.mark.parametrize("family", families())
@on_ranks(1, communicator=False)
def test_operators_compute_their_formulas(rank: int, size: int, family: str) -> None:
    device = use_device(rank)
    for case in families()[family]:
        for dtype in case.dtypes:
            case.call(device, dtype)
        if case.gradient:
            case.differentiate(device)


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False)
def test_fused_operators_compute_their_formulas(rank: int, size: int, file: str) -> None:
    os.environ["ALLTOALLV_NPU_LIMITS"] = "relax"
    with group(rank, size, file) as (made, device):
        name = made._get_backend(device).get_hccl_comm_name(rank)
        for cases in fused_cases.FAMILIES.values():
            for case in cases:
                case.call(device, name, rank, size)
        fused_trouble.check(device, name, rank, size)
        fused_elastic.check(device, name, rank, size)
        if size == 4:
            names = [one._get_backend(device).get_hccl_comm_name(rank) for one in fused_tp.groups(rank)]
            fused_tp.check(device, *names, rank)


@on_ranks(2, communicator=False, fresh=True)
def test_a_rank_whose_device_has_another_number(rank: int, size: int, file: str) -> None:
    """As in data parallelism, where processes choose their devices."""
    import torch_npu

    os.environ["ALLTOALLV_NPU_LIMITS"] = "relax"
    device = use_device(2 * rank)
    dist.init_process_group("hccl", store=dist.FileStore(file, size), rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1, device=device))  # makes the communicator of this device
    name = dist.group.WORLD._get_backend(device).get_hccl_comm_name(2 * rank)
    x, weight = torch.ones(4, 8, device=device).half(), torch.ones(8, 3, device=device).half()
    assert torch_npu.npu_all_gather_base_mm(x, weight, name, size)[0].sum().item() == 4 * size * 8 * 3
    torch.npu.synchronize()
    dist.destroy_process_group()


@on_ranks(2, communicator=False)
def test_a_matrix_that_one_rank_forgot_on_the_host(rank: int, size: int, file: str) -> None:
    import torch_npu

    os.environ["ALLTOALLV_NPU_LIMITS"] = "relax"
    with group(rank, size, file) as (made, device):
        name = made._get_backend(device).get_hccl_comm_name(rank)
        x, weight = torch.ones(4, 8, device=device).half(), torch.ones(8, 3).half()
        error = caught(lambda: torch_npu.npu_all_gather_base_mm(x, weight if rank else weight.npu(), name, size))
        assert "npu::npu_all_gather_base_mm: expected all tensors to be on the same device" in str(error)
        assert isinstance(error, RuntimeError if rank else PeerMismatchError)
        assert torch_npu.npu_all_gather_base_mm(x, weight.npu(), name, size)[0].sum().item() == 4 * size * 8 * 3


def test_every_operator_has_a_case() -> None:
    cases = [case for family in families().values() for case in family]
    run = {name for case in cases for name in (case.operator, *case.runs)}
    run |= {case.operator for cases in fused_cases.FAMILIES.values() for case in cases}
    assert set(formulas()) - run == set()


def test_the_page_is_up_to_date() -> None:
    assert operator_page.PAGE.read_text() == operator_page.page(), "run python tests/npu/operator_page.py"


def test_sixty_of_the_operators_that_programs_call_run() -> None:
    called = operator_page.called()
    assert called == sorted(set(called))
    assert len(set(called) & set(names())) >= 60, sorted(set(called) - set(names()))


@on_ranks(1, communicator=False)
def test_refusals_leave_the_queue_alive(rank: int, size: int) -> None:
    """Of an operator that has no formula, in the caller; and of an argument's value, by the argument's name."""
    import torch_npu

    device = use_device(rank)
    x = torch.ones(4, 8, device=device, requires_grad=True)
    choices = torch.zeros(4, 2, dtype=torch.int64, device=device)
    q, mask = torch.ones(1, 4, 1, 8, device=device).half(), torch.ones(2048, 2048, device=device).triu(1).bool()

    def attend(queries: int = 1, keys: int = 1, **more: Any) -> Any:
        given = [q.expand(1, 4, length, 8).contiguous() for length in (queries, keys, keys)]
        return torch_npu.npu_fused_infer_attention_score(*given, num_heads=4, **{"input_layout": "BNSD"} | more)

    def train(**more: Any) -> Any:
        return torch_npu.npu_fusion_attention(q, q, q, head_num=4, input_layout="BNSD", **more)

    for call, words in (
        (lambda: torch_npu.npu_lstm_cell(*[x] * 7), "npu::npu_lstm_cell is not among the operators of"),
        (lambda: torch_npu.atb.npu_ring_mla(*[x] * 7, 1, 1), "atb::npu_ring_mla is not among the operators of"),
        (lambda: torch_npu._npu_group_topk(x.detach(), k=3, group_num=2), "atb::_npu_group_topk: k is 3; the emulator"),
        (lambda: torch_npu.npu_format_cast(x[1:], 29), "input is a tensor of shape (3, 8)"),
        (lambda: torch_npu.npu_moe_token_permute(x, choices[1:]), "indices is a tensor of shape (3, 2)"),
        (
            lambda: torch_npu.npu_moe_token_permute(x, choices.float()),
            "indices is a tensor of shape (4, 2) and torch.float32",
        ),
        (
            lambda: torch_npu.npu_grouped_matmul([x], [x.t().int()], split_item=3, group_type=-1),
            "weight is a tensor of",
        ),
        (lambda: torch_npu.npu_geglu(x, -1, 2), "npu::npu_geglu: approximate is 2; the emulator expects 0 or 1"),
        (lambda: torch_npu.npu_linear(x[None], x), "input is a tensor of shape (1, 4, 8)"),
        (
            lambda: torch_npu.npu_moe_init_routing_v2(x, choices.int(), expert_num=4, active_expert_range=[0, 4]),
            "expert_tokens_num_flag is False; the emulator expects True",
        ),
        (lambda: attend(input_layout="BSND_SBH"), "input_layout is BSND_SBH; the emulator expects BSH or BSND or"),
        (lambda: attend(query_rope=q), "key_rope is None; the emulator expects a tensor"),
        (
            lambda: attend(keys=2, sparse_mode=4, pre_tokens=0, atten_mask=mask),
            "sparse_mode is 4; the emulator expects",
        ),
        (lambda: attend(queries=2, sparse_mode=3), "atten_mask is None; the emulator expects a matrix of 2048 rows"),
        (lambda: train(softmax_layout="TND"), "softmax_layout is 'TND'; the emulator expects ''"),
        (lambda: train(pse=x[None, None]), "pse is a tensor of shape (1, 1, 4, 8)"),
    ):
        error = caught(call)
        assert isinstance(error, NotImplementedError), error
        assert words in str(error)
        torch.npu.synchronize()
        assert (x + 1).sum().item() == 64


@on_ranks(1, communicator=False)
def test_a_compressed_bias_has_the_gradients_of_the_whole_one(rank: int, size: int) -> None:
    import torch_npu

    device, length = use_device(rank), 1030
    torch.manual_seed(3)
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    pse = -torch.tensor([0.5, 0.0625]).view(1, 2, 1, 1) * distance
    weights = torch.randn(1, 2, length, 4)
    mask = torch.ones(2048, 2048).triu(1).bool().to(device)
    found = []
    for part in (pse, pse[:, :, -1024:].contiguous()):
        torch.manual_seed(4)
        inputs = [torch.randn(1, 2, length, 4).to(device).requires_grad_() for _ in range(3)]
        bias = part.to(device).requires_grad_()
        out = torch_npu.npu_fusion_attention(*inputs, 2, "BNSD", pse=bias, atten_mask=mask, scale=0.5, sparse_mode=2)[0]
        out.backward(weights.to(device))
        found.append([out, *(x.grad for x in inputs)])
        assert bias.grad.shape == part.shape
        assert abs(bias.grad.sum().item()) < 1e-2  # each query's gradients add up to nothing
    for whole, compressed in zip(*found, strict=True):
        assert torch.allclose(whole, compressed, atol=1e-6)


@on_ranks(1, communicator=False)
def test_attention_drops_weights(rank: int, size: int) -> None:
    """By a seed: values that are a unit matrix show which, and the gradient drops the same."""
    import torch_npu

    device = use_device(rank)
    ends = {"actual_seq_qlen": [7, 16], "actual_seq_kvlen": [16, 32]}
    for layout, shape, options in (("BNSD", (2, 2, 16, 16), {}), ("TND", (32, 2, 16), ends)):
        torch.manual_seed(1)
        query, key = torch.randn(16, 2, 16) if options else torch.randn(shape), torch.randn(shape)
        unit = torch.eye(16).repeat(2, 1).unsqueeze(1).expand(shape) if options else torch.eye(16).expand(shape)
        inputs = [x.contiguous().to(device).requires_grad_() for x in (query, key, unit)]

        def attend(keep: float, inputs: Any = inputs, layout: str = layout, options: Any = options) -> Any:
            return torch_npu.npu_fusion_attention(*inputs, 2, layout, scale=0.3, keep_prob=keep, **options)

        whole = attend(1.0)[0].double().cpu()
        torch.manual_seed(2)
        dropped, *_, seed, offset, count = attend(0.75)
        other = attend(0.75)
        torch.manual_seed(2)
        again = attend(0.75)
        assert torch.equal(dropped, again[0])
        assert again[4:] == (seed, offset, count)
        assert not torch.equal(dropped, other[0])
        assert count == whole.numel()
        kept = dropped.detach().double().cpu() != 0
        assert 0.7 < kept.float().mean() < 0.8
        assert torch.allclose(dropped.detach().double().cpu(), whole * kept / 0.75, atol=1e-6)
        # The formula in float64, with what was kept; of TND sequence by sequence.
        weights = torch.randn(whole.shape, dtype=torch.float64)
        leaves = [x.detach().double().cpu().requires_grad_() for x in inputs]
        parts = [(slice(0, 7), slice(0, 16)), (slice(7, 16), slice(16, 32))] if options else [(slice(None),) * 2]
        for queries, keys in parts:
            own = [x.transpose(0, 1) if options else x for x in (leaves[0][queries], leaves[1][keys], leaves[2][keys])]
            shares = (own[0] @ own[1].mT * 0.3).softmax(-1)
            mask, weight = (x[queries].transpose(0, 1) if options else x for x in (kept, weights))
            ((shares * mask / 0.75 @ own[2]) * weight).sum().backward()
        dropped.backward(weights.float().to(device))
        for x, leaf in zip(inputs, leaves, strict=True):
            assert torch.allclose(x.grad.double().cpu(), leaf.grad, atol=1e-5)
    for keep in (0.0, 1.5):
        assert f"keep_prob is {keep}; the emulator expects" in str(caught(lambda keep=keep: attend(keep)))


@on_ranks(1, communicator=False)
def test_a_format_is_remembered(rank: int, size: int, file: str) -> None:
    """By torch_npu itself: its process group refuses an offset, and gives the result the format of the input."""
    import torch_npu

    with group(rank, size, file) as (_, device):
        x = torch.arange(8.0, device=device).view(2, 4)
        cast, in_place = torch_npu.npu_format_cast(x, 29), torch_npu.npu_format_cast_(x.clone(), 29)
        part = torch_npu.npu_format_cast(cast[1:], 29)  # a part may only be cast to the format that it has
        casts = (x, cast, cast.t(), cast[1:], part, in_place, torch_npu.npu_format_cast(cast, 2))
        assert [int(torch_npu.get_npu_format(one)) for one in casts] == [2, 29, 29, 29, 29, 29, 2]
        assert part.data_ptr() == cast[1:].data_ptr()
        for one in (cast, in_place, torch.empty_like(x).copy_(cast), cast.copy_(x, non_blocking=True)):
            assert torch.equal(one.cpu(), x.cpu())
        error = caught(lambda: dist.broadcast(cast[1:], 0))
        assert "For a tensor of internal format, it's storage_offset must be 0" in str(error)
        dist.all_reduce(cast)
        assert int(torch_npu.get_npu_format(cast)) == 29
        assert torch.equal(cast.cpu(), x.cpu())


@on_ranks(1, communicator=False)
def test_what_torch_npu_has_in_python_stays(rank: int, size: int, file: str) -> None:
    """Its printing and saving of tensors in graphs: release 2.10 ends where something else takes their names."""
    device = use_device(rank)
    x = torch.arange(4.0, device=device)
    called("save_npugraph_tensor", device)(x, save_path=f"{file}.pt")
    torch.npu.synchronize()
    (saved,) = Path(file).parent.glob("*.pt")
    assert torch.equal(torch.load(saved), x.cpu())


@on_ranks(1, communicator=False)
def test_the_schemas_are_torch_npus(rank: int, size: int) -> None:
    use_device(rank)
    theirs = {str(one) for one in torch._C._jit_get_all_schemas() if one.name.startswith(("npu::", "atb::"))}
    ours = [text for texts in schemas().values() for text in texts]
    assert [text for text in ours if text not in theirs] == []
    assert len(ours) == len(formulas())
