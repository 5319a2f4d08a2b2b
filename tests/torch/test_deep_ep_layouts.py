"""Rows by expert in deep_ep: expanded dispatch and combine, and the low-latency calls, beside NumPy's definitions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from started import run

from alltoallv import Communicator, deep_ep
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerLostError, PeerMismatchError

EXPERTS, K, MOST, WIDTH, SIZE = 8, 3, 6, 256, 2
LOCAL = EXPERTS // SIZE


def problem(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, fewer on rank 1, with a token without experts and one with fewer, as on rank 1 all are of rank 0."""
    generator = torch.Generator().manual_seed(rank)
    n = MOST - rank
    ids = torch.rand(n, EXPERTS - LOCAL * rank, generator=generator).argsort(1)[:, :K]
    ids[0] = -1
    ids[1, 1:] = -1
    return torch.randn(n, WIDTH, generator=generator).bfloat16(), ids, torch.rand(n, K, generator=generator)


class Row(NamedTuple):
    """A token that arrives: from where, and its local experts."""

    source: int
    token: int
    x: torch.Tensor
    experts: list[int]
    weights: torch.Tensor


def arriving(rank: int) -> list[Row]:
    """The rows that a rank receives, in order."""
    rows = []
    for source in range(SIZE):
        for token, (x, ids, weights) in enumerate(zip(*problem(source), strict=True)):
            experts = [int(e) - rank * LOCAL if e // LOCAL == rank else -1 for e in ids]
            if max(experts) >= 0:
                rows.append(Row(source, token, x, experts, weights))
    return rows


def by_expert(rows: list[Row]) -> list[list[tuple[int, int]]]:
    """Of each local expert, which row and choice its rows are."""
    return [
        [(r, k) for r, row in enumerate(rows) for k in range(K) if row.experts[k] == expert] for expert in range(LOCAL)
    ]


@pytest.mark.parametrize(("alignment", "waits"), [(1, True), (4, True), (4, False)])
@on_ranks(SIZE)
def test_expanded_rows(comm: Communicator, alignment: int, waits: bool) -> None:
    buffer, (x, ids, weights), rows = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=MOST), *_known(comm.rank)
    stats = torch.zeros(LOCAL, dtype=torch.int32)
    given: dict[str, Any] = {"num_experts": EXPERTS, "expert_alignment": alignment, "do_expand": True}
    got, nothing, got_weights, handle, _ = buffer.dispatch(x, ids, weights, stats, do_cpu_sync=waits, **given)
    slots = np.full((len(rows), K), -1)
    start, ends = 0, []
    for expert in by_expert(rows):
        for place, (row, choice) in enumerate(expert, start):
            slots[row, choice] = place
        ends.append(start + len(expert))
        start += -(-len(expert) // alignment) * alignment
    total = start if waits else -(-(SIZE * MOST * K + LOCAL * (alignment - 1)) // alignment) * alignment
    expected, expected_weights = torch.zeros(total, WIDTH, dtype=x.dtype), torch.zeros(total)
    for row, of_row in zip(rows, slots, strict=True):
        for choice, slot in enumerate(of_row):
            if slot >= 0:
                expected[slot], expected_weights[slot] = row.x, row.weights[choice]
    assert nothing is None
    assert torch.equal(got, expected)
    assert torch.equal(got_weights, expected_weights)
    counts = [len(expert) for expert in by_expert(rows)]
    assert stats.tolist() == counts
    assert handle.num_recv_tokens_per_expert_list == ([-(-n // alignment) * alignment for n in counts] if waits else [])
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    sources = [row.source for row in rows]
    assert (
        handle.psum_num_recv_tokens_per_scaleup_rank.tolist()
        == np.cumsum(np.bincount(sources, minlength=SIZE)).tolist()
    )
    metadata = [
        [row.source * MOST + row.token, row.source * K + int(np.argmax(np.array(row.experts) >= 0)), *of_row]
        for row, of_row in zip(rows, slots.tolist(), strict=True)
    ]
    assert handle.recv_src_metadata[: len(rows)].tolist() == metadata
    assert len(handle.recv_src_metadata) == handle.num_recv_tokens == (len(rows) if waits else SIZE * MOST)
    assert handle.recv_src_metadata.dtype == handle.psum_num_recv_tokens_per_expert.dtype == torch.int32
    assert (handle.num_max_tokens_per_rank, handle.num_expanded_tokens, handle.do_expand) == (MOST, total, True)
    seen = [0] * SIZE
    for of_token, of_choices in zip(handle.dst_buffer_slot_idx.tolist(), ids.tolist(), strict=True):
        ranks = [expert // LOCAL for expert in of_choices]
        assert of_token == [seen[rank] if rank >= 0 else -1 for rank in ranks]
        for rank in {*ranks} - {-1}:
            seen[rank] += 1

    # Again, with codes and scales, other weights, and the scales by columns.
    more = {"handle": handle, "topk_weights": weights + 1, "do_expand": True, "do_zero_padding": True}
    pair = x.float().to(torch.float8_e4m3fn), x[:, :2].float()
    (codes, scales), _, again, same, _ = buffer.dispatch(pair, use_tma_aligned_col_major_sf=True, **more)
    assert same is handle
    assert torch.equal(codes.view(torch.uint8), expected.float().to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(scales, expected[:, :2].float())
    assert scales.stride() == (1, -(-total // 4) * 4)
    used = torch.from_numpy(slots[slots >= 0])
    assert torch.equal(again[used], (expected_weights + 1)[used])
    assert int((again != 0).sum()) == len(used)

    # Back: each rank's rows in the order of choices, rounded or not, then the ranks' in their order.
    once = deep_ep.ElasticBuffer(comm, allow_multiple_reduction=False)
    for sums_of, dtype in ((buffer, torch.bfloat16), (once, torch.bfloat16), (buffer, torch.float32)):
        mine, bias = _results(total, comm.rank, dtype), x.to(dtype)
        back, back_weights, _ = sums_of.combine(mine, handle, topk_weights=got_weights, bias=bias)
        sums = np.zeros((len(x), WIDTH), np.float32)
        for rank in range(SIZE):
            theirs, of_rank = arriving(rank), _results(64, rank, dtype).float().numpy()
            place, start = {}, 0
            for expert in by_expert(theirs):
                place |= {pair: start + n for n, pair in enumerate(expert)}
                start += -(-len(expert) // alignment) * alignment
            for r, row in enumerate(theirs):
                if row.source == comm.rank:
                    part = np.zeros(WIDTH, np.float32)
                    for k in range(K):
                        if row.experts[k] >= 0:
                            part += of_rank[place[r, k]]
                    rounded = torch.from_numpy(part).to(dtype).float().numpy()
                    sums[row.token] += rounded if sums_of.allow_multiple_reduction else part
        assert torch.equal(back, (torch.from_numpy(sums).to(dtype).float() + bias.float()).to(dtype))
        assert torch.equal(back_weights, weights * (ids >= 0))


@on_ranks(SIZE)
def test_masked_ranks_get_no_tokens(comm: Communicator) -> None:
    buffer, (x, ids, weights) = deep_ep.Buffer(comm, enable_shrink=True), problem(comm.rank)
    given: dict[str, Any] = {"num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS, "use_fp8": False}
    status = torch.full((SIZE,), 7, dtype=torch.int32)
    for masked in ([1], [], [0, 1], [0]):
        buffer.low_latency_clean_mask_buffer()
        for rank in masked:
            buffer.low_latency_update_mask_buffer(rank, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(rank in masked) for rank in range(SIZE)]
        left = ids.masked_fill(torch.isin(ids // LOCAL, torch.tensor(masked)), -1)
        got, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, **given)
        rows, numbers, expected, *_ = deep_ep.Buffer(comm).low_latency_dispatch(x, left, **given)
        assert torch.equal(got, rows)
        assert torch.equal(counts, numbers)
        assert comm.rank not in masked or int(counts.sum()) == 0
        back = buffer.low_latency_combine(2 * got, ids, weights, handle)[0]
        assert torch.equal(back, deep_ep.Buffer(comm).low_latency_combine(2 * rows, left, weights, expected)[0])
    buffer.low_latency_update_mask_buffer(0, comm.rank == 1)
    with pytest.raises(
        PeerMismatchError, match=r"rank 0 has masked ranks \[\], rank 1 has masked ranks \[0\].*A2A-3028"
    ):
        buffer.low_latency_dispatch(x, ids, **given)
    for call, text in (
        (
            lambda: buffer.low_latency_update_mask_buffer(SIZE, True),
            "rank_to_mask is 2, expected 0 <= rank_to_mask < 2",
        ),
        (lambda: buffer.low_latency_query_mask_buffer(status[:1]), "mask_status is torch.int32"),
        (deep_ep.Buffer(comm).low_latency_clean_mask_buffer, "enable_shrink is False, expected a Buffer with"),
    ):
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text):
            call()


def test_a_buffer_after_a_loss() -> None:
    """Another is made of the ranks that are left, whose dispatches serve; handles from before are refused."""
    comms = Communicator.threads(SIZE + 1, timeout=30)

    def run(comm: Communicator) -> None:
        ids = torch.tensor([[0, 1], [1, 0]])
        x, count = torch.full((2, 4), 1.0 + comm.rank), torch.zeros(2 * (SIZE + 1))
        old = deep_ep.Buffer(comm).dispatch(x, topk_idx=ids, num_tokens_per_expert=count)[4]
        if comm.rank == SIZE:
            comm.destroy()
            return
        with pytest.raises(PeerLostError):
            deep_ep.Buffer(comm).dispatch(x, old)
        buffer = deep_ep.Buffer(comm.shrink())
        with pytest.raises(
            InvalidParamError, match=r"handle is of a dispatch among 3 ranks, expected one among 2.*A2A-1239"
        ):
            buffer.dispatch(x, old)
        got, *_, handle, _ = buffer.dispatch(x, topk_idx=ids, num_tokens_per_expert=count[: 2 * SIZE])
        assert got[:, 0].tolist() == ([1.0, 1.0, 2.0, 2.0] if comm.rank == 0 else [])
        assert torch.equal(buffer.combine(2 * got, handle)[0], 2 * x)

    with ThreadPoolExecutor(len(comms)) as pool:
        for done in [pool.submit(run, comm) for comm in comms]:
            done.result()


def test_a_buffer_after_a_replacement(tmp_path: Path) -> None:
    """One of the group that `rejoin` makes serves, the newcomer's experts too; handles from before are refused."""
    program = """
import os, signal
import pytest, torch
from alltoallv import Communicator, deep_ep
from alltoallv.errors import InvalidParamError, PeerLostError

comm = Communicator.from_env(timeout=30)
ids, weights = torch.tensor([[0, 1], [1, 0], [1, -1]]), torch.ones(3, 2)
x, count = torch.full((3, 256), 1.0 + comm.rank).bfloat16(), torch.zeros(2)
old, buffer = None, deep_ep.Buffer(comm)
if comm.epoch == 0:
    old = buffer.dispatch(x, topk_idx=ids, num_tokens_per_expert=count)[4]
    of_expert, _, few, *_ = buffer.low_latency_dispatch(x, ids, 3, 2, use_fp8=False)
    try:
        while True:
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            buffer.dispatch(x, old)
    except PeerLostError:
        comm = comm.rejoin()
    buffer = deep_ep.Buffer(comm)
    for call in (
        lambda: buffer.dispatch(x, old),
        lambda: buffer.combine(x, old),
        lambda: buffer.low_latency_combine(of_expert, ids, weights, few),
    ):
        with pytest.raises(InvalidParamError, match="handle is of a dispatch in epoch 0, expected one in epoch 1"):
            call()
else:
    for call in (lambda: buffer.dispatch(x, topk_idx=ids, num_tokens_per_expert=count),) * 3:
        with pytest.raises(InvalidParamError, match="failed on rank 0: .*in epoch 0"):
            call()
for each in (buffer, deep_ep.ElasticBuffer(comm)):
    options = {"num_tokens_per_expert": count} if each is buffer else {"num_experts": 2}
    got, *_, handle, _ = each.dispatch(x, topk_idx=ids, **options)
    assert got[:, 0].tolist() == [1.0] * (2 + comm.rank) + [2.0] * (2 + comm.rank)
    assert torch.equal(each.combine(got, handle)[0], x * torch.tensor([2, 2, 1])[:, None])
rows, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, 3, 2, use_fp8=False)
assert counts.tolist() == [4 + 2 * comm.rank]
assert torch.equal(buffer.low_latency_combine(rows, ids, weights, handle)[0], x * torch.tensor([2, 2, 1])[:, None])
print(f"rank {comm.rank} of {comm.size}, epoch {comm.epoch}", flush=True)
"""
    result = run(tmp_path, program, "-n", "2", "--replace", "1", "--no-prefix", text=True)
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 2, epoch 1" for rank in range(2)], result.stderr
    assert result.returncode == 0, result.stderr


def _known(rank: int) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], list[Row]]:
    return problem(rank), arriving(rank)


def _results(rows: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank's experts make, at most 64 rows."""
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)[:rows]


@on_ranks(SIZE)
def test_a_handle_of_rows_by_rank(comm: Communicator) -> None:
    buffer, (x, ids, weights), rows = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=MOST), *_known(comm.rank)
    assert (buffer.rank_idx, buffer.num_ranks) == (comm.rank, SIZE)
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, SIZE)
    assert buffer.get_theoretical_num_qps(24) == 0
    buffer.barrier(with_cpu_sync=True)
    got, found, got_weights, handle, _ = buffer.dispatch(x, ids, weights, num_experts=EXPERTS, num_sms=24)
    assert found.tolist() == [row.experts for row in rows]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == np.cumsum([len(e) for e in by_expert(rows)]).tolist()
    assert handle.num_unaligned_recv_tokens_per_expert is None
    assert (handle.recv_src_metadata[:, 2:] == -1).all()
    assert (handle.num_sms, handle.topk_idx.tolist()) == (24, ids.tolist())
    assert handle.topk_idx.data_ptr() != ids.data_ptr()
    again, again_found, again_weights, _, _ = buffer.dispatch(x, handle=handle, topk_weights=weights)
    assert torch.equal(again, got)
    assert torch.equal(again_found, found)
    assert torch.equal(again_weights, got_weights)
    unsynchronized, all_found, _, other, _ = buffer.dispatch(
        x, ids, num_experts=EXPERTS, do_cpu_sync=False, do_handle_copy=False
    )
    assert len(unsynchronized) == SIZE * MOST
    assert torch.equal(unsynchronized[: len(rows)], got)
    assert (all_found[len(rows) :] == -1).all()
    assert other.topk_idx.data_ptr() == ids.data_ptr()
    assert torch.equal(buffer.combine(unsynchronized, other)[0], buffer.combine(got, handle)[0])


@on_ranks(SIZE)
def test_low_latency(comm: Communicator) -> None:
    buffer, (x, ids, weights), rows = deep_ep.Buffer(comm, low_latency_mode=True), *_known(comm.rank)
    capacity, stats = SIZE * MOST, torch.ones(LOCAL, dtype=torch.int32)
    given: dict[str, Any] = {"num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS}
    more = {"use_fp8": False, "cumulative_local_expert_recv_stats": stats, "return_recv_hook": True}
    got, counts, handle, event, hook = buffer.low_latency_dispatch(x, ids, **given, **more)
    hook()
    event.current_stream_wait()
    expected, source = torch.zeros(LOCAL, capacity, WIDTH, dtype=x.dtype), np.full((LOCAL, capacity), -1)
    layout = np.zeros((LOCAL, SIZE), np.int64)
    for expert, pairs in enumerate(by_expert(rows)):
        for place, (row, _) in enumerate(pairs):
            expected[expert, place], source[expert, place] = rows[row].x, rows[row].token
        of_rank = np.bincount([rows[row].source for row, _ in pairs], minlength=SIZE)
        layout[expert] = (np.cumsum(of_rank) - of_rank) * 2**32 + of_rank
    assert torch.equal(got, expected)
    assert counts.tolist() == [len(pairs) for pairs in by_expert(rows)]
    assert stats.tolist() == [len(pairs) + 1 for pairs in by_expert(rows)]
    assert handle[0].tolist() == source.tolist()
    assert handle[1].tolist() == layout.tolist()
    assert tuple(handle[2:5]) == (MOST, WIDTH, EXPERTS)

    groups = expected.float().numpy().reshape(LOCAL, capacity, -1, 128)
    largest = np.maximum(np.abs(groups).max(-1), np.float32(1e-4))
    real = (np.arange(capacity) < counts.numpy()[:, None])[..., None]
    for round_scale in (False, True):
        scales, factors = largest / np.float32(448), np.float32(448) / largest
        if round_scale:
            scales = np.exp2(np.ceil(np.log2(scales)))
            factors = 1 / scales
        codes = torch.from_numpy((groups * factors[..., None]).reshape(expected.shape)).to(torch.float8_e4m3fn)
        (ours, of_ours), *_ = buffer.low_latency_dispatch(x, ids, **given, round_scale=round_scale)
        assert torch.equal(ours.view(torch.uint8), codes.view(torch.uint8))
        assert np.array_equal(of_ours.numpy(), scales * real)
        assert of_ours.stride() == (capacity * WIDTH // 128, 1, capacity)
    wide = torch.cat([x, x], 1)
    (_, packed), *_ = buffer.low_latency_dispatch(wide, ids, **given, round_scale=True, use_ue8m0=True)
    exponents = (np.frexp(scales)[1] + 126) * real
    assert np.array_equal(packed.contiguous().view(torch.uint8).numpy(), np.concatenate([exponents, exponents], -1))

    results = _results(LOCAL * capacity, comm.rank, torch.float32).view(LOCAL, capacity, WIDTH)
    out = torch.empty_like(x, dtype=torch.float32)
    back, _, no_hook = buffer.low_latency_combine(results, ids, weights, handle, out=out)
    assert no_hook is None
    assert back is out
    made = np.zeros((len(x), K, WIDTH), np.float32)
    for rank in range(SIZE):
        theirs = arriving(rank)
        values = _results(LOCAL * capacity, rank, torch.float32).numpy()
        for expert, pairs in enumerate(by_expert(theirs)):
            for place, (row, k) in enumerate(pairs):
                if theirs[row].source == comm.rank:
                    made[theirs[row].token, k] = values[expert * capacity + place]
    total = np.zeros((len(x), WIDTH), np.float32)
    for k in range(K):
        total += weights.numpy()[:, k : k + 1] * made[:, k]
    assert torch.equal(back, torch.from_numpy(total))
    rounded = buffer.low_latency_combine(results.bfloat16(), ids, weights, handle)[0]
    assert rounded.dtype == torch.bfloat16

    narrow = x[:, :5]
    for call, text in (
        (lambda: buffer.low_latency_dispatch(narrow, ids, **given), "x has 5 columns, expected a multiple of 128"),
        (lambda: buffer.low_latency_dispatch(x, ids, **given, use_ue8m0=True), "expected round_scale with it"),
        (lambda: buffer.low_latency_dispatch(x, ids, 2, EXPERTS), "tokens_per_rank is 2, expected at least"),
        (lambda: buffer.low_latency_combine(results, ids + 1, weights, handle), "topk_idx is not what was dispatched"),
        (
            lambda: buffer.low_latency_combine(results[:1], ids, weights, handle),
            r"x has shape \(1, 12, 256\), expected",
        ),
        (lambda: buffer.low_latency_combine(results, ids, weights[:1], handle), "topk_weights has shape"),
    ):
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text):
            call()
