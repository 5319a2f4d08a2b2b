"""Windows: memory of a rank's NPU into which other ranks write, and the two operators that send rows through them.

Where attention and experts (FFN) have ranks of their own, each rank has a window: a table of int32, and from the next
512 bytes on rows. `attention_to_ffn` and `ffn_to_attention` write both while the receiver does something else, which
looks into its table for what has come.

    FFN         table [attention workers, micro batches, 2 + tokens * experts]: 1 when all is there, the layer, and the
                number on its rank of the expert of each row; rows [attention workers, micro batches, tokens, experts]
    attention   table [micro batches, tokens, experts]: 1 for each row that is there; rows in the same order

``experts`` are those of a token, shared ones behind the others.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv.errors import CommTimeoutError
from alltoallv.npu_ops import groups, limits
from alltoallv.npu_ops.registry import Formula, Operator, expect

__all__ = ["FORMULAS", "OneSided", "Place", "drop", "install", "make", "window_bytes"]

_ALIGNED = 512  # rows begin at a multiple
_SCALE_BYTES = 128  # behind a row of int8, the first 4 for its scale
_READY = torch.tensor([1], dtype=torch.int32)


class _Bytes(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Place(NamedTuple):
    """Where memory of a rank lies that others reach."""

    process: int
    address: int
    nbytes: int

    def copy(self, function: str, rank: int, offset: int, address: int, nbytes: int) -> None:
        """Copies between it and this process, by `process_vm_writev` or `process_vm_readv`; the rank is for errors."""
        fits = 0 <= offset <= self.nbytes - nbytes
        expect(fits, f"the window of rank {rank}", f"of {self.nbytes} bytes", f"{offset + nbytes} at least")
        here, there = _Bytes(address, nbytes), _Bytes(self.address + offset, nbytes)
        libc = ctypes.CDLL(None, use_errno=True)
        done = getattr(libc, function)(self.process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if done != nbytes:
            raise RuntimeError(f"the memory of rank {rank} cannot be reached: {os.strerror(ctypes.get_errno())}")


class _Window:
    """This rank's window, and those of the ranks that it may write to."""

    def __init__(self, memory: Tensor, places: dict[int, Place]) -> None:
        self.memory, self._places = memory, places

    def write(self, rank: int, offset: int, data: Tensor) -> None:
        """Writes a tensor of host memory into the window of a rank, ``offset`` bytes behind its start."""
        data = data.contiguous()
        self._copy("process_vm_writev", rank, offset, data.data_ptr(), data.nbytes)

    def read(self, rank: int, offset: int) -> int:
        """Returns a number of a rank's table."""
        number = ctypes.c_int32()
        self._copy("process_vm_readv", rank, offset, ctypes.addressof(number), ctypes.sizeof(number))
        return int(number.value)

    def _copy(self, function: str, rank: int, offset: int, address: int, nbytes: int) -> None:
        known = f"one of {sorted(self._places)}, with which this rank has exchanged windows"
        expect(rank in self._places, "the receiver", f"rank {rank}", known)
        self._places[rank].copy(function, rank, offset, address, nbytes)


_windows: weakref.WeakKeyDictionary[dist.ProcessGroup, _Window] = weakref.WeakKeyDictionary()


def make(group: dist.ProcessGroup, nbytes: int, ranks: Sequence[int]) -> Tensor:
    """Makes this rank's window, of zeros, and learns where those of other ranks lie; all ranks of the group call it.

    Args:
        group: The ranks.
        nbytes: The size of this rank's window.
        ranks: To which of them this rank will write.

    Raises:
        RuntimeError: The group has a window.
    """
    if group in _windows:
        raise RuntimeError("the group has a window, expected none: a rank registers one window in a group")
    device = torch.device("npu", torch.npu.current_device())
    peers = groups.Group(group, device)
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.npu.synchronize(device)  # before a peer learns of it
    every = peers.all_gather(torch.tensor([os.getpid(), memory.data_ptr(), nbytes])).tolist()
    _windows[group] = _Window(memory, {rank: Place(*every[rank]) for rank in {*ranks, peers.rank}})
    return memory


def drop(group: dist.ProcessGroup) -> None:
    """Frees this rank's window, if it has one."""
    _windows.pop(group, None)


