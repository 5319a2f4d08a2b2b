"""`cann_ops_transformer.ElasticBuffer` on emulated NPUs: rows for experts and back, and a table that all ranks hold."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from npu_ranks import caught, group
from on_ranks import on_ranks
from torch import Tensor

WITH = {"ALLTOALLV_EMULATOR_WITH": "cann_ops_transformer", "ALLTOALLV_NPU_PRODUCT": "950"}
HIDDEN, EXPERTS, K, MOST = 32, 8, 3, 7
MiB = 1 << 20


def _routed(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, fewer on a later one, the experts of each, some of them none, and their weights."""
    made, tokens = torch.Generator().manual_seed(rank), MOST - 2 * rank % MOST
    ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:K] for _ in range(tokens)]).int()
    ids[torch.rand(ids.shape, generator=made) < 0.2] = -1
    return torch.randn(tokens, HIDDEN, generator=made), ids, torch.rand(tokens, K, generator=made)


def _expected(rank: int, size: int) -> list[tuple[int, int, int, int]]:
    """Each row of a rank: its expert, and the rank, token and place that it comes from."""
    local = EXPERTS // size
    every = [
        (expert, source, token, place)
        for source in range(size)
        for token, chosen in enumerate(_routed(source)[1].tolist())
        for place, expert in enumerate(chosen)
        if expert >= 0 and expert // local == rank
    ]
    return sorted(every)


def _buffer(world: Any, **more: Any) -> Any:
    package: Any = importlib.import_module("cann_ops_transformer")
    return package.ElasticBuffer(world, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=K, **more)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn with scales"])
