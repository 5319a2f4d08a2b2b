"""alltoallv.npu_ops: torch_npu's operators on CPU tensors, against the references that the emulator's tests use."""

from __future__ import annotations

import os
from typing import Any

import fused_cases
import fused_elastic
import fused_tp
import fused_trouble
import pytest
import torch.distributed as dist
from backend_groups import Grouped
from on_ranks import on_ranks
from operator_case import listed
from operators import families

from alltoallv.errors import PeerMismatchError


@on_ranks(1, communicator=False)
def test_operators_compute_their_formulas(rank: int, size: int) -> None:
    import torch

    for cases in families().values():
        for case in cases:
            for dtype in case.dtypes:
                case.call(torch.device("cpu"), dtype)
            if case.gradient:
                case.differentiate(torch.device("cpu"))


def test_a_formula_has_defaults_for_what_an_older_schema_lacks() -> None:
    """torch_npu 2.10's npu_moe_finalize_routing has no k."""
    import torch

    from alltoallv.npu_ops import schemas
    from alltoallv.npu_ops.registry import Operator, formulas

    name = "npu_moe_finalize_routing"
    (newer,) = schemas()[name]
    older = newer.replace(", int? k=1", "")
    assert older != newer
    x, places = torch.randn(3, 4), torch.tensor([2, 0, 1], dtype=torch.int32)
    results = [
        Operator(name, torch._C.parse_schema(schema), formulas()[name])(x, None, None, None, None, places, None)
        for schema in (newer, older)
    ]
    assert torch.equal(*results)
    assert torch.equal(results[0], x[places.long()])


