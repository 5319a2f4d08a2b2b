"""Cases of torch_npu's operators that communicate: arguments of all ranks, and a reference of one process.

The references go through ranks, experts and tokens one by one, in NumPy's float64, as the formulas are documented.
"""

from __future__ import annotations

from typing import Any

import fused_matmul_cases
import numpy as np
from fused_case import Fused
from operator_case import FLOATS
from operators.matmuls import dequantized, nearest, single, whole
from operators.microscaling import E2M1, E4M3, E5M2, LARGEST, NAMES, coded, mx, pairs, rounded
from operators.quantization import symmetric

Array = np.ndarray[Any, Any]
Rank = dict[str, Any]
WIDTH, CHOICES, LOCAL = 16, 2, 2
F32 = np.float32
FLOAT16, BFLOAT16 = 5, 15
KINDS: dict[Any, int] = {23: E5M2, 24: E4M3, 296: E2M1}  # as torch calls them


def routed(r: np.random.Generator, size: int, special: int = 0, **more: Any) -> list[Rank]:
    """Tokens, their experts, and weights; rank 0 has fewer tokens where ``global_bs`` says so."""
    ranks = []
    for rank in range(size):
        tokens = 3 if "global_bs" in more and rank == 0 else 4
        experts = [r.permutation(LOCAL * size + special)[:CHOICES] for _ in range(tokens)]
        ranks.append(
            {"x": r.normal(size=(tokens, WIDTH)), "expert_ids": np.stack(experts).astype(np.int32)}
            | {name: value(r, tokens, size) if callable(value) else value for name, value in more.items()}
        )
    return ranks


def weights(r: np.random.Generator, tokens: int, size: int) -> Array:
    return F32(r.uniform(0.1, 1, (tokens, CHOICES)))


def first_active(r: np.random.Generator, tokens: int, size: int) -> Array:
    return np.arange(tokens) < tokens - 1


def some_active(r: np.random.Generator, tokens: int, size: int) -> Array:
    return r.integers(0, 2, (tokens, CHOICES)).astype(bool)


def smooth(r: np.random.Generator, tokens: int, size: int) -> Array:
    return F32(np.random.default_rng(9).uniform(0.5, 2, (LOCAL * size, WIDTH)))


