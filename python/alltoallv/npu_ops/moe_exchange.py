"""Sends tokens to the ranks of their experts and back (MC2); `parallel_matmuls` has products fused with one.

A choice is one of a token's K experts. Rows go sorted by expert, and within an expert by token; a receiver has them by
its expert, then by the rank that they come from. So combine finds the way back by the experts and by how many rows came
from whom, and needs nothing else that dispatch announced.

With two ranks of tensor parallelism (``tp_world_size`` 2) each rank has one expert, and the rows that arrive at one
also go to the other: its own rows come first, then the other's.

Ranks of shared experts come first. Each such rank counts as many experts as the others, of which only the first gets
rows: every token has one more choice for each shared expert, in front of its own, with weight 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.groups import Group
from alltoallv.npu_ops.layers import add_rms_norm
from alltoallv.npu_ops.matmuls import to_int8
from alltoallv.npu_ops.microscaling import Element, element_of, is_scale, packed, quantize_blocks, to_codes
from alltoallv.npu_ops.moe import by_expert
from alltoallv.npu_ops.quantization import quantize_rows
from alltoallv.npu_ops.registry import expect, present, this_call, variant

# Which rank has which experts, also after ranks have left, and where the choices of tokens go.


class Experts(NamedTuple):
    """Holds which rank has which experts. Zero, copy and const experts, which no rank has, follow by number."""

    group: Group
    operator: str
    moe: int  # experts of tokens' own choices, on the ranks after the shared experts'
    shared: int
    shared_ranks: int
    zero: int = 0
    copy: int = 0
    const: int = 0

    @property
    def local(self) -> int:
        return self.moe // (self.group.size - self.shared_ranks)

    @property
    def total(self) -> int:
        """Experts of all ranks, shared ones included."""
        return self.local * self.group.size

    @property
    def held(self) -> int:
        """Experts of this rank that receive rows."""
        return 1 if self.group.rank < self.shared_ranks else self.local

    @property
    def extra(self) -> int:
        """Choices of each token that are for shared experts."""
        return self.shared if self.shared_ranks else 0

    @property
    def copies(self) -> int:
        """Ranks that have each shared expert; the tokens of one rank go to one of them."""
        return self.shared_ranks // max(self.extra, 1)

    def room(self, tokens: int, k: int, any_rank: bool = False) -> int:
        """Returns how many rows this rank, or any, may receive when all ranks together have ``tokens``."""
        of_others = tokens * min(self.local, k)
        if not self.shared_ranks or not (any_rank or self.group.rank < self.shared_ranks):
            return of_others
        of_shared = tokens // self.group.size * -(-self.group.size // self.copies)
        return max(of_shared, of_others) if any_rank else of_shared

    def first(self, kind: str) -> int:
        """Returns the number of the first zero, copy or const expert."""
        return self.total + {"zero": 0, "copy": self.zero, "const": self.zero + self.copy}[kind]


def with_shared(
    experts: Experts, ids: Tensor, mask: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns choices by the experts' numbers on all ranks, shared experts first, with their mask and weights."""
    ranks = [experts.group.rank % experts.copies + i * experts.copies for i in range(experts.extra)]
    first = (ids.new_tensor(ranks) * experts.local).expand(len(ids), experts.extra)
    if mask is not None and mask.dim() == 2:
        mask = torch.cat([mask.bool().any(1, keepdim=True).expand(first.shape), mask.bool()], 1)
    if weights is not None:
        weights = torch.cat([torch.ones(first.shape), weights.float()], 1)
    return torch.cat([first, ids + experts.shared_ranks * experts.local], 1), mask, weights