#: Operators, arguments without rows, and the results' shapes; a tuple is the shape of a tensor of zeros.
NO_ROWS: list[tuple[str, dict[str, Any], list[tuple[int, ...]]]] = [
    ("npu_moe_gating_top_k", {"x": (0, 8), "k": 2, "k_group": 1, "group_count": 2}, [(0, 2), (0, 2), (0, 8)]),
    ("npu_dynamic_quant", {"input": (0, 8), "quant_mode": "perchannel"}, [(0, 8), (8,)]),
    ("npu_dynamic_quant", {"input": (0, 8), "quant_mode": "pertensor"}, [(0, 8), (1,)]),
    ("npu_dequant_swiglu_quant", {"x": (0, 8), "weight_scale": (1, 8), "quant_mode": 1}, [(0, 4), (0,)]),
    ("npu_transpose_batchmatmul", {"input": (2, 0, 4), "weight": (2, 4, 5), "batch_split_factor": 2}, [(2, 0, 5)]),
    (
        "npu_mrope",
        {"positions": (0,), "query": (0, 16), "key": (0, 8), "cos_sin_cache": (9, 8), "head_size": 8},
        [(0, 16), (0, 8)],
    ),
    (
        "npu_fused_infer_attention_score",
        dict.fromkeys(("query", "key", "value"), (0, 4, 16)) | {"num_heads": 2, "input_layout": "BSH"},
        [(0, 4, 16), (0,)],
    ),
    (
        "npu_fusion_attention",
        dict.fromkeys(("query", "key", "value"), (0, 2, 8))
        | {"head_num": 2, "input_layout": "TND", "actual_seq_qlen": [], "actual_seq_kvlen": []},
        [(0, 2, 8)] * 3,
    ),
    (
        "npu_scatter_pa_kv_cache_functional",
        {"key": (0, 2, 4), "value": (0, 2, 4), "key_cache": (3, 2, 2, 4), "value_cache": (3, 2, 2, 4)}
        | {"slot_mapping": (0,)},
        [(3, 2, 2, 4)] * 2,
    ),
    (
        "npu_gather_pa_kv_cache",
        {"key_cache": (3, 2, 2, 4), "value_cache": (3, 2, 2, 4), "block_tables": (0, 2), "seq_lens": (0,)}
        | {"key": (0, 2, 4), "value": (0, 2, 4)},
        [],
    ),
    *(
        (
            "npu_kv_rmsnorm_rope_cache",
            {"kv": (0, 1, 1, 48), "gamma": (32,), "cos": (0, 1, 1, 16), "sin": (0, 1, 1, 16), "index": (0,)}
            | {"k_cache": (2, 4, 1, 16), "ckv_cache": (2, 4, 1, 32), "cache_mode": mode},
            [(2, 4, 1, 16), (2, 4, 1, 32), (0, 1, 1, 16), (0, 1, 1, 32)],
        )
        for mode in ("PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
    ),
    (
        "npu_moe_token_unpermute_with_routing_map",
        {"permuted_tokens": (0, 8), "sorted_indices": (0,), "restore_shape": [0, 8]},
        [(0, 8)],
    ),
    # Rows of tokens whose choices were all dropped.
    (
        "npu_moe_token_unpermute_with_routing_map",
        {"permuted_tokens": (0, 8), "sorted_indices": (2,), "restore_shape": [2, 8]},
        [(2, 8)],
    ),
    ("npu_moe_token_unpermute", {"permuted_tokens": (0, 8), "sorted_indices": (4,), "probs": (2, 2)}, [(2, 8)]),
    (
        "npu_moe_finalize_routing",
        {"expanded_permuted_rows": (0, 8), "skip1": None, "skip2": None, "bias": None, "scales": (2, 2)}
        | {"expanded_src_to_dst_row": (4,), "export_for_source_row": None},
        [(2, 8)],
    ),
]
INTEGERS = (
    *("positions", "slot_mapping", "block_tables", "seq_lens", "index", "sorted_indices"),
    "expanded_src_to_dst_row",
)


@on_ranks(1, communicator=False)
def test_operators_take_no_rows(rank: int, size: int) -> None:
    import torch

    from alltoallv import npu_ops

    for operator, arguments, shapes in NO_ROWS:
        given: dict[str, Any] = {
            name: torch.zeros(value, dtype=torch.int32 if name in INTEGERS else torch.float32)
            if isinstance(value, tuple)
            else value
            for name, value in arguments.items()
        }
        made = listed(getattr(npu_ops, operator)(**given))
        assert [tuple(x.shape) for x in made[: len(shapes)]] == shapes, operator
        assert not any(x.any() for x in made[: len(shapes)]), operator
    dropped = npu_ops.npu_moe_token_unpermute(
        torch.tensor([[torch.inf]]), torch.tensor([0, 5], dtype=torch.int32), torch.ones(1, 2)
    )
    assert dropped.tolist() == [[torch.inf]]  # not NaN: what was dropped adds zero


@on_ranks(1, communicator=False)
def test_arguments_go_with_the_schema(rank: int, size: int) -> None:
    import torch

    from alltoallv import npu_ops

    x, gamma, known = torch.ones(2, 4), torch.ones(4), "input, gamma, epsilon"
    for arguments, names, words in (
        ((x, gamma), {"eps": 1e-2}, f"there is no argument eps, expected {known}"),
        ((x, gamma, 1e-2, 3), {}, f"4 arguments are given by position, expected 3 at most: {known}"),
        ((x, gamma, 1e-2), {"epsilon": 1e-6}, "epsilon is given by position and by name, expected once"),
        ((x,), {}, "gamma is missing, expected input, gamma"),
    ):
        with pytest.raises(TypeError, match=f"npu::npu_rms_norm: {words}"):
            npu_ops.npu_rms_norm(*arguments, **names)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="npu_moe_init_routing_v2: expert_num is 2147483648"):
        npu_ops.npu_moe_init_routing_v2(
            x, ids, expert_num=2**31, active_expert_range=[0, 4], expert_tokens_num_flag=True
        )
    with pytest.raises(NotImplementedError, match="npu_moe_compute_expert_tokens: num_expert is 2147483648"):
        npu_ops.npu_moe_compute_expert_tokens(ids[:, 0], 2**31)
    combine = npu_ops.npu_moe_distribute_combine_add_rms_norm
    given = x, ids, ids[:, 0], ids[:, 0], torch.ones(2, 1), x, gamma, "nobody", 1, 0, 4
    with pytest.raises(NotImplementedError, match="combine_add_rms_norm: comm_quant_mode is 2"):
        combine(*given, comm_quant_mode=2)
    with pytest.raises(TypeError, match="npu::npu_moe_re_routing: 3 arguments are given by position, expected 2 at"):
        npu_ops.npu_moe_re_routing(x, torch.ones(1, 2, dtype=torch.int32), None)