def window_bytes(info: Sequence[int], data: Sequence[int], itemsize: int) -> int:
    """Returns the size of a window with a table and rows of these shapes."""
    return _table_bytes(info) + math.prod(data) * itemsize


def _table_bytes(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) * 4 // _ALIGNED) * _ALIGNED


def install() -> None:
    """Gives torch_npu's process group windows: its own ask HCCL for them."""
    backend: Any = importlib.import_module("torch_npu._C._distributed_c10d").ProcessGroupHCCL
    if hasattr(backend, "_window_register_and_exchange"):
        backend._window_register_and_exchange = _register
        backend._get_window_mem = _memory


def _group_of(backend: Any) -> dist.ProcessGroup:
    device = torch.device("npu", torch.npu.current_device())
    found = [
        group
        for group in dist.distributed_c10d._world.pg_map
        if "npu" in {kind.type for kind in group._device_types} and group._get_backend(device) is backend
    ]
    if not found:
        raise RuntimeError("no process group of torch.distributed has this backend, expected one")
    return found[0]


def _register(backend: Any, window_size: int, peer_ranks: Sequence[int]) -> None:
    make(_group_of(backend), window_size, peer_ranks)


def _memory(backend: Any) -> Tensor:
    window = _windows.get(_group_of(backend))
    if window is None:
        raise RuntimeError("the group has no window, expected _window_register_and_exchange before _get_window_mem")
    return window.memory


class OneSided(Operator):
    """An operator whose peers take no part in it: none waits to hear that a call is refused."""

    def _notify_peers(self, arguments: dict[str, Any], why: str) -> None:
        pass


def _window_of(hcom: str, world_size: int) -> tuple[groups.Group, _Window]:
    group = groups.named(hcom, world_size)
    window = _windows.get(group._group or dist.group.WORLD)
    expect(window is not None, "group", repr(hcom), "a group whose ranks have windows (_window_register_and_exchange)")
    assert window is not None
    return group, window


def _one(name: str, value: Tensor, end: int) -> int:
    fits = value.shape == (1,) and value.dtype == torch.int32
    expect(fits, name, value, "one number of int32: one group of tokens")
    number = int(value)
    expect(0 <= number < end, name, number, f"0 to {end - 1}")
    return number


def _wait_until_free(window: _Window, rank: int, offset: int) -> None:
    """Waits while the receiver has not taken what this rank sent before."""
    text = os.environ.get("ALLTOALLV_EMULATOR_EXEC_TIMEOUT") or os.environ.get("HCCL_EXEC_TIMEOUT") or "1836"
    seconds, begin = float(text), time.monotonic()
    while window.read(rank, offset) == 1:
        if 0 < seconds < time.monotonic() - begin:
            raise CommTimeoutError(f"rank {rank} has not taken the rows of before within {seconds:g} s", id=4009)
        time.sleep(1e-4)