def remaining(experts: Experts, elastic_info: Tensor | None) -> Experts:
    """Returns the experts of the ranks that ``elastic_info`` leaves, which have as many each as before.

    It holds whether ranks have left (0 or 1), how many ranks, ranks of shared experts and other experts are left, each
    rank's new number or -1, and the old number of each rank that is left. ``expert_ids`` number the experts left.
    """
    if elastic_info is None:
        return experts
    size, name = experts.group.size, "elastic_info"
    fits = elastic_info.dtype == torch.int32 and elastic_info.shape == (4 + 2 * size,)
    expect(fits, name, elastic_info, f"{4 + 2 * size} numbers of int32")
    limits.check(lambda product: ["elastic_info is given, expected None on A2"] if product == "A2" else [])
    shrunk, left, shared_ranks, moe, *tables = elastic_info.tolist()
    if not shrunk:
        return experts
    new, old = tables[:size], tables[size : size + left]
    ascend = old == sorted(set(old)) and all(0 <= rank < size for rank in old)
    right = ascend and len(old) == left and new == [old.index(i) if i in old else -1 for i in range(size)]
    expect(right, name, tables, "each rank's new number, or -1, and the old numbers in ascending order")
    expect(experts.group.rank in old, name, old, f"rank {experts.group.rank} among those that are left")
    as_before = moe == experts.local * (left - shared_ranks) > 0
    expect(as_before, name, [left, shared_ranks, moe], f"{experts.local} experts for each rank, as before")
    special = experts.zero + experts.copy + experts.const
    expect(not special, name, shrunk, "0, where there are zero, copy or const experts")
    this_call.part = experts.group.part(old)
    return experts._replace(group=this_call.part, moe=moe, shared_ranks=shared_ranks)


def chosen(ids: Tensor, mask: Tensor | None, experts: Experts) -> Tensor:
    """Returns the numbers of the choices that travel, sorted by expert."""
    there = ids < experts.total
    if mask is not None:
        there = there & (mask.bool().unsqueeze(1) if mask.dim() == 1 else mask.bool())
    order = ids.reshape(-1).long().sort(stable=True)[1]
    return order[there.reshape(-1)[order]]


def counts_of(ids: Tensor, choices: Tensor, experts: Experts) -> Tensor:
    """Returns how many rows go to each expert: one row of counts per rank."""
    numbers = ids.reshape(-1)[choices].long()
    return numbers.bincount(minlength=experts.total).view(experts.group.size, experts.local)


RESERVED = ("tp_send_counts", "expand_scales", "performance_info")
NEW_IN_V2 = {"elastic_info": None, "comm_alg": "", "zero_expert_num": 0, "copy_expert_num": 0, "const_expert_num": 0}
NOT_IN_V1 = {"y_dtype": None, "x_dtype": None, "scales_dtype": None}
_BY_BYTES = (290, 296, 297)  # hifloat8 and the dtypes of four bits, as torch_npu calls them


def check_moe(
    experts: Experts,
    left: Experts,
    x: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    rank: int,
    tp: Group | None,
    global_bs: int,
    algorithm: str,
    version: int,
) -> groups.Values:
    """Raises for what the formulas do not cover or the device refuses; returns what must be equal on all ranks.

    The choices are among the experts that are ``left``.
    """
    single_expert = tp is None or experts.local == 1
    expect(single_expert, "moe_expert_num", experts.moe, "one expert for each rank, for tp_world_size 2")
    expect(x.dim() == 2, "x", x, "two dimensions")
    expect(ids.dim() == 2 and ids.size(1) > 0, "expert_ids", ids, "a row for each token")
    expect(ids.dtype == torch.int32, "expert_ids", ids, "int32")
    group, hidden, (n, k) = experts.group, x.size(1), ids.shape
    expect(mask is None or mask.shape in ((n,), (n, k)), "x_active_mask", mask, f"the shape ({n},) or ({n}, {k})")
    expect(weights is None or weights.shape == (n, k), "expert_scales", weights, f"the shape ({n}, {k})")
    expect(rank == group.rank, "ep_rank_id", rank, f"{group.rank}, this rank of the group")
    count, ranks = experts.moe, experts.shared_ranks
    expect(0 <= ranks < group.size, "shared_expert_rank_num", ranks, f"0 to {group.size - 1}")
    divides = not ranks or (experts.shared > 0 and ranks % experts.shared == 0)
    expect(divides, "shared_expert_num", experts.shared, f"a divisor of shared_expert_rank_num, {ranks}")
    others = group.size - ranks
    last = count + experts.zero + experts.copy + experts.const
    fits = last + ranks * experts.local < 2**31
    expect(fits, "moe_expert_num", count, "fewer than 2**31 experts together: expert_ids are int32")
    expect(count > 0 and count % others == 0, "moe_expert_num", count, f"a multiple of {others} ranks")
    expect(global_bs % group.size == 0, "global_bs", global_bs, f"0 or a multiple of {group.size} ranks")
    last += left.moe - count
    expect(((ids >= 0) & (ids < last)).all(), "expert_ids", ids.tolist(), f"numbers from 0 to {last - 1}")
    first = mask is None or mask.dim() == 2 or mask.equal(mask.sort(descending=True)[0])
    expect(first, "x_active_mask", None if mask is None else mask.tolist(), "the active tokens first")
    distinct = ids.sort(1)[0].diff(dim=1).ne(0).all()
    expect(distinct, "expert_ids", ids.tolist(), "distinct experts for each token")
    most = global_bs // group.size or n
    expect(n <= most, "global_bs", global_bs, f"{n * group.size} at least, for {n} tokens")
    limits.check_dtype("x", x.dtype)
    limits.check(lambda product: ["tp_world_size is 2, expected 0 or 1 on A2"] if tp and product == "A2" else [])
    use = limits.MoE(group.size, count, hidden, most, k, algorithm, experts.shared, ranks, version)
    limits.check(use.breaches)
    same: groups.Values = {"the dtype of the rows": str(x.dtype), "the hidden size": hidden}
    same |= {"the number of experts of a token": k, "moe_expert_num": count}
    same |= {"global_bs": global_bs, "zero_expert_num": experts.zero, "copy_expert_num": experts.copy}
    same |= {"const_expert_num": experts.const, "the number of tokens": most}
    same |= {"tp_world_size": 1 if tp is None else 2, "elastic_info": f"{left.group.size} of {group.size} ranks"}
    return same | {"shared_expert_num": experts.shared, "shared_expert_rank_num": ranks}