def check_names(group: str, rank: int, size: int) -> None:
    """All ranks raise what one of them gets wrong, and the next call works."""
    import torch

    from alltoallv import npu_ops

    x, scale = (torch.ones(2 * size, 4), torch.ones(4, 3), group), torch.ones(3)
    for place, names, kind, words in (
        ((size,), {"bais": None}, TypeError, "there is no argument bais"),
        ((size, None), {}, TypeError, "5 arguments are given by position, expected 4 at most"),
        ((), {}, TypeError, "world_size is missing, expected input, x2, hcom, world_size"),
        ((size,), {"x2_scale": scale, "output_dtype": 9}, NotImplementedError, "output_dtype is 9"),
    ):
        for operator in ("npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"):
            call, text = getattr(npu_ops, operator), f"npu::{operator}: {words}"
            text = f"^{text}" if rank == 1 else f"^rank 1 refuses {operator}: {text}"
            with pytest.raises(kind if rank == 1 else PeerMismatchError, match=text):
                call(*x, *(place if rank == 1 else (size,)), **(names if rank == 1 else {}))
            call(*x, size)
    assert npu_ops.npu_mm_all_reduce_base(torch.ones(0, 4), torch.ones(4, 3), group).shape == (0, 3)


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
    tokens, choices = torch.randn(3, 16).requires_grad_(), torch.tensor([[0, 3], [1, 2], [3, 1]], dtype=torch.int32)
    place = group, size, rank, 2 * size
    sent, _, info, _, ends, *_ = npu_ops.npu_moe_distribute_dispatch_v2(tokens, choices, *place)
    for mode in (0, 2):  # rounding to int8 on the way has no gradient of its own
        back = npu_ops.npu_moe_distribute_combine_v2(
            sent * 3, choices, info, ends, torch.full((3, 2), 0.5), *place, comm_quant_mode=mode
        )
        (found,) = torch.autograd.grad(back, tokens, torch.ones(3, 16), retain_graph=True)
        assert torch.allclose(found, torch.full((3, 16), 3.0))
    assert not any(one.requires_grad for one in npu_ops.npu_dynamic_quant(tokens))
    assert not npu_ops.npu_moe_distribute_dispatch_v2(tokens, choices, *place, quant_mode=2)[1].requires_grad
    parts = zip(rows.detach().chunk(2), grad.chunk(2), strict=True)
    assert torch.allclose(weight.grad, torch.stack([part.t() @ one for part, one in parts]), atol=1e-5)


def check_parts(rank: int, size: int, backend: str) -> None:
    """The group of the ranks that are left of a group goes with it."""
    from alltoallv.npu_ops.groups import Group

    there = set(dist.distributed_c10d._world.pg_map)
    whole = dist.new_group(list(range(size)), backend=backend)
    left = range(1, size, 2)  # torch names such a group by how many the rank has, which these ranks have in common
    if rank in left:
        part = Group(whole, None).part(left)
        assert part.ranks == list(left)
        assert Group(whole, None).part(left)._group is part._group
    dist.destroy_process_group(whole)
    del whole
    assert set(dist.distributed_c10d._world.pg_map) == there


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
        fused_elastic.check(torch.device("cpu"), group.group_name, rank, size)
        check_parts(rank, size, backend)
        if size == 4:
            fused_tp.check(torch.device("cpu"), *(one.group_name for one in fused_tp.groups(rank)), rank)

    grouped(size, backend=backend)(check)


def test_every_argument_is_done_or_refused_or_ignored(grouped: Grouped) -> None:
    def check(rank: int, size: int, group: dist.ProcessGroup) -> None:
        import npu_arguments

        os.environ["ALLTOALLV_NPU_LIMITS"] = "relax"
        npu_arguments.check_all(group.group_name)

    grouped(1, backend="gloo")(check)
