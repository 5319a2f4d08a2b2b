"""Moves rows as bytes to their ranks: the operators of `moe_ops` are built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls import headers
from alltoallv._calls.counts import packed, scaled, split_layout
from alltoallv._calls.dispatching import OPERATOR
from alltoallv._calls.guard import guard
from alltoallv._calls.routing import PAYLOADS, Numbers
from alltoallv.errors import InvalidTensorError
from alltoallv.quantization.spec import Quantization
from alltoallv.torch.eager import calls
from alltoallv.torch.eager.calls import AnyCommunicator
from alltoallv.torch.eager.tensors import as_input, core_name, empty
from alltoallv.torch.quantized.rows import DeviceRows, HostRows

_CODED = (torch.float32, torch.float16, torch.bfloat16)
Part = tuple[Tensor, Tensor | None]  # rows of bytes, and the indices of those that go


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of these dtypes are added and multiplied: at least float32."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype if dtype.itemsize >= 4 else torch.float32)
    return wide


def room(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialized tensor; on the host its pages have been touched before."""
    return empty(shape, dtype) if like.is_cpu else like.new_empty(shape, dtype=dtype)


def _codec(payload: str, length: int, device: torch.device) -> Any:
    how = Quantization(f"int{PAYLOADS[payload]}", group_size=max(length, 1))
    return HostRows(how, length) if device.type == "cpu" else DeviceRows(how, length, device)


def encode(rows: Tensor, payload: str | None) -> Tensor:
    """Returns one row of bytes per row: the values, or a scale and the codes."""
    if payload is None:
        return as_bytes(rows)
    if rows.dtype not in _CODED:
        raise InvalidTensorError(f"rows have dtype {rows.dtype}, expected float32, float16 or bfloat16 for codes", 13)
    codec = _codec(payload, rows.shape[1], rows.device)
    coded = room(rows, (len(rows), codec.stride), torch.uint8)
    codec.encode(rows, coded)
    return coded


def decode(coded: Tensor, payload: str | None, length: int, dtype: torch.dtype) -> Tensor:
    """Returns the rows that `encode` made bytes of."""
    if payload is None:
        return coded.view(dtype)
    out = room(coded, (len(coded), length), dtype)
    _codec(payload, length, coded.device).decode(coded.contiguous(), out, "saturate")
    return out


def encode_weighed(rows: Tensor, source: Tensor, gates: Tensor | None, payload: str | None) -> Tensor:
    """Returns what `encode` makes of rows ``source`` times their gates."""
    wide = torch.float32 if gates is None else sum_dtype(gates.dtype)
    if payload is None or not rows.is_cpu or rows.dtype not in _CODED or wide != torch.float32:
        return encode(weighed(rows, source, gates), payload)
    codec = _codec(payload, rows.shape[1], rows.device)
    coded = room(rows, (len(source), codec.stride), torch.uint8)
    codec.encode_weighed(rows, source, None if gates is None else gates[source].to(wide), coded)
    return coded


def decode_placed(coded: Tensor, payload: str | None, index: Tensor, out: Tensor, where: Tensor | None) -> None:
    """Does what `gather` does with the rows that `decode` returns."""
    if payload is None:
        gather(coded, index, as_bytes(out), where)
    elif coded.is_cpu:
        _codec(payload, out.shape[1], coded.device).decode_placed(coded, index, out, where)
    else:
        gather(decode(coded, payload, out.shape[1], out.dtype), index, out, where)


def add_decoded(coded: Tensor, payload: str | None, places: Tensor, complete: bool, out: Tensor) -> None:
    """Does what `add_placed` does with the rows that `decode` returns."""
    if payload is None or not coded.is_cpu:
        add_placed(decode(coded, payload, out.shape[1], out.dtype), places, complete, out)
    else:
        _codec(payload, out.shape[1], coded.device).add_placed(coded, places, out)