def placed(ranks: list[Rank]) -> tuple[list[list[int]], int]:
    """The experts of each rank, shared ones as -1, -2 and so on; and how many ranks have the same shared one."""
    size, shared = len(ranks), ranks[0].get("shared_expert_rank_num", 0)
    copies = shared // ranks[0].get("shared_expert_num", 1)
    local = LOCAL * size // (size - shared)
    theirs = [list(range(start, start + local)) for start in range(0, LOCAL * size, local)]
    return [[-1 - rank // copies] for rank in range(shared)] + theirs, copies


def room(ranks: list[Rank], rank: int) -> int:
    experts, copies = placed(ranks)
    most = (ranks[rank].get("global_bs") or len(ranks[rank]["expert_ids"]) * len(ranks)) // len(ranks)
    if experts[rank][0] < 0:
        return most * sum(source % copies == rank % copies for source in range(len(ranks)))
    return most * len(ranks) * min(len(experts[rank]), CHOICES)


def arrivals(ranks: list[Rank]) -> list[list[tuple[int, int, int, int]]]:
    """For each rank what it gets, in order: expert, rank, token and choice, which is -1 for a shared expert."""
    experts, copies = placed(ranks)
    got: list[list[tuple[int, int, int, int]]] = [[] for _ in ranks]
    for rank, expert in ((rank, expert) for rank, held in enumerate(experts) for expert in held):
        for source, one in enumerate(ranks):
            active = one.get("x_active_mask", np.ones(len(one["expert_ids"]), bool))
            active = np.broadcast_to(active.reshape(len(active), -1), one["expert_ids"].shape)
            if expert >= 0:
                pairs = np.argwhere((one["expert_ids"] == expert) & active)
                got[rank] += [(expert, source, token, choice) for token, choice in pairs]
            elif source % copies == rank % copies:
                got[rank] += [(expert, source, token, -1) for token in np.flatnonzero(active.any(1))]
    return got


def ends(got: list[tuple[int, int, int, int]], experts: list[int], size: int) -> Array:
    """Where the rows of each expert and rank end."""
    pairs = [(expert, source) for expert in experts for source in range(size)]
    return np.cumsum([sum(one[:2] == pair for one in got) for pair in pairs]).astype(np.int32)


def dispatched(ranks: list[Rank]) -> list[Any]:
    size, results = len(ranks), []
    experts, copies = placed(ranks)
    shared = ranks[0].get("shared_expert_num", 1) if copies else 0
    for rank, got in enumerate(arrivals(ranks)):
        rows = np.zeros((room(ranks, rank), ranks[rank]["x"].shape[1]))
        dynamic = np.zeros(len(rows), F32)
        for place, (expert, source, token, _) in enumerate(got):
            rows[place] = ranks[source]["x"][token]
            if ranks[rank].get("quant_mode"):
                scales = ranks[source].get("scales", np.ones((shared + LOCAL * size, 1)))
                row = rows[place].astype(F32) * scales[expert + shared if expert >= 0 else -1 - expert].astype(F32)
                factor = F32(127) / np.abs(row).max()
                rows[place], dynamic[place] = np.rint(row * factor), F32(1) / factor
        numbers = np.array([sum(one[0] == expert for one in got) for expert in experts[rank]])
        if ranks[rank].get("expert_token_nums_type") == 0:
            numbers = np.cumsum(numbers)
        quantized = bool(ranks[rank].get("quant_mode"))
        values = rows.astype(np.int8) if quantized else rows
        results.append(
            (values, dynamic if quantized else None, None, numbers, ends(got, experts[rank], size), None, None)
        )
    return results


def travelled(x: Array, scales: Any, mode: int, kind: int, expert: int, token: int) -> tuple[Array, Any]:
    """A token as it travels with a format of torch_npu's own, and its scales."""
    if mode == 0:
        return x, scales[token]
    row, largest = x.astype(F32), F32(LARGEST.get(kind, 127))
    if scales is not None:
        row = row * (scales[expert] if scales.ndim == 2 else scales).astype(F32)
    if mode == 1:
        return nearest(row), None
    if mode == 2:
        factor = largest / np.abs(row).max()
        return rounded(row * factor, kind), F32(1) / factor
    if mode == 3:
        blocks = np.split(row, range(128, len(row), 128))
        of = [np.abs(block).max() / largest for block in blocks]
        return rounded(np.concatenate([block / one for block, one in zip(blocks, of, strict=True)]), kind), of
    values, of_blocks = mx(row[None], kind, up=mode == 5)
    return values[0] if kind in NAMES else pairs(values, kind)[0], of_blocks.reshape(-1)


def precise(ranks: list[Rank]) -> list[Any]:
    """Dispatch with a format of torch_npu's own: its rows and scales, and what does not depend on it."""
    results = []
    plain = dispatched([{**one, "quant_mode": 0} for one in ranks])
    for rank, got in enumerate(arrivals(ranks)):
        kind, mode = KINDS.get(ranks[rank].get("y_dtype"), 0), ranks[rank].get("quant_mode", 0)
        made = [
            travelled(ranks[source]["x"][token], ranks[source].get("scales"), mode, kind, expert, token)
            for expert, source, token, _ in got
        ]
        behind = room(ranks, rank) - len(made)
        rows, scales = np.zeros((room(ranks, rank), 0)), np.zeros(room(ranks, rank))
        if made:
            rows, scales = (
                np.concatenate([np.stack(each), np.zeros((behind, *np.shape(each[0])), np.asarray(each[0]).dtype)])
                if each[0] is not None
                else scales
                for each in zip(*made, strict=True)
            )
        results.append((rows, scales, *plain[rank][2:]))
    return results


def to_combine(special: int = 0, middle: str = "assist_info_for_combine", **more: Any) -> Any:
    """Rows as dispatch has sorted them; what its other results are does not matter."""

    def inputs(r: np.random.Generator, size: int) -> list[Rank]:
        ranks = routed(r, size, special, expert_scales=weights, **more)
        got, (experts, _) = arrivals(ranks), placed(ranks)
        for rank, one in enumerate(ranks):
            x, rows = one.pop("x"), room(ranks, rank)
            one |= {"expand_x": r.normal(size=(rows, WIDTH)), "ep_send_counts": ends(got[rank], experts[rank], size)}
            one[middle] = np.zeros(rows * 128, np.int32)
            one |= {"ori_x": x} if special else {}
        return ranks

    return inputs


def combined(ranks: list[Rank]) -> list[Any]:
    size = len(ranks)
    results = [np.zeros((len(one["expert_ids"]), WIDTH)) for one in ranks]
    for rank, got in enumerate(arrivals(ranks)):
        for place, (_, source, token, choice) in enumerate(got):
            row = ranks[rank]["expand_x"][place]
            if ranks[rank].get("comm_quant_mode"):
                numbers, scale = symmetric(row)
                row = numbers.astype(F32) * scale
            results[source][token] += row if choice < 0 else ranks[source]["expert_scales"][token, choice] * row
    for one, result in zip(ranks, results, strict=True):
        if "const_expert_v" in one:  # experts behind the others: one that is zero, one that copies, one constant
            for token, choice in np.argwhere(one["expert_ids"] > LOCAL * size):
                x, number = one["ori_x"][token], one["expert_ids"][token, choice] - LOCAL * size
                made = (
                    x
                    if number == 1
                    else one["const_expert_alpha_1"] * x + one["const_expert_alpha_2"] * one["const_expert_v"]
                )
                result[token] += one["expert_scales"][token, choice] * np.reshape(made, -1)
        result += one.get("shared_expert_x", 0)
    return results


def normed(ranks: list[Rank]) -> list[Any]:
    results = []
    for one, tokens in zip(ranks, combined(ranks), strict=True):
        total = tokens[:, None] + one["residual_x"]
        rstd = 1 / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6)
        results.append((total * rstd * one["gamma"], rstd, total))
    return results


def vector(*shape: int) -> Any:
    return lambda r, tokens, size: r.normal(size=shape)


def of_tokens(*middle: int) -> Any:
    return lambda r, tokens, size: r.normal(size=(tokens, *middle, WIDTH))


SPECIAL = {
    "zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1, "const_expert_alpha_1": vector(1),
    "const_expert_alpha_2": vector(1), "const_expert_v": vector(1, WIDTH),
}  # fmt: skip


def grouped(back: bool = False, quantized: bool = False, transposed: bool = False, shared: bool = False) -> Any:
    """Rows for all experts, or of this rank's experts for all ranks; no rank has a row of expert 0 for rank 1."""

    def inputs(r: np.random.Generator, size: int) -> list[Rank]:
        sent = r.integers(0, 4, (size, size, LOCAL))
        sent[:, -1, 0] = 0

        def numbers(*shape: int) -> Array:
            return r.integers(-128, 128, shape).astype(np.int8) if quantized else r.normal(size=shape)

        ranks: list[Rank] = []
        for rank in range(size):
            there, here = sent[rank], sent[:, rank]
            sends, recvs = (here, there) if back else (there, here)
            weight = numbers(LOCAL, 3, WIDTH) if transposed else numbers(LOCAL, WIDTH, 3)
            one = {"gmm_x": numbers(int(sends.sum()), WIDTH), "gmm_weight": weight}
            one |= {"send_counts": sends.reshape(-1).tolist(), "recv_counts": recvs.reshape(-1).tolist()}
            if quantized:
                one |= {"gmm_x_scale": single(r, 1), "gmm_weight_scale": single(r, 1), "gmm_y_dtype": BFLOAT16}
                one |= {"gmm_x_quant_mode": 1, "gmm_weight_quant_mode": 1}
            if transposed:
                one["trans_gmm_weight"] = True
            if shared:
                one |= {"mm_x": numbers(3, WIDTH), "mm_weight": numbers(WIDTH, 5)}
            ranks.append(one if back else one | {"permute_out_flag": True})
        return ranks

    return inputs


def _parts(one: Rank, counts: str) -> list[tuple[int, int, Array]]:
    """The rows in the order rank, expert, with their rank and expert."""
    each = np.array(one[counts]).reshape(-1, LOCAL)
    stops = np.cumsum(each.reshape(-1))
    pieces = np.split(one["gmm_x"], stops[:-1])
    return [(i // LOCAL, i % LOCAL, piece) for i, piece in enumerate(pieces)]


def _times(one: Rank, rows: Array, expert: int) -> Array:
    weight = one["gmm_weight"][expert]
    weight = weight.T if one.get("trans_gmm_weight") else weight
    if "gmm_x_scale" not in one:
        return rows @ weight
    return dequantized(whole(rows, weight), one["gmm_x_scale"]) * one["gmm_weight_scale"].astype(F32)


def _shared(one: Rank) -> Any:
    return one["mm_x"] @ one["mm_weight"] if "mm_x" in one else None


def alltoallv_gmm(ranks: list[Rank]) -> list[Any]:
    results = []
    for rank, one in enumerate(ranks):
        pieces = [_parts(source, "send_counts") for source in ranks]
        by_expert = [
            np.concatenate([rows for parts in pieces for to, e, rows in parts if (to, e) == (rank, expert)])
            for expert in range(LOCAL)
        ]
        y = np.concatenate([_times(one, rows, expert) for expert, rows in enumerate(by_expert)])
        results.append((y, _shared(one), np.concatenate(by_expert)))
    return results


def gmm_alltoallv(ranks: list[Rank]) -> list[Any]:
    size = len(ranks)
    made: dict[tuple[int, int, int], Array] = {}  # by the rank that it goes to, the one that it comes from, and expert
    for rank, one in enumerate(ranks):
        each = np.array(one["send_counts"]).reshape(size, LOCAL)
        at = 0
        for expert in range(LOCAL):
            for target in range(size):
                rows = one["gmm_x"][at : at + each[target, expert]]
                made[target, rank, expert] = _times(one, rows, expert)
                at += len(rows)
    return [
        (np.concatenate([made[rank, source, e] for source in range(size) for e in range(LOCAL)]), _shared(one))
        for rank, one in enumerate(ranks)
    ]


DISPATCHES: list[tuple[int, dict[str, Any]]] = [  # experts that are none, and arguments
    (0, {}),
    (0, {"x_active_mask": first_active}),
    (0, {"x_active_mask": some_active}),
    (0, {"scales": smooth, "quant_mode": 2, "expert_token_nums_type": 0}),
    (3, {"zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1}),
]


def half(r: np.random.Generator, tokens: int, size: int) -> int:
    return size // 2


def of_all(r: np.random.Generator, tokens: int, size: int) -> int:
    return 4 * size


def smooth_shared(r: np.random.Generator, tokens: int, size: int) -> Array:
    return F32(np.random.default_rng(9).uniform(0.5, 2, (1 + LOCAL * size, WIDTH)))


ONE_EACH: dict[str, Any] = {"shared_expert_rank_num": half, "shared_expert_num": half}
COPIES: dict[str, Any] = {"shared_expert_rank_num": half}


def dispatch(version: str, special: int = 0, **more: Any) -> Fused:
    name = f"npu_moe_distribute_dispatch{version}"
    return Fused(name, lambda r, n: routed(r, n, special, **more), dispatched, exact=True)


def wide(mode: int, y_dtype: int | None = None, width: int = 160, **more: Any) -> Fused:
    """Of tokens with more than a block of 128 numbers."""

    def inputs(r: np.random.Generator, size: int) -> list[Rank]:
        ranks = routed(r, size, quant_mode=mode, **({"y_dtype": y_dtype} if y_dtype else {}), **more)
        for one in ranks:
            one["x"] = r.normal(size=(len(one["x"]), width)) * 2.0 ** r.integers(-9, 9, (len(one["x"]), 1))
        return ranks

    return Fused("npu_moe_distribute_dispatch_v2", inputs, precise, exact=True)


def of_eights(r: np.random.Generator, size: int) -> list[Rank]:
    """Tokens that are float8 already, with scales that only travel."""
    ranks = routed(r, size, scales=lambda r, tokens, size: F32(r.uniform(size=(tokens, 2))))
    return [one | {"x": coded(r, E4M3, len(one["x"]), WIDTH)} for one in ranks]


def of_columns(r: np.random.Generator, tokens: int, size: int) -> Array:
    return F32(np.random.default_rng(8).uniform(10, 40, 160))


def smooth_wide(r: np.random.Generator, tokens: int, size: int) -> Array:
    return F32(np.random.default_rng(9).uniform(0.5, 2, (LOCAL * size, 160)))


FAMILIES: dict[str, list[Fused]] = {
    "moe_distribute": [
        *(dispatch("_v2", special, **more) for special, more in DISPATCHES),
        dispatch("_v2", global_bs=of_all),
        dispatch("_v2", global_bs=of_all, **COPIES),
        dispatch("_v2", x_active_mask=some_active, **ONE_EACH),
        dispatch("_v2", scales=smooth_shared, quant_mode=2, **COPIES),
        wide(1, scales=of_columns),
        wide(1, 1, scales=smooth_wide),
        wide(2, 24, scales=smooth_wide),
        wide(3, 23),
        wide(4, 24, scales=smooth_wide),
        wide(4, 296),
        wide(5, 23),
        Fused("npu_moe_distribute_dispatch_v2", of_eights, precise, exact=True),
        dispatch("", **COPIES),
        dispatch(""),
        dispatch("", quant_mode=2),
        Fused("npu_moe_distribute_combine_v2", to_combine(), combined),
        Fused("npu_moe_distribute_combine_v2", to_combine(x_active_mask=some_active), combined),
        Fused("npu_moe_distribute_combine_v2", to_combine(shared_expert_x=of_tokens(), comm_quant_mode=2), combined),
        Fused("npu_moe_distribute_combine_v2", to_combine(3, **SPECIAL), combined),
        Fused("npu_moe_distribute_combine_v2", to_combine(x_active_mask=some_active, **ONE_EACH), combined),
        Fused("npu_moe_distribute_combine_v2", to_combine(3, **SPECIAL, **COPIES), combined),
        Fused("npu_moe_distribute_combine", to_combine(middle="expand_idx", **COPIES), combined),
        Fused("npu_moe_distribute_combine", to_combine(middle="expand_idx"), combined),
        Fused(
            "npu_moe_distribute_combine_add_rms_norm",
            to_combine(middle="expand_idx", residual_x=of_tokens(1), gamma=vector(WIDTH)),
            normed,
        ),
        Fused(
            "npu_moe_distribute_combine_add_rms_norm",
            to_combine(middle="expand_idx", residual_x=of_tokens(1), gamma=vector(WIDTH), **COPIES),
            normed,
        ),
    ],
    "moe_alltoallv": [
        Fused("npu_alltoallv_gmm", grouped(), alltoallv_gmm, FLOATS),
        Fused("npu_alltoallv_gmm", grouped(transposed=True, shared=True), alltoallv_gmm, FLOATS),
        Fused("npu_gmm_alltoallv", grouped(back=True), gmm_alltoallv, FLOATS),
        Fused("npu_gmm_alltoallv", grouped(back=True, transposed=True, shared=True), gmm_alltoallv, FLOATS),
        Fused("npu_alltoallv_quant_gmm", grouped(quantized=True), alltoallv_gmm, ("int8",)),
        Fused("npu_quant_gmm_alltoallv", grouped(back=True, quantized=True), gmm_alltoallv, ("int8",)),
    ],
    "parallel_matmuls": fused_matmul_cases.CASES,
}