def _quantized(rows: Tensor) -> Tensor:
    """Returns rows of int8, each with its scale behind it, as bytes."""
    factors = 127 / rows.abs().amax(-1, keepdim=True)
    codes = (rows * factors).round().nan_to_num(0).to(torch.int8)
    result = codes.new_zeros(*codes.shape[:-1], codes.size(-1) + _SCALE_BYTES)
    result[..., : codes.size(-1)] = codes
    at = -(-codes.size(-1) // 32) * 32
    result[..., at : at + 4] = (1 / factors).view(torch.int8)
    return result


def attention_to_ffn(
    x: Tensor,
    session_id: Tensor,
    micro_batch_id: Tensor,
    layer_id: Tensor,
    expert_ids: Tensor,
    expert_rank_table: Tensor,
    group: str,
    world_size: int,
    ffn_token_info_table_shape: list[int],
    ffn_token_data_shape: list[int],
    attn_token_info_table_shape: list[int],
    moe_expert_num: int,
    scales: Tensor | None,
    active_mask: Tensor | None,
    quant_mode: int,
    sync_flag: int,
    ffn_start_rank_id: int,
) -> None:
    """Writes each token into the windows of the ranks of its experts, and then 1 and the layer where the table says so.

    An expert's row of ``expert_rank_table`` has how many ranks hold it, and for each the rank and the expert's number
    there; attention worker i takes number i modulo them. With ``sync_flag`` 0 all FFN ranks are told that all is there,
    with 1 those that got a row. What `active_mask` leaves out counts as having come back already.
    """
    peers, window = _window_of(group, world_size)
    floats = x.dtype in (torch.float16, torch.bfloat16)
    expect(x.dim() == 3 and len(x) == 1 and floats, "x", x, "float16 or bfloat16 in the shape (1, tokens, hidden)")
    (_, tokens, hidden), k = x.shape, expert_ids.size(-1)
    ids_fit = expert_ids.shape == (1, tokens, k) and expert_ids.dtype == torch.int32
    expect(ids_fit, "expert_ids", expert_ids, f"int32 in the shape (1, {tokens}, k)")
    in_range = ((expert_ids >= 0) & (expert_ids < moe_expert_num)).all()
    expect(in_range, "expert_ids", expert_ids.tolist(), f"numbers from 0 to {moe_expert_num - 1}")
    expect(
        all(len({*row}) == k for row in expert_ids[0].tolist()), "expert_ids", expert_ids.tolist(), "no expert twice"
    )
    table_fits = expert_rank_table.dim() == 3 and len(expert_rank_table) == 1 and expert_rank_table.dtype == torch.int32
    expect(table_fits, "expert_rank_table", expert_rank_table, "int32 in the shape (1, experts, m)")
    experts = expert_rank_table.size(1)
    shared = experts - moe_expert_num
    expect(shared >= 0, "expert_rank_table", expert_rank_table, f"{moe_expert_num} experts at least, moe_expert_num")
    each = k + shared
    workers, batches = [*ffn_token_info_table_shape, 0, 0][:2]
    for name, shape, expected in (
        ("ffn_token_info_table_shape", ffn_token_info_table_shape, [workers, batches, 2 + tokens * each]),
        ("ffn_token_data_shape", ffn_token_data_shape[:4], [workers, batches, tokens, each]),
        ("attn_token_info_table_shape", attn_token_info_table_shape, [batches, tokens, each]),
    ):
        expect(shape == expected, name, shape, f"{expected}, of {tokens} tokens with {each} experts each")
    quantized = quant_mode == 2
    expect(quant_mode in (0, 2), "quant_mode", quant_mode, "0 or 2")
    width = hidden + _SCALE_BYTES if quantized else hidden
    wide = len(ffn_token_data_shape) == 5 and ffn_token_data_shape[4] >= width
    expect(wide, "ffn_token_data_shape", ffn_token_data_shape, f"five numbers, the last {width} at least")
    expect(sync_flag in (0, 1), "sync_flag", sync_flag, "0 or 1")
    expect(scales is None or quantized, "scales", scales, "None without quant_mode 2")
    scales_fit = scales is None or (scales.shape == (1, experts, hidden) and scales.dtype == torch.float32)
    expect(scales_fit, "scales", scales, f"float32 in the shape (1, {experts}, {hidden})")
    mask = torch.ones(1, tokens, dtype=torch.bool) if active_mask is None else active_mask
    expect(
        mask.shape == (1, tokens) and mask.dtype == torch.bool, "active_mask", mask, f"bool in the shape (1, {tokens})"
    )
    active = int(mask.sum())
    expect(mask[0, :active].all(), "active_mask", mask.tolist(), "no True behind a False")
    ffns = range(ffn_start_rank_id, ffn_start_rank_id + world_size - workers)
    fits = 0 < workers < world_size and ffns.start >= 0 and ffns.stop <= world_size
    expect(fits, "ffn_start_rank_id", ffn_start_rank_id, f"a first of {len(ffns)} FFN ranks of {world_size}")
    session, batch = _one("session_id", session_id, workers), _one("micro_batch_id", micro_batch_id, batches)
    layer = _one("layer_id", layer_id, 1)
    use = limits.Handover("npu_attention_to_ffn", world_size, hidden, tokens, k, shared, moe_expert_num)
    limits.check(use.breaches)
    targets = [_rank_of(expert, row, session, ffns) for expert, row in enumerate(expert_rank_table[0].tolist())]

    info, cells = 4 * (session * batches + batch) * ffn_token_info_table_shape[2], ffn_token_data_shape[4]
    itemsize = 1 if quantized else x.itemsize
    rows_at = _table_bytes(ffn_token_info_table_shape) + (session * batches + batch) * tokens * each * cells * itemsize
    free: set[int] = set()
    for token in range(active):
        chosen = [*expert_ids[0, token].tolist(), *range(moe_expert_num, experts)]
        rows = x[0, token].expand(each, hidden)
        if quantized:
            rows = _quantized(rows.float() if scales is None else rows.float() * scales[0, chosen])
        for place, expert in enumerate(chosen, token * each):
            rank, number = targets[expert]
            if rank not in free:
                _wait_until_free(window, rank, info)
                free.add(rank)
            window.write(rank, rows_at + place * cells * itemsize, rows[place - token * each])
            window.write(rank, info + 4 * (2 + place), torch.tensor([number], dtype=torch.int32))
    for rank in ffns if sync_flag == 0 else sorted(free):
        window.write(rank, info, torch.tensor([1, layer], dtype=torch.int32))
    left_out = torch.ones((tokens - active) * each, dtype=torch.int32)
    if len(left_out):
        window.write(peers.rank, 4 * (batch * tokens + active) * each, left_out)


def _rank_of(expert: int, row: list[int], session: int, ffns: range) -> tuple[int, int]:
    """Returns the rank to which an attention worker sends an expert's rows, and the expert's number there."""
    expect(0 < row[0] <= (len(row) - 1) // 2, f"expert_rank_table of expert {expert}", row, "how many ranks, and each")
    place = 1 + 2 * (session % row[0])
    rank, number = row[place : place + 2]
    expect(rank in ffns, f"expert_rank_table of expert {expert}", row, f"ranks from {ffns.start} to {ffns.stop - 1}")
    return rank, number


def ffn_to_attention(
    x: Tensor,
    session_ids: Tensor,
    micro_batch_ids: Tensor,
    token_ids: Tensor,
    expert_offsets: Tensor,
    actual_token_num: Tensor,
    group: str,
    world_size: int,
    token_info_table_shape: list[int],
    token_data_shape: list[int],
    attn_rank_table: Tensor | None,
) -> None:
    """Writes the first ``actual_token_num`` rows into the windows of their attention workers, and 1 for each.

    Worker i is rank i, or number i of ``attn_rank_table``.
    """
    _, window = _window_of(group, world_size)
    floats = x.dtype in (torch.float16, torch.bfloat16)
    expect(x.dim() == 2 and floats, "x", x, "rows of float16 or bfloat16")
    shape = token_info_table_shape
    expect(len(shape) == 3, "token_info_table_shape", shape, "micro batches, tokens, and experts of a token")
    fits = len(token_data_shape) == 4 and token_data_shape[:3] == shape and token_data_shape[3] >= x.size(1)
    expect(fits, "token_data_shape", token_data_shape, f"{shape} and {x.size(1)} at least")
    batches, tokens, each = shape
    limits.check(limits.Handover("npu_ffn_to_attention", world_size, x.size(1), tokens, each, 0, 1, batches).breaches)
    table = list(range(world_size)) if attn_rank_table is None else attn_rank_table.tolist()
    indices = []
    for name, value, end in (
        ("session_ids", session_ids, len(table)),
        ("micro_batch_ids", micro_batch_ids, batches),
        ("token_ids", token_ids, tokens),
        ("expert_offsets", expert_offsets, each),
    ):
        fits = value.shape == (len(x),) and value.dtype == torch.int32
        expect(fits, name, value, f"{len(x)} numbers of int32, as x has rows")
        indices.append(value.tolist())
        expect(all(0 <= number < end for number in indices[-1]), name, indices[-1], f"numbers from 0 to {end - 1}")
    number = actual_token_num
    expect(number.shape == (1,) and number.dtype == torch.int64, "actual_token_num", number, "one number of int64")
    expect(0 <= int(number) <= len(x), "actual_token_num", int(number), f"0 to {len(x)}")
    rows_at, stride = _table_bytes(shape), token_data_shape[3] * x.itemsize
    for row, session, batch, token, offset in list(zip(x, *indices, strict=True))[: int(number)]:
        cell = (batch * tokens + token) * each + offset
        window.write(table[session], rows_at + cell * stride, row)
        window.write(table[session], 4 * cell, _READY)


FORMULAS = {
    "npu_attention_to_ffn": Formula(attention_to_ffn, frozenset(), True),
    "npu_ffn_to_attention": Formula(ffn_to_attention, frozenset(), True),
}
