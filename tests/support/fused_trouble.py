"""What operators that communicate refuse: on all ranks, by the argument's name, and the next call works."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import fused_cases
import numpy as np
from fused_case import called, place, to_torch

from alltoallv.errors import InvalidParamError, PeerMismatchError

if TYPE_CHECKING:
    import torch

DISPATCH, EXCHANGE, GATHER = "npu_moe_distribute_dispatch_v2", "npu_alltoallv_gmm", "npu_all_gather_base_mm"
COMBINE, NORM = "npu_moe_distribute_combine_v2", "npu_moe_distribute_combine_add_rms_norm"
REDUCE = "npu_mm_all_reduce_base"
SCALE, WRONG = {"x2_scale": np.ones(5, np.float32)}, np.ones(3)

#: What one rank alone gets wrong: the operator, its changed arguments, and the argument that the error names.
REFUSED: list[tuple[str, Any, str]] = [
    (DISPATCH, lambda one: {"x": one["x"][1:]}, "x"),
    (DISPATCH, lambda one: {"x_active_mask": np.ones(3, bool)}, "x_active_mask"),
    (DISPATCH, lambda one: {"expert_scales": np.ones((3, 2), np.float32)}, "expert_scales"),
    (DISPATCH, lambda one: {"expert_ids": one["expert_ids"].astype(np.int64)}, "expert_ids"),
    (DISPATCH, lambda one: {"expert_token_nums_type": 2}, "expert_token_nums_type"),
    (DISPATCH, lambda one: {"quant_mode": 2, "scales": np.ones((1, 16), np.float32)}, "scales"),
    (DISPATCH, lambda one: {"quant_mode": 1}, "scales"),
    (DISPATCH, lambda one: {"quant_mode": 3}, "y_dtype"),
    (COMBINE, lambda one: {"expand_x": one["expand_x"][:1]}, "expand_x"),
    (COMBINE, lambda one: {"ep_send_counts": one["ep_send_counts"][1:]}, "ep_send_counts"),
    (COMBINE, lambda one: {"shared_expert_x": WRONG}, "shared_expert_x"),
    (NORM, lambda one: {"gamma": WRONG}, "gamma"),
    (EXCHANGE, lambda one: {"mm_x": np.ones((3, 8)), "mm_weight": np.ones((7, 5))}, "mm_weight"),
    ("npu_alltoallv_quant_gmm", lambda one: {"gmm_x_scale": WRONG}, "gmm_x_scale"),
    ("npu_alltoallv_quant_gmm", lambda one: {"gmm_weight_scale": None}, "gmm_x"),
    (GATHER, lambda one: {"bias": WRONG}, "bias"),
    (GATHER, lambda one: {"x2": one["x2"].astype(np.int8)}, "x2"),
    ("npu_mm_reduce_scatter_base", lambda one: {"bias": WRONG}, "bias"),
    ("npu_matmul_all_to_all", lambda one: {"bias": WRONG}, "bias"),
    ("npu_quant_matmul_all_to_all", lambda one: {"x2_scale": WRONG}, "x2_scale"),
    ("npu_quant_matmul_all_to_all", lambda one: {"y_dtype": 9}, "y_dtype"),
    (REDUCE, lambda one: {"comm_quant_scale_1": np.ones(5)}, "comm_quant_scale_2"),
]

UNITS = {"comm_quant_scale_1": np.full(5, 0.5, np.float32), "comm_quant_scale_2": np.full(5, 0.25, np.float32)}

#: Every option that must be equal on all ranks: the operator, what all give, the option, what rank 1 gives, and how the
#: error tells the values of ranks 0 and 1, by default as given.
OPTIONS: list[tuple[str, dict[str, Any], str, Any, tuple[Any, Any] | None]] = [
    (DISPATCH, {"quant_mode": 0}, "quant_mode", 2, None),
    (DISPATCH, {"expert_token_nums_type": 1}, "expert_token_nums_type", 0, None),
    (DISPATCH, {"moe_expert_num": 40}, "moe_expert_num", 120, None),
    (DISPATCH, {"shared_expert_num": 1}, "shared_expert_num", 2, None),
    (DISPATCH, {"zero_expert_num": 0}, "zero_expert_num", 1, None),
    (DISPATCH, {"copy_expert_num": 0}, "copy_expert_num", 1, None),
    (DISPATCH, {"const_expert_num": 0}, "const_expert_num", 1, None),
    (DISPATCH, {"global_bs": 80}, "global_bs", 120, None),
    (DISPATCH, {"quant_mode": 2, "moe_expert_num": 40}, "scales", np.ones((40, 16), np.float32), (0, 1)),
    (DISPATCH, {}, "expert_scales", np.ones((4, 2), np.float32), (0, 1)),
    (COMBINE, {"comm_quant_mode": 0}, "comm_quant_mode", 2, None),
    (NORM, {"norm_eps": 1e-6}, "norm_eps", 1e-5, ("1e-06", "1e-05")),
    (EXCHANGE, {"permute_out_flag": False}, "permute_out_flag", True, None),
    ("npu_alltoallv_quant_gmm", {}, "gmm_y_dtype", 5, ("torch.bfloat16", "torch.float16")),
    (GATHER, {"gather_output": True}, "gather_output", False, None),
    (GATHER, SCALE | {"x1_scale": np.ones(4, np.float32)}, "x1_scale", None, (1, 0)),
    (REDUCE, UNITS, "comm_quant_scale_1", np.full(5, 0.75, np.float32), (r"\[0.5\], 5", r"\[0.75\], 5")),
    (REDUCE, UNITS, "comm_quant_scale_2", np.full(5, 0.75, np.float32), (r"\[0.25\], 5", r"\[0.75\], 5")),
    ("npu_all_to_all_matmul", {"all2all_out_flag": True}, "all2all_out_flag", False, None),
    ("npu_all_to_all_quant_matmul", {}, "y_dtype", 5, ("torch.bfloat16", "torch.float16")),
]


def check(device: torch.device, group: str, rank: int, size: int) -> None:
    """Fails unless every call is refused as it should be."""

    def call(operator: str, change: Any = None, dtype: str = "float16", **environ: str) -> Exception | None:
        """What the operator raises after a change of its arguments."""
        os.environ.update({"ALLTOALLV_NPU_LIMITS": "relax"} | environ)
        case = next(one for cases in fused_cases.FAMILIES.values() for one in cases if one.operator == operator)
        arguments = case.inputs(np.random.default_rng(5), size)[rank] | place(operator, group, rank, size)
        arguments |= change(arguments) if change else {}
        try:
            called(operator, device)(**{name: to_torch(value, dtype, device) for name, value in arguments.items()})
        except Exception as error:
            return error
        return None

    def expect(error: Exception | None, kind: type[Exception], words: str) -> None:
        assert type(error) is kind, repr(error)
        assert words in str(error), str(error)
        assert call(operator) is None

    operator = DISPATCH
    lifted = "(ALLTOALLV_NPU_LIMITS=relax lifts the limits of the device)"
    expect(
        call(operator, ALLTOALLV_NPU_LIMITS="keep"),
        InvalidParamError,
        f"npu::{operator}: the hidden size is 16, expected 1024 to 8192 on A3 {lifted}",
    )
    wide = {"x": np.ones((4, 2048))}
    expect(
        call(operator, lambda one: wide, ALLTOALLV_NPU_LIMITS="keep", HCCL_BUFFSIZE="1"),
        InvalidParamError,
        "HCCL_BUFFSIZE is 1 MB, expected 2 at least on A3: set HCCL_BUFFSIZE=2",
    )
    del os.environ["HCCL_BUFFSIZE"]
    assert call(operator, lambda one: wide, ALLTOALLV_NPU_LIMITS="keep") is None
    expect(
        call(operator, lambda one: {"x": np.ones((4, 16 + 16 * (rank == 1)))}),
        PeerMismatchError,
        f"{operator}: the hidden size is 16 on rank 0 and 32 on rank 1, expected the same on all ranks",
    )
    expect(
        call(operator, lambda one: wide, "float32", ALLTOALLV_NPU_LIMITS="keep"),
        InvalidParamError,
        "x has dtype float32, expected float16 or bfloat16 on A3",
    )
    error = call(operator, lambda one: {"tp_world_size": 2 * (rank == 1)})
    text = f"npu::{operator}: group_tp is ''; the emulator expects the name of a group of two ranks"
    if rank == 1:
        expect(error, NotImplementedError, text)
    else:
        expect(error, PeerMismatchError, f"rank 1 refuses {operator}: {text}")
    assert call(operator, lambda one: {"group_tp": "tp", "tp_world_size": 1}) is None
    static = {"quant_mode": 1, "scales": np.ones(1, np.float32)}
    assert call(operator, lambda one: static) is None
    if size == 2:
        text = "quant_mode is 1, with y_dtype None, expected 0, or 2 with int8, on A3"
        expect(call(operator, lambda one: wide | static, ALLTOALLV_NPU_LIMITS="keep"), InvalidParamError, text)
    expect(
        call(operator, lambda one: {"shared_expert_rank_num": size}),
        NotImplementedError,
        f"shared_expert_rank_num is {size}; the emulator expects 0 to {size - 1}",
    )
    expect(
        call(operator, lambda one: {"ep_world_size": size + 1}),
        InvalidParamError,
        f"the world size is {size + 1}, expected {size}, the size of group",
    )
    expect(
        call(operator, lambda one: {"x_active_mask": np.array([True, False, True, True])}),
        NotImplementedError,
        "x_active_mask is [True, False, True, True]; the emulator expects the active tokens first",
    )
    for operator in (DISPATCH, COMBINE, EXCHANGE, GATHER, "npu_matmul_all_to_all"):
        error = call(operator, dtype="bfloat16" if rank == 1 else "float16")
        expect(error, PeerMismatchError, "is torch.float16 on rank 0 and torch.bfloat16 on rank 1, expected the same")
    operator = EXCHANGE
    counts = lambda one: {"recv_counts": [one["recv_counts"][0] + (rank == 1), *one["recv_counts"][1:]]}  # noqa: E731
    expect(call(operator, counts), PeerMismatchError, "rank 0 sends 0 rows of expert 0 to rank 1, which expects 1")

    def moved(one: dict[str, Any]) -> dict[str, Any]:
        """Rank 1 expects the same number of rows from rank 0, but not of the same experts."""
        first, second, *others = one["recv_counts"]
        return {"recv_counts": [first + 1, second - 1, *others] if rank == 1 else one["recv_counts"]}

    expect(call(operator, moved), PeerMismatchError, "of expert 0 to rank 1, which expects")
    expect(
        call(operator, lambda one: {"gmm_x": one["gmm_x"][1:]} if rank == 1 else {}),
        *(
            (NotImplementedError, "rows, as many as send_counts says")
            if rank == 1
            else (PeerMismatchError, f"rank 1 refuses {operator}: npu::{operator}: gmm_x is")
        ),
    )
    expect(
        call(operator, ALLTOALLV_NPU_LIMITS="keep"), InvalidParamError, f"ep_world_size is {size}, expected one of 8,"
    )
    for operator, change, argument in REFUSED:
        error = call(operator, change if rank == 1 else None)
        if rank == 1:
            expect(error, NotImplementedError, f"npu::{operator}: {argument} is ")
        else:
            expect(error, PeerMismatchError, f"rank 1 refuses {operator}: npu::{operator}: {argument} is ")
    operator = REDUCE
    error = call(operator, lambda one: {"antiquant_scale": WRONG} if rank == 1 else {})
    if rank == 1:
        expect(error, RuntimeError, "size of tensor")
    else:
        expect(error, PeerMismatchError, f"rank 1 refuses {operator}: npu::{operator}: The size of tensor")
    for operator, shared, option, other, told in OPTIONS:
        error = call(operator, lambda one: shared | ({option: other} if rank == 1 else {}))  # noqa: B023
        assert type(error) is PeerMismatchError, (operator, option, error)
        first, second = told or (shared[option], other)
        named = ".*" if told else option
        words = rf"{operator}: {named} is {first}\b.* on rank 0 and {second}\b.* on rank 1, expected the same"
        assert re.search(words, str(error)), (option, str(error))
        assert call(operator) is None
    operator = GATHER
    expect(
        call(operator if rank else EXCHANGE),
        PeerMismatchError,
        f"rank 1 is in {GATHER} and rank 0 in {EXCHANGE}"
        if rank == 0
        else f"rank 0 is in {EXCHANGE} and rank {rank} in",
    )