def split_codes(coded: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns codes of 8 bits ``[r, length]`` and scales ``[r, 1]`` of rows that `encode` has made."""
    begin = 4 if coded.is_cpu else 16
    return coded[:, begin : begin + length].view(torch.int8), coded[:, :4].view(torch.float32)


def gather(rows: Tensor, source: Tensor, out: Tensor, where: Tensor | None = None) -> None:
    """Sets row i of ``out``, row ``where[i]`` of a tensor on the host, to row ``source[i]``, or zeros if that is -1."""
    if rows.is_cpu:
        size = out.shape[1] * out.itemsize
        about = rows.data_ptr(), _stride(rows), source.data_ptr(), len(source), size
        _core.gather_rows(out.data_ptr(), _stride(out), *about, 0 if where is None else where.data_ptr())
    elif not len(rows):
        out.zero_()
    else:
        torch.index_select(rows, 0, source.clamp(min=0), out=out)
        out.view(torch.uint8)[source < 0] = 0


def _stride(rows: Tensor) -> int:
    return rows.stride(0) * rows.itemsize


def placed(rows: Tensor, source: Tensor, complete: bool) -> Tensor:
    """Returns a tensor whose row i is row ``source[i]``, or zeros where that is -1; ``complete``: it never is."""
    result = room(rows, (len(source), *rows.shape[1:]), rows.dtype)
    if complete and not rows.is_cpu:
        return torch.index_select(rows, 0, source, out=result)
    gather(rows, source, result)
    return result


def weighed(rows: Tensor, source: Tensor, gates: Tensor | None) -> Tensor:
    """Returns rows ``source`` times their gates in float32 or the wider dtype, in the dtype of the rows."""
    if gates is None:
        return placed(rows, source, True)
    wide = sum_dtype(rows.dtype, gates.dtype)
    if not rows.is_cpu or rows.dtype not in _CODED or wide != torch.float32:
        return placed(rows, source, True).to(wide).mul_(gates[source].to(wide)[:, None]).to(rows.dtype)
    result, each = room(rows, (len(source), rows.shape[1]), rows.dtype), gates[source].to(wide)
    about = rows.data_ptr(), source.data_ptr(), each.data_ptr(), len(source), rows.shape[1]
    _core.weigh_rows(core_name(rows.dtype), result.data_ptr(), *about)
    return result


def add_placed(rows: Tensor, places: Tensor, complete: bool, out: Tensor) -> None:
    """Sets row t of ``out`` to the sum of rows ``places[t]``, in float32 or wider, rounded once; -1 adds zeros."""
    if rows.is_cpu and _core.dtypes[core_name(rows.dtype)].arithmetic != "none":
        about = rows.data_ptr(), _stride(rows), places.data_ptr(), places.shape[1], *out.shape
        _core.sum_rows(core_name(rows.dtype), out.data_ptr(), *about)
        return
    first, *others = places.t()
    total = placed(rows, first, complete).to(sum_dtype(out.dtype) if others else out.dtype)
    for each in others:
        total += placed(rows, each, complete).to(total.dtype)
    out.copy_(total)


def as_bytes(rows: Tensor) -> Tensor:
    """Returns the rows of a matrix as rows of bytes."""
    count, columns = rows.shape
    flat = as_input("rows", rows).as_strided((rows.numel(),), (1,))  # one or no element may have any stride
    return flat.view(torch.uint8).view(count, columns * rows.itemsize)


def side_by_side(parts: Sequence[Part]) -> tuple[Tensor, list[slice]]:
    """Copies the rows ``part[index]`` of all parts into one buffer; returns it with the columns of each part."""
    columns, begin = [], 0
    for part, _ in parts:
        columns.append(slice(begin, begin + part.shape[1]))
        begin = -(-columns[-1].stop // 16) * 16  # so that columns can be viewed as any dtype
    first, index = parts[0]
    if index is None and len(parts) == 1 and first.shape[1] == begin > 0:
        return first, columns
    buffer = room(first, (len(first) if index is None else len(index), max(begin, 16)), torch.uint8)
    for (part, index), place in zip(parts, columns, strict=True):
        if index is None:
            buffer[:, place] = part
        else:
            gather(part, index, buffer[:, place])
    return buffer, columns


def behind_headers(rows: Tensor, each: Sequence[headers.Bytes], which: Sequence[Numbers]) -> tuple[Tensor, list[int]]:
    """Returns, for every rank, its notes and then its rows, in one buffer, and how many rows these are."""
    sends = [len(header) + len(these) for header, these in zip(each, which, strict=True)]
    buffer = room(rows, (sum(sends), each[0].shape[1]), torch.uint8)
    for part, header, these in zip(buffer.split(sends), each, which, strict=True):
        part[: len(header)] = torch.from_numpy(header)
        index = torch.from_numpy(these).to(rows.device)
        gather(rows, index, part[len(header) :, : rows.shape[1]])
    return buffer, sends


def exchange(
    comm: AnyCommunicator, buffer: Tensor, sends: list[int], recvs: list[int] | None, begins: bool
) -> Callable[[], tuple[Tensor, list[int]]]:
    """Sends rows of bytes to the ranks; the result returns those received and how many came from each rank."""
    stride, flat = buffer.shape[1], buffer.view(-1)
    if recvs is None:
        send = scaled(sends, stride)

        def made(output: Tensor, recv_counts: Sequence[int]) -> tuple[Tensor, list[int]]:
            return output.view(-1, stride), [count // stride for count in recv_counts]

        with guard(comm, OPERATOR):
            learning = calls.learn(comm, OPERATOR, flat, send, packed(send), stride)
        if begins:
            return learning.submit(made).result
        learnt = made(*learning.run())
        return lambda: learnt
    with guard(comm, OPERATOR):
        output = calls.new_output(comm, sum(recvs) * stride, flat)
        call = calls.exchange(comm, OPERATOR, output, flat, split_layout(sends, recvs, stride), stride)
    known = output.view(-1, stride), recvs
    if begins:
        work = call.submit()
        work.then(lambda: known)
        return work.result
    call.run()
    return lambda: known