def _tensor_parallel(name: str, size: int, rank: int, group_ep: str) -> Group | None:
    """Returns the group of the two ranks that share experts, or None if there is none."""
    expect(size in (0, 1, 2), "tp_world_size", size, "0, 1 or 2")
    if size < 2:
        return None
    expect(name not in ("", group_ep), "group_tp", repr(name), "the name of a group of two ranks, and not group_ep")
    tp = groups.named(name, size)
    expect(rank == tp.rank, "tp_rank_id", rank, f"{tp.rank}, this rank of the group")
    return tp


def _agree(group: Group, tp: Group | None, name: str, same: groups.Values) -> None:
    """Raises on all ranks unless they agree, of the group, and then of both groups of tensor parallelism."""
    group.agree(name, same)
    if tp is not None:
        this_call.met_tp = True
        tp.agree(name, same)


def _to_other(tp: Group, rows: Tensor, count: int) -> Tensor:
    """Sends rows to the other rank of tensor parallelism; returns the ``count`` rows that it sends."""
    sends, recvs = ([number if rank != tp.rank else 0 for rank in range(2)] for number in (len(rows), count))
    return _moved(tp, rows, sends, recvs)


def _moved(group: Group, rows: Tensor, sends: Sequence[int], recvs: Sequence[int]) -> Tensor:
    """Exchanges rows, float8 as bytes."""
    if rows.is_floating_point() and rows.itemsize == 1:
        return group.all_to_all(rows.view(torch.uint8), sends, recvs).view(rows.dtype)
    return group.all_to_all(rows, sends, recvs)