@on_ranks(communicator=False, env=WITH)
def test_rows_go_to_their_experts(rank: int, size: int, kind: str, file: str) -> None:
    with group(rank, size, file) as (world, device):
        buffer, dtype = _buffer(world), getattr(torch, kind.split()[0])
        tokens = [_routed(source)[0].to(dtype) for source in range(size)]
        scales = [_routed(source)[0][:, :2].contiguous() for source in range(size)]
        _, ids, weights = _routed(rank)
        x: Any = tokens[rank].to(device)
        x = (x, scales[rank].to(device)) if "scales" in kind else x
        given = {"topk_idx": ids.to(device), "topk_weights": weights.to(device), "num_experts": EXPERTS}
        expected = _expected(rank, size)
        for sync in (True, False, None):
            rows, nothing, of_rows, handle = buffer.dispatch(x, **given, do_cpu_sync=sync)
            assert nothing is None
            count, room = len(expected), size * MOST * min(K, EXPERTS // size)
            rows, row_scales = rows if isinstance(rows, tuple) else (rows, None)
            assert len(rows) == len(of_rows) == len(handle.recv_src_metadata) == (room if sync is False else count)
            wanted = torch.stack([tokens[source][token].float() for _, source, token, _ in expected])
            assert rows.dtype == dtype
            assert torch.equal(rows[:count].cpu().float(), wanted)
            assert of_rows[:count].tolist() == [_routed(source)[2][t, k].item() for _, source, t, k in expected]
            if row_scales is not None:
                assert torch.equal(row_scales[:count].cpu(), torch.stack([scales[s][t] for _, s, t, _ in expected]))
            metadata = handle.recv_src_metadata[:count].tolist()
            assert [tuple(row[:3]) for row in metadata] == [row[1:] for row in expected]
            come = [sorted({(s, t) for _, s, t, _ in expected if s == source}) for source in range(size)]
            assert [row[3] for row in metadata] == [come[s].index((s, t)) for _, s, t, _ in expected]
            assert handle.num_recv_tokens_per_rank.tolist() == [len(each) for each in come]
            assert handle.num_recv_tokens == sum(map(len, come))
            local = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
            numbers = [sum(row[0] == expert for row in expected) for expert in local]
            assert handle.num_recv_tokens_per_expert.tolist() == numbers
            slots = handle.dst_buffer_slot_idx.cpu()
            assert torch.equal(slots < 0, ids < 0)
            assert torch.equal(handle.topk_idx.cpu(), ids)
            # Other rows in the same way.
            again, _, none, later = buffer.dispatch((x[0] if isinstance(x, tuple) else x).neg().to(dtype)
                                                    if dtype.itemsize > 1 else x, handle=handle)  # fmt: skip
            again = again[0] if isinstance(again, tuple) else again
            assert none is None
            assert torch.equal(again[:count].cpu().float(), -wanted if dtype.itemsize > 1 else wanted)
            assert torch.equal(later.recv_src_metadata[:count], handle.recv_src_metadata[:count])


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False, env=WITH)
def test_rows_come_back(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        buffer = _buffer(world)
        for dtype in (torch.bfloat16, torch.float16):
            x, ids, weights = _routed(rank)
            x = x.to(dtype)
            for sync in (True, False):
                rows, _, of_rows, handle = buffer.dispatch(
                    x.to(device), topk_idx=ids.to(device), topk_weights=weights.to(device), num_experts=EXPERTS,
                    do_cpu_sync=sync,
                )  # fmt: skip
                expert = torch.tensor([row[0] for row in _expected(rank, size)])
                factors = torch.ones(len(rows))
                factors[: len(expert)] = expert + 1.0
                rows = (rows.cpu().float() * factors.unsqueeze(1)).to(dtype).to(device)  # exact, or rounded once
                for weighted in (False, True):
                    y, back = buffer.combine(rows, handle, topk_weights=of_rows if weighted else None)
                    wanted = torch.zeros(len(x), HIDDEN)
                    for place in range(K):
                        each = (x.float() * (ids[:, place] + 1).unsqueeze(1)).to(dtype).float()
                        wanted += (
                            each * (weights[:, place].unsqueeze(1) if weighted else 1) * (ids[:, place] >= 0)[:, None]
                        )
                    assert torch.equal(y.cpu(), wanted.to(dtype))
                    assert (back is None) == (not weighted)
                    assert back is None or torch.equal(back.cpu(), weights * (ids >= 0))


@on_ranks(2, communicator=False, env=WITH)
def test_calls_that_are_refused(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        buffer = _buffer(world)
        x, ids, weights = (each.to(device) for each in _routed(0))
        x = x.bfloat16()

        def refused(*given: Any, **options: Any) -> str:
            return str(caught(lambda: buffer.dispatch(*given, **{"topk_idx": ids, "num_experts": EXPERTS} | options)))

        assert "int32 in (7, 3)" in refused(x, topk_idx=ids.long())
        assert "a multiple of 2, the number of ranks" in refused(x, num_experts=7)
        assert "numbers from 0 to 3, or -1 for none" in refused(x, num_experts=4)
        assert "3 tokens at most" in refused(x, num_max_tokens_per_rank=3)
        assert "rows of 32, the hidden of the buffer" in refused(x[:, :16])
        assert "float8 where there are scales" in refused((x, weights))
        assert "expected 2 to 2048 on 950" in refused(x, num_experts=4096)
        assert "expert_alignment is 2, expected 1" in refused(x, expert_alignment=2)
        assert "num_experts is None" in refused(x, num_experts=None)
        _, _, _, handle = buffer.dispatch(x, topk_idx=ids, num_experts=EXPERTS)
        assert "topk_idx is given together with handle" in refused(x, handle=handle)
        assert "as many rows as dispatch returned" in str(caught(lambda: buffer.combine(x, handle)))
        assert "bias is given, expected None" in str(caught(lambda: buffer.combine(x, handle, bias=x)))
        other = refused(x.half() if rank else x)
        assert "x's dtype is torch.bfloat16 on rank 0 and torch.float16 on rank 1" in other

        def made(**options: Any) -> str:
            return str(caught(lambda: package.ElasticBuffer(world, **options)))

        assert "a multiple of 2 MiB" in made(num_cpu_bytes=1000)
        assert "num_topk is None, expected num_max_tokens_per_rank, hidden and num_topk together" in made(
            num_max_tokens_per_rank=1, hidden=8
        )
        assert "1 at least for gradients" in made(with_grad=True)
        buffer.destroy()
        assert "called after destroy" in refused(x)


def _table(rank: int, entries: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(entries, 128, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False, env=WITH)
def test_a_table_that_all_ranks_hold(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        hint = package.ElasticBuffer.get_engram_storage_size_hint(5, 128, torch.float32)
        assert hint == 2 * MiB
        buffer = package.ElasticBuffer(world, num_cpu_bytes=hint)
        indices = torch.tensor([0, 5 * size - 1, 7, -1, 5 * size, 7], dtype=torch.int32)[: 6 - rank]
        assert "before engram_write" in str(caught(lambda: buffer.engram_fetch(indices.to(device))))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            buffer.engram_write(_table(rank, 5, dtype))
            every = torch.cat([_table(other, 5, dtype) for other in range(size)])
            wanted = torch.stack([every[i] if 0 <= i < 5 * size else torch.zeros(128, dtype=dtype) for i in indices])
            wait = buffer.engram_fetch(indices.to(device))
            assert "one at a time" in str(caught(lambda: buffer.engram_fetch(indices.to(device))))
            rows = wait()
            assert rows.device == device
            assert torch.equal(rows.cpu(), wanted)
            if rank == 0:  # a fetch asks nothing of other ranks
                assert torch.equal(buffer.engram_fetch(indices.to(device))().cpu(), wanted)
            buffer.barrier()
        assert "expected 2097152 at most" in str(caught(lambda: buffer.engram_write(torch.ones(20000, 128))))
        assert "a multiple of 128" in str(caught(lambda: buffer.engram_write(torch.ones(2, 100))))
        buffer.barrier(with_cpu_sync=True)
        buffer.destroy()
        assert "called after destroy" in str(caught(lambda: buffer.engram_fetch(indices.to(device))))


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False, env=WITH)
def test_gradients_of_a_table(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        buffer = package.ElasticBuffer(
            world, num_cpu_bytes=2 * MiB, num_max_tokens_per_rank=MOST, with_grad=True, explicitly_destroy=True
        )
        buffer.engram_write(_table(rank, 5, torch.float32))

        def asked(other: int) -> tuple[Tensor, Tensor]:
            made = torch.Generator().manual_seed(40 + other)
            count = MOST - other
            indices = torch.randint(-1, 5 * size + 1, (count,), generator=made).int()
            return indices, torch.randn(count, 128, generator=made)

        indices, grad = asked(rank)
        rows, context = buffer.engram_fetch(indices.to(device))()
        every = torch.cat([_table(other, 5, torch.float32) for other in range(size)])
        known = (indices >= 0) & (indices < 5 * size)
        assert torch.equal(rows.cpu()[known], every[indices[known].long()])
        assert context.send_counts.shape == (8 * size,)
        assert int(context.num_recv) == int(context.recv_counts.sum())
        assert context.recv_local_entry.shape == (MOST * size,)
        sums, entries = buffer.engram_fetch_grad(grad.to(device), context)
        wanted: dict[int, Tensor] = {}
        for other in range(size):
            for index, row in zip(*asked(other), strict=True):
                if 5 * rank <= index < 5 * (rank + 1):
                    entry = int(index) - 5 * rank
                    wanted[entry] = wanted.get(entry, torch.zeros(128)) + row
        assert entries.tolist() == sorted(wanted)
        assert torch.equal(sums.cpu(), torch.stack([wanted[entry] for entry in sorted(wanted)]))
        wrong = caught(lambda: buffer.engram_fetch_grad(grad[:1].to(device), context))
        assert f"of shape ({MOST - rank}, 128)" in str(wrong)
        buffer.destroy()


@on_ranks(1, communicator=False, env=WITH)
def test_the_buffer_of_hccl_that_rows_need(rank: int, size: int) -> None:
    """By hand: 2 ranks, 10 tokens of 64, 4 experts, 2 of them for a token."""
    package: Any = importlib.import_module("cann_ops_transformer")
    assert package.ElasticBuffer.get_moe_ep_ccl_buffer_size(2, 10, 64, 4, 2) == 1
    # Slots of 16896 bytes there and back, and of 17408 between servers, of which each rank may be one.
    need = 4096 * (8 * 16896 + 9 * 17408 + 8 * 512 + 8 * 16896) + 4096 * 8 * 512 + 8 * 4 * 512
    assert package.ElasticBuffer.get_moe_ep_ccl_buffer_size(8, 4096, 8192, 256, 8) == -(-need // (2 * MiB))
    error = caught(lambda: package.ElasticBuffer.get_moe_ep_ccl_buffer_size(8, 4096, 8192, 4096, 8))
    assert "num_experts is 4096, expected 2 to 2048" in str(error)
