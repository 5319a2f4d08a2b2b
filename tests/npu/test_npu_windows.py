"""Rows between ranks of attention and ranks of experts through windows (`npu_attention_to_ffn` and back)."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from npu_ranks import caught, caught_or, group
from on_ranks import on_ranks
from torch import Tensor

TOKENS, HIDDEN, K, EXPERTS, SHARED = 3, 48, 2, 4, 1
EACH = K + SHARED
RELAXED = {"ALLTOALLV_NPU_LIMITS": "relax", "ALLTOALLV_EMULATOR_WITH": "cann_ops_transformer"}


class Split(NamedTuple):
    """The first ranks have the experts, the others attention."""

    ffns: int
    workers: int
    cells: int  # of a row in the window of an FFN rank
    batches: int = 2

    @property
    def info(self) -> list[int]:
        return [self.workers, self.batches, 2 + TOKENS * EACH]

    @property
    def data(self) -> list[int]:
        return [self.workers, self.batches, TOKENS, EACH, self.cells]

    @property
    def attention(self) -> list[int]:
        return [self.batches, TOKENS, EACH]

    @property
    def table(self) -> Tensor:
        """Expert e is on rank e % ffns, and where there are two also on the other, with another number there."""
        rows = []
        for expert in range(EXPERTS + SHARED):
            holders = [(expert + i) % self.ffns for i in range(min(2, self.ffns))]
            pairs = [number for i, rank in enumerate(holders) for number in (rank, 10 * (i + 1) + expert)]
            rows.append([len(holders), *pairs, *[0] * (4 - len(pairs))])
        return torch.tensor([rows], dtype=torch.int32)


def _sent(worker: int) -> tuple[Tensor, Tensor]:
    """Tokens of an attention worker, and the experts of each."""
    made = torch.Generator().manual_seed(worker)
    ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:K] for _ in range(TOKENS)])
    return torch.randn(1, TOKENS, HIDDEN, generator=made).bfloat16(), ids.int()[None]


def _expected(split: Split, rank: int, batch: int, active: int, everywhere: bool) -> tuple[Tensor, dict[Any, Tensor]]:
    """The table of an FFN rank's window, and the row at each of its places that is written."""
    table, rows = torch.zeros(split.info, dtype=torch.int32), {}
    for worker in range(split.workers):
        x, ids = _sent(worker)
        for token in range(active):
            for place, expert in enumerate([*ids[0, token].tolist(), *range(EXPERTS, EXPERTS + SHARED)]):
                holders = split.table[0, expert].tolist()
                at = 1 + 2 * (worker % holders[0])
                if holders[at] == rank:
                    table[worker, batch, 2 + token * EACH + place] = holders[at + 1]
                    rows[worker, batch, token, place] = x[0, token], expert
        if everywhere or any(key[0] == worker for key in rows):
            table[worker, batch, 0] = 1
    return table, rows