class Precision(NamedTuple):
    """Describes how rows travel: ``quant_mode``, the format that ``y_dtype`` names, and the scales that are given."""

    mode: int
    element: Element | None
    scales: Tensor | None

    def check(self, x: Tensor, experts: Experts, y_dtype: int | None, x_dtype: int | None) -> None:
        """Raises for what the formulas do not cover or the device refuses."""
        mode, scales, (rows, hidden) = self.mode, self.scales, x.shape
        expect(mode in range(6), "quant_mode", mode, "0 to 5")
        eights = x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
        plain = mode == 0 or not eights
        expect(plain, "x", x, f"float16 or bfloat16, for quant_mode {mode}")
        named = x_dtype is None or (mode == 0 and x_dtype in _BY_BYTES and x.dtype == torch.uint8)
        expect(named, "x_dtype", x_dtype, "None, or hifloat8 or a dtype of four bits, for bytes and quant_mode 0")
        supported = {
            2: y_dtype in (None, 1, 258) or (self.element is not None and not self.element.values),
            3: self.element is not None and not self.element.values,
            4: self.element is not None,
            5: self.element is not None,
        }
        expected = f"float8_e4m3fn, float8_e5m2{', a dtype of four bits' * (mode > 3)}{' or int8' * (mode == 2)}"
        right = supported.get(mode, y_dtype is None or (mode == 1 and y_dtype in (1, 258)))
        expect(right, "y_dtype", y_dtype, expected if mode > 1 else "None")
        of_experts = experts.extra + experts.moe, hidden
        if mode == 0:
            travels = scales is None or (eights and scales.dim() == 2 and len(scales) == rows)
            expect(travels, "scales", scales, "None with quant_mode 0, but for float8: then a row for each token")
        elif mode == 1:
            scale = present(scales, "scales", "scales, for quant_mode 1")
            expect(
                scale.shape in ((1,), (hidden,), of_experts), "scales", scale, f"1, {hidden} or {of_experts} numbers"
            )
        else:
            fits = scales is None or scales.shape == of_experts
            expect(fits, "scales", scales, f"the shape {of_experts}, a row for each expert, and None with quant_mode 0")
        newer = mode not in (0, 2) or self.element is not None or eights
        breach = f"quant_mode is {mode}, with y_dtype {y_dtype}, expected 0, or 2 with int8,"
        limits.check(lambda product: [f"{breach} on {product}"] if newer else [])

    def rows(self, experts: Experts, x: Tensor, ids: Tensor, choices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns each choice's token as it travels, times its expert's scales, and the scales that go with it."""
        mode, tokens, scales = self.mode, choices // ids.size(1), self.scales
        if mode == 0:
            by_bytes = x.itemsize == 1 and x.is_floating_point()  # torch does not choose rows of float8
            rows = x.view(torch.uint8)[tokens].view(x.dtype) if by_bytes else x[tokens]
            return rows, None if scales is None else scales.view(torch.uint8)[tokens].view(scales.dtype)
        rows = x.detach().float()[tokens]
        if scales is not None and scales.dim() == 2:
            # One row for each shared expert, then one for each other expert.
            column, behind = choices % ids.size(1), experts.shared_ranks * experts.local - experts.extra
            number = torch.where(column < experts.extra, column, ids.reshape(-1)[choices].long() - behind)
            rows = rows * scales.float()[number]
        elif scales is not None:
            rows = rows * scales.float()
        if mode == 1:
            return to_int8(rows), None
        if mode == 2:
            largest = torch.tensor(127.0 if self.element is None else self.element.largest)
            factor = torch.div(largest, rows.abs().amax(1))  # a number divided by a tensor would round twice
            values = (rows * factor.unsqueeze(1)).nan_to_num(0.0)
            return to_int8(values) if self.element is None else to_codes(values, self.element), 1.0 / factor
        assert self.element is not None
        if mode == 3:
            blocks = functional.pad(rows, (0, -rows.size(1) % 128)).unflatten(1, (-1, 128))
            own = blocks.abs().amax(2) / self.element.largest
            values = (blocks / own.unsqueeze(2)).nan_to_num(0.0).flatten(1)[:, : rows.size(1)]
            return to_codes(values, self.element), own
        codes, own = quantize_blocks(rows, self.element, rounds_up=mode == 5, smallest=1e-4 if mode == 5 else 0.0)
        return packed(codes, self.element), own.flatten(1)


def _dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    scales: Tensor | None,
    x_active_mask: Tensor | None,
    expert_scales: Tensor | None,
    elastic_info: Tensor | None,
    group_tp: str,
    tp_world_size: int,
    tp_rank_id: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
    quant_mode: int,
    global_bs: int,
    expert_token_nums_type: int,
    comm_alg: str,
    zero_expert_num: int,
    copy_expert_num: int,
    const_expert_num: int,
    y_dtype: int | None,
    x_dtype: int | None,
    scales_dtype: int | None,
    version: int,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kinds = "0 (sums) or 1 (counts)"
    expect(expert_token_nums_type in (0, 1), "expert_token_nums_type", expert_token_nums_type, kinds)
    group = groups.named(group_ep, ep_world_size)
    shared, special = (shared_expert_num, shared_expert_rank_num), (zero_expert_num, copy_expert_num, const_expert_num)
    all_experts = Experts(group, name, moe_expert_num, *shared, *special)
    experts = remaining(all_experts, elastic_info)
    group = experts.group
    tp = _tensor_parallel(group_tp, tp_world_size, tp_rank_id, group_ep)
    terms = x_active_mask, expert_scales, ep_rank_id, tp, global_bs, comm_alg, version
    same = check_moe(all_experts, experts, x, expert_ids, *terms)
    expect(tp is None or elastic_info is None, "elastic_info", elastic_info, "None, for tp_world_size 2")
    expect(len(x) == len(expert_ids), "x", x, f"{len(expert_ids)} rows, as many as expert_ids has")
    travels = Precision(quant_mode, element_of(y_dtype), scales)
    travels.check(x, experts, y_dtype, x_dtype)
    is_scale("scales", scales, scales_dtype)
    expect(tp is None or quant_mode in (0, 2), "quant_mode", quant_mode, "0 or 2, for tp_world_size 2")
    alone = tp is None or expert_scales is None
    expect(alone, "expert_scales", expert_scales, "None, for tp_world_size 2")
    same |= {"quant_mode": quant_mode, "y_dtype": str(y_dtype), "expert_token_nums_type": expert_token_nums_type}
    for argument, value in (("scales", scales), ("expert_scales", expert_scales)):
        same[f"the presence of {argument}"] = int(value is not None)
    _agree(group, tp, name, same)
    room = all_experts.room(global_bs or len(x) * all_experts.group.size, expert_ids.size(1), elastic_info is not None)
    ids, mask, weights = with_shared(experts, expert_ids, x_active_mask, expert_scales)
    choices = chosen(ids, mask, experts)
    sent = counts_of(ids, choices, experts)
    received = group.all_to_all(sent, [1] * group.size, [1] * group.size)
    sends, recvs, order = sent.sum(1).tolist(), received.sum(1).tolist(), by_expert(received)

    held = received[:, : experts.held]
    ends = held.t().reshape(-1).cumsum(0).to(torch.int32)
    per_expert = held.sum(0)
    of_tp = torch.zeros(tp_world_size, dtype=torch.int32)
    if tp is not None:
        of_both = tp.all_gather(ends)
        of_tp, ends = of_both[:, -1].contiguous(), torch.cat([ends, of_both[1 - tp.rank]])
        per_expert = of_tp.sum(0, keepdim=True, dtype=torch.int64)

    def exchanged(rows: Tensor) -> Tensor:
        arrived = _moved(group, rows, sends, recvs)
        if arrived.is_floating_point() and arrived.itemsize == 1:
            arrived = arrived.view(torch.uint8)  # torch does not choose rows of float8
        arrived = arrived[order]
        if tp is not None:
            arrived = torch.cat([arrived, _to_other(tp, arrived, int(of_tp[1 - tp.rank]))])
        rest = room * max(tp_world_size, 1) - len(arrived)
        arrived = torch.cat([arrived, arrived.new_zeros(rest, *arrived.shape[1:])])
        return arrived if rows.dtype == arrived.dtype else arrived.view(rows.dtype)

    rows, row_scales = travels.rows(experts, x, ids, choices)
    expanded = exchanged(rows)
    dynamic = torch.zeros(len(expanded)) if row_scales is None else exchanged(row_scales)
    arrived_weights = torch.zeros(0) if weights is None else exchanged(weights.reshape(-1)[choices])
    numbers = per_expert.cumsum(0) if expert_token_nums_type == 0 else per_expert
    if elastic_info is not None:  # results are as long as before ranks left, and as on ranks with all experts
        numbers = functional.pad(numbers, (0, all_experts.local - len(numbers)))
        ends = functional.pad(ends, (0, all_experts.local * all_experts.group.size - len(ends)))
    if version == 2:
        places = torch.zeros(128 * room, dtype=torch.int32)
    else:
        of_choices = torch.zeros(ids.numel(), dtype=torch.int32)
        of_choices[choices] = torch.cat([torch.arange(n) for n in sent.view(-1).tolist()]).to(torch.int32)
        places = of_choices.view(ids.shape)[:, experts.extra :].reshape(-1)
    return expanded, dynamic, places, numbers, ends, of_tp, arrived_weights


_RESULTS = "Returns this rank's rows, their scales, {}, the rows per expert, and the ends per expert and rank."
_PLACES = "the place of each choice among its expert's choices"
variant(_dispatch, "npu_moe_distribute_dispatch_v2", _RESULTS.format("zeros"), RESERVED, version=2)
variant(
    _dispatch,
    "npu_moe_distribute_dispatch",
    _RESULTS.format(_PLACES),
    RESERVED,
    version=1,
    **NEW_IN_V2,
    **NOT_IN_V1,
)


class _Special(NamedTuple):
    """Holds the arguments of copy and const experts: the original tokens, two factors and the summand."""

    tokens: Tensor | None = None
    alpha_1: Tensor | None = None
    alpha_2: Tensor | None = None
    value: Tensor | None = None

    def check(self, experts: Experts, shape: tuple[int, int]) -> None:
        """Raises unless there is what the experts need, for tokens of that shape."""
        needed = {"ori_x": experts.copy + experts.const}
        needed |= dict.fromkeys(("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"), experts.const)
        for (name, there), value in zip(needed.items(), self, strict=True):
            expect(value is not None or not there, name, value, "a tensor, where there are copy or const experts")
            if value is not None and there:
                fits = value.shape == shape if name == "ori_x" else value.numel() in (there, there * shape[1])
                expect(fits, name, value, f"the shape {shape if name == 'ori_x' else (there, shape[1])}")

    def of(self, experts: Experts, ids: Tensor, mask: Tensor | None) -> Tensor | float:
        """Returns what these experts make of their choices' tokens; zeros for every other choice."""
        if self.tokens is None or not experts.copy + experts.const:
            return 0.0
        flat, tokens = ids.reshape(-1).long(), self.tokens.float().repeat_interleave(ids.size(1), 0)
        first, end = experts.first("copy"), experts.first("const")
        result = tokens * ((flat >= first) & (flat < end)).unsqueeze(1)
        if experts.const:
            number = (flat - end).clamp(min=0)
            scale_1, scale_2, value = (t.float().view(experts.const, -1)[number] for t in self[1:] if t is not None)
            result = result + (scale_1 * tokens + scale_2 * value) * (flat >= end).unsqueeze(1)
        if mask is not None:
            mask = mask.repeat_interleave(ids.size(1)) if mask.dim() == 1 else mask.reshape(-1)
            result = result * mask.unsqueeze(1)
        return result


class _Rounded(torch.autograd.Function):
    """Exchanges rows as int8, each with a scale; gradients pass as if the rows had not been rounded."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sends: list[int], recvs: list[int]) -> Tensor:
        ctx.group, ctx.sends, ctx.recvs, ctx.dtype = group, sends, recvs, rows.dtype
        codes, scale = quantize_rows(rows.float(), torch.int8)
        return group.all_to_all(codes, sends, recvs).float() * group.all_to_all(scale, sends, recvs).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.group.all_to_all(grad, ctx.recvs, ctx.sends).to(ctx.dtype), None, None, None


def _combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor | None,
    gamma: Tensor | None,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    x_active_mask: Tensor | None,
    shared_expert_x: Tensor | None,
    ori_x: Tensor | None,
    const_expert_alpha_1: Tensor | None,
    const_expert_alpha_2: Tensor | None,
    const_expert_v: Tensor | None,
    elastic_info: Tensor | None,
    group_tp: str,
    tp_world_size: int,
    tp_rank_id: int,
    shared_expert_num: int,
    shared_expert_rank_num: int,
    global_bs: int,
    comm_quant_mode: int,
    comm_alg: str,
    norm_eps: float,
    zero_expert_num: int,
    copy_expert_num: int,
    const_expert_num: int,
    version: int,
    name: str,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Returns, for each token, the sum of scale times expert's output over its choices; with ``gamma`` its norm."""
    expect(comm_quant_mode in (0, 2), "comm_quant_mode", comm_quant_mode, "0 (none) or 2 (int8)")
    group = groups.named(group_ep, ep_world_size)
    alone = shared_expert_x is None or not shared_expert_rank_num
    expect(alone, "shared_expert_x", shared_expert_x, "None, where ranks have the shared experts")
    numbers = shared_expert_num, shared_expert_rank_num, zero_expert_num, copy_expert_num, const_expert_num
    all_experts = Experts(group, name, moe_expert_num, *numbers)
    experts = remaining(all_experts, elastic_info)
    group = experts.group
    special = _Special(ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    tp = _tensor_parallel(group_tp, tp_world_size, tp_rank_id, group_ep)
    terms = x_active_mask, expert_scales, ep_rank_id, tp, global_bs, comm_alg, version
    same = check_moe(all_experts, experts, expand_x, expert_ids, *terms)
    expect(tp is None or elastic_info is None, "elastic_info", elastic_info, "None, for tp_world_size 2")
    expect(tp is None or comm_quant_mode == 0, "comm_quant_mode", comm_quant_mode, "0, for tp_world_size 2")
    same |= {"comm_quant_mode": comm_quant_mode, "norm_eps": f"{norm_eps:g}"}
    shape, count = (len(expert_ids), expand_x.size(1)), experts.held * group.size
    special.check(experts, shape)
    for argument, value in (("shared_expert_x", shared_expert_x), ("residual_x", residual_x)):
        fits = value is None or value.numel() == math.prod(shape)
        expect(fits, argument, value, f"{math.prod(shape)} numbers, as the tokens have")
    expect(gamma is None or gamma.shape == shape[1:], "gamma", gamma, f"{shape[1]} numbers")
    needed = count * (1 if tp is None else 2)
    enough = ep_send_counts.dim() == 1 and len(ep_send_counts) >= needed
    expect(enough, "ep_send_counts", ep_send_counts, f"{needed} numbers at least")
    ends = ep_send_counts[:count].long()
    others = 0 if tp is None else int(ep_send_counts[needed - 1])
    total = int(ends[-1]) + others
    expect(len(expand_x) >= total, "expand_x", expand_x, f"{total} rows at least, as ep_send_counts says")
    _agree(group, tp, name, same)
    ids, mask, weights = with_shared(experts, expert_ids, x_active_mask, expert_scales)
    assert weights is not None
    back = ends.diff(prepend=ends.new_zeros(1)).view(experts.held, group.size).t()
    back = torch.cat([back, back.new_zeros(group.size, experts.local - experts.held)], 1)
    choices = chosen(ids, mask, experts)
    expected = counts_of(ids, choices, experts)
    groups.check_counts(group, name, back.reshape(-1).tolist(), expected.reshape(-1).tolist())
    order = by_expert(back)
    rows = expand_x[: len(order)]
    if tp is not None:
        counts = tp.all_gather(torch.tensor([len(order), others]))
        expected_here = counts[1 - tp.rank].flip(0).tolist()
        expect([len(order), others] == expected_here, "ep_send_counts", [len(order), others], f"{expected_here}")
        rows = (rows.float() + _to_other(tp, expand_x[len(order) : total], len(order)).float()).to(expand_x.dtype)
    leaving = torch.empty_like(rows).index_copy(0, order, rows)
    sends, recvs = back.sum(1).tolist(), expected.sum(1).tolist()
    if comm_quant_mode == 2:
        arrived = _Rounded.apply(leaving, group, sends, recvs)
    else:
        arrived = group.all_to_all(leaving, sends, recvs).float()
    moved = arrived.new_zeros(ids.numel(), rows.size(1)).index_copy(0, choices, arrived)
    moved = moved + special.of(experts, ids, mask)
    tokens = (moved * weights.reshape(-1, 1)).view(-1, ids.size(1), rows.size(1)).sum(1)
    if shared_expert_x is not None:
        tokens = tokens + shared_expert_x.float().reshape(tokens.shape)
    if gamma is None or residual_x is None:
        return tokens.to(expand_x.dtype)
    y, rstd, total = add_rms_norm(tokens.view(residual_x.shape), residual_x, gamma, norm_eps)
    return y.to(residual_x.dtype), rstd, total.to(residual_x.dtype)


_NO_NORM = {"residual_x": None, "gamma": None, "norm_eps": 0.0}
_NO_CONSTANTS = dict.fromkeys(("ori_x", "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v"))
variant(
    _combine,
    "npu_moe_distribute_combine_v2",
    """Returns the tokens: each is the sum of its experts' outputs, times their scales, and of ``shared_expert_x``.

    With ``comm_quant_mode`` 2 the rows travel as int8, each with the scale that its largest value needs.
    """,
    (*RESERVED, "assist_info_for_combine"),
    version=2,
    **_NO_NORM,
)
variant(
    _combine,
    "npu_moe_distribute_combine",
    "Computes version 2 without its special experts.",
    (*RESERVED, "expand_idx"),
    version=1,
    **_NO_NORM,
    **_NO_CONSTANTS,
    **NEW_IN_V2,
)
variant(
    _combine,
    "npu_moe_distribute_combine_add_rms_norm",
    "Returns the norm of combine's result plus ``residual_x``, the norm's factor, and that sum.",
    (*RESERVED, "expand_idx"),
    version=2,
    comm_quant_mode=0,
)