def _tables(window: Tensor, info: list[int], dtype: torch.dtype, data: list[int]) -> tuple[Tensor, Tensor]:
    """The two parts of a window."""
    numbers = torch.Size(info).numel()
    begin = -(-4 * numbers // 512) * 512
    nbytes = torch.Size(data).numel() * dtype.itemsize
    window = window.cpu()
    return window[: 4 * numbers].view(torch.int32).view(info), window[begin : begin + nbytes].view(dtype).view(data)


def _name(world: dist.ProcessGroup, rank: int) -> str:
    name: str = world._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    return name


@pytest.mark.parametrize("mode", ["all", "some", "masked", "int8", "smooth"])
@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False, env=RELAXED)
def test_tokens_come_to_their_experts_and_back(rank: int, size: int, mode: str, file: str) -> None:
    quantized = mode in ("int8", "smooth")
    split = Split(size // 2, size - size // 2, HIDDEN + 128 if quantized else HIDDEN)
    batch, active = 1, 2 if mode == "masked" else TOKENS
    smooth = torch.rand(1, EXPERTS + SHARED, HIDDEN, generator=torch.Generator().manual_seed(9)) + 0.5
    with group(rank, size, file) as (world, device):
        npu: Any = importlib.import_module("torch_npu")
        backend: Any = world._get_backend(torch.device("npu"))
        assert "has no window" in str(caught(backend._get_window_mem))
        others = range(split.ffns, size) if rank < split.ffns else range(split.ffns)
        backend._window_register_and_exchange(1 << 16, list(others))
        window = backend._get_window_mem()
        assert "has a window, expected none" in str(caught(lambda: backend._window_register_and_exchange(1, [0])))
        back = [split.batches, TOKENS, EACH]
        if rank >= split.ffns:
            worker = rank - split.ffns
            x, ids = _sent(worker)
            one = [torch.tensor([number], dtype=torch.int32, device=device) for number in (worker, batch, 0)]
            options: dict[str, Any] = {"sync_flag": int(mode == "some"), "quant_mode": 2 if quantized else 0}
            if mode == "masked":
                options["active_mask"] = torch.tensor([[True] * active + [False] * (TOKENS - active)], device=device)
            if mode == "smooth":
                options["scales"] = smooth.to(device)
            npu.npu_attention_to_ffn(
                x.to(device), *one, ids.to(device), split.table.to(device), _name(world, rank), size,
                split.info, split.data, split.attention, EXPERTS, **options,
            )  # fmt: skip
        dist.barrier()
        if rank < split.ffns:
            wanted, rows = _expected(split, rank, batch, active, mode != "some")
            table, data = _tables(window, split.info, torch.int8 if quantized else torch.bfloat16, split.data)
            assert torch.equal(table, wanted)
            for place, (row, expert) in rows.items():
                if quantized:
                    wide = row.float() * smooth[0, expert] if mode == "smooth" else row.float()
                    factor = 127 / wide.abs().max()
                    assert torch.equal(data[place][:HIDDEN], (wide * factor).round().to(torch.int8))
                    assert torch.equal(data[place][64:68].clone().view(torch.float32), 1 / factor[None])
                else:
                    assert torch.equal(data[place], row)
            assert not data[[batch - 1 if i == 1 else slice(None) for i in range(5)]].any()  # the other micro batch
            # Each row comes back, times its expert's number and one.
            keys = list(rows)
            columns = [torch.tensor([key[i] for key in keys], dtype=torch.int32, device=device) for i in range(4)]
            results = torch.stack([row * (expert + 1) for row, expert in rows.values()])
            npu.npu_ffn_to_attention(
                results.to(device), *columns, torch.tensor([len(keys)], device=device), _name(world, rank), size,
                back, [*back, HIDDEN],
                attn_rank_table=torch.arange(split.ffns, size, dtype=torch.int32, device=device),
            )  # fmt: skip
        dist.barrier()
        if rank >= split.ffns:
            flags, data = _tables(window, back, torch.bfloat16, [*back, HIDDEN])
            assert flags[batch].all()  # what is masked counts as come back
            assert not flags[1 - batch].any()
            for token in range(active):
                chosen = [*ids[0, token].tolist(), *range(EXPERTS, EXPERTS + SHARED)]
                wanted = torch.stack([x[0, token] * (expert + 1) for expert in chosen])
                assert torch.equal(data[batch, token], wanted)
            assert not data[batch, active:].any()


@on_ranks(2, communicator=False, env=RELAXED)
def test_an_attention_rank_waits_until_its_rows_are_taken(rank: int, size: int, file: str) -> None:
    """By the names of CANN's package; a rank that has died or forgets to take them ends the wait with an error."""
    split = Split(1, 1, HIDDEN, batches=1)
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        if rank == 0:
            buffer = package.get_buffer_for_ffn_to_attention(world, size, split.attention, [*split.attention, HIDDEN])
        else:
            buffer = package.get_buffer_for_attention_to_ffn(world, size, split.info, split.data)
        assert buffer.get_window_addr() == buffer.context.data_ptr()
        x, ids = _sent(0)
        zero = torch.zeros(1, dtype=torch.int32, device=device)

        def send() -> object:
            return caught_or(
                lambda: package.attention_to_ffn(
                    buffer, x.to(device), zero, zero, zero, ids.to(device), split.table.to(device), split.attention,
                    EXPERTS,
                )
            )  # fmt: skip

        if rank == 1:
            assert send() is None
            os.environ["ALLTOALLV_EMULATOR_EXEC_TIMEOUT"] = "1"
            assert "rank 0 has not taken the rows of before within 1 s" in str(send())
            del os.environ["ALLTOALLV_EMULATOR_EXEC_TIMEOUT"]
        dist.barrier()
        if rank == 0:
            time.sleep(0.2)
            buffer.context[:4] = 0
            torch.npu.synchronize()
            while not int(buffer.context[0]):
                time.sleep(0.01)
            rows = torch.ones(2, HIDDEN, dtype=torch.float16, device=device)
            two = torch.tensor([0, 1], dtype=torch.int32, device=device)
            zeros = torch.zeros_like(two)
            package.ffn_to_attention(
                buffer, rows, zeros, zeros, two, two, torch.tensor([1], device=device),
                attn_rank_table=torch.tensor([1], dtype=torch.int32, device=device),
            )  # fmt: skip
        else:
            assert send() is None
            while not int(buffer.context[0]):
                time.sleep(0.01)
            assert buffer.context[:4].view(torch.int32).tolist() == [1]
            assert not buffer.context[4 : 4 * EACH].any()  # only the first row counted
        dist.barrier()
        buffer.destroy()
        assert buffer.get_window_addr() == 0


@on_ranks(2, communicator=False, env=RELAXED)
def test_what_windows_refuse(rank: int, size: int, file: str) -> None:
    split = Split(1, 1, HIDDEN)
    with group(rank, size, file) as (world, device):
        npu: Any = importlib.import_module("torch_npu")
        x, ids = _sent(0)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        one = {
            "x": x.to(device), "session_id": zero, "micro_batch_id": zero, "layer_id": zero,
            "expert_ids": ids.to(device), "expert_rank_table": split.table.to(device), "group": _name(world, rank),
            "world_size": size, "ffn_token_info_table_shape": split.info, "ffn_token_data_shape": split.data,
            "attn_token_info_table_shape": split.attention, "moe_expert_num": EXPERTS,
        }  # fmt: skip

        def refused(**changed: Any) -> str:
            return str(caught(lambda: npu.npu_attention_to_ffn(**one | changed)))

        assert "expected a group whose ranks have windows" in refused().replace("the emulator expects", "expected")
        world._get_backend(torch.device("npu"))._window_register_and_exchange(1024, [0])
        if rank == 0:
            assert "the window of rank 0 is of 1024 bytes" in refused()
        for changed, text in (
            ({"x": x[0].to(device)}, "the shape (1, tokens, hidden)"),
            ({"expert_ids": ids.to(device) + EXPERTS}, "numbers from 0 to 3"),
            ({"expert_ids": torch.zeros_like(ids, device=device)}, "no expert twice"),
            ({"session_id": zero + 1}, "session_id is 1; the emulator expects 0 to 0"),
            ({"micro_batch_id": zero + 2}, "micro_batch_id is 2; the emulator expects 0 to 1"),
            ({"layer_id": zero + 1}, "layer_id is 1"),
            ({"quant_mode": 1}, "quant_mode is 1; the emulator expects 0 or 2"),
            ({"quant_mode": 2}, f"the last {HIDDEN + 128} at least"),
            ({"sync_flag": 2}, "sync_flag is 2"),
            ({"scales": torch.ones(1, device=device)}, "None without quant_mode 2"),
            ({"active_mask": torch.tensor([[True, False, True]], device=device)}, "no True behind a False"),
            ({"ffn_start_rank_id": 2}, "ffn_start_rank_id is 2"),
            ({"ffn_token_info_table_shape": [1, 2, 3]}, "ffn_token_info_table_shape is [1, 2, 3]"),
            ({"attn_token_info_table_shape": [1, 2, 3]}, "attn_token_info_table_shape is [1, 2, 3]"),
            ({"expert_rank_table": split.table.to(device) * 0}, "how many ranks, and each"),
            ({"world_size": 3}, "the world size is 3, expected 2"),
        ):
            assert text in refused(**changed), changed
