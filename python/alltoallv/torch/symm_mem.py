"""torch's symmetric-memory operators on CPU and NPUs; imported, they are there:

    import alltoallv.torch.symm_mem
    import torch.distributed._symmetric_memory as symm_mem

    x = symm_mem.empty(1024, 64, device="cpu")
    symm_mem.rendezvous(x, group)
    torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group.group_name)

`torch.distributed._symmetric_memory.empty` gives CPU tensors of the shared arena, and plain ones on NPUs. A rank does
not map its peers' memory, so that ``rendezvous`` returns a `Handle` that only meets them, and any tensor serves.
Sums are as in `alltoallv.torch.all_reduce`: the same bits on all ranks, 16-bit floats rounded once. Splits and offsets
of the exchanges are int64 and count rows of dimension 0; ``input`` and ``out`` may be longer than what travels, and
rows of ``out`` that nothing arrives in keep their values. All raise as `alltoallv.torch.all_to_all_v`; `REFUSED` names
the operators that raise NotImplementedError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import _resolve_process_group

from alltoallv import _core
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.api.collectives import all_gather_into_tensor, all_to_all_single, barrier, broadcast
from alltoallv.torch.api.exchange import all_to_all_v
from alltoallv.torch.api.reductions import all_reduce, reduce, reduce_scatter_tensor
from alltoallv.torch.eager.group import AnyCommunicator, device_of, from_group
from alltoallv.torch.eager.tensors import empty as in_arena

_FIRST = "all_to_all_single"  # the operator that brings the counts of all
_REDUCTIONS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG}
_ONE_SIDED = "it reaches a peer that makes no call, expected a call that all ranks make"
_MULTICAST = "it is NVLink's multicast, expected {}"

REFUSED = {
    "_async_input_mm": "it waits for signals inside of a product, expected fused_all_gather_matmul",
    "get_remote_tensors": "its results are the peers' memory, expected all_gather_into_tensor",
    "multimem_all_gather_out": _MULTICAST.format("_low_contention_all_gather"),
    "multimem_all_reduce_": _MULTICAST.format("two_shot_all_reduce_"),
    "multimem_one_shot_all_reduce": _MULTICAST.format("one_shot_all_reduce"),
    "multimem_one_shot_all_reduce_out": _MULTICAST.format("one_shot_all_reduce_out"),
    "multimem_one_shot_reduce_out": _MULTICAST.format("tile_reduce"),
    "nccl_get": _ONE_SIDED,
    "nccl_put": _ONE_SIDED,
    "nccl_put_signal": _ONE_SIDED,
    "nccl_put_with_signal": _ONE_SIDED,
    "nccl_reduce_scatter_offset": "it is NCCL's, expected reduce_scatter_out",
    "nccl_wait_for_signal": _ONE_SIDED,
    "nvshmem_get": _ONE_SIDED,
    "nvshmem_put": _ONE_SIDED,
    "nvshmem_put_with_signal": _ONE_SIDED,
    "nvshmem_wait_for_signal": _ONE_SIDED,
}
"""Operators that are refused, and why."""

UNREACHED = ("_barrier", "_rendezvous", "nccl_wait_signal")
"""Operators that are torch's own here, as they take or return its handle, or choose no device."""


def all_to_all_vdev(input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group_name: str) -> None:
    """Sends ``in_splits[j]`` rows to rank j; writes rows and offsets per sender to ``out_splits_offsets`` [2, W]."""
    comm = _communicator(group_name, input)
    with guard(comm, _FIRST):
        _check("in_splits", in_splits, (comm.size,))
        _check("out_splits_offsets", out_splits_offsets, (2, comm.size))
    splits = _exchanged(in_splits, comm)
    all_to_all_v(_sent(input, in_splits), in_splits, splits, unit="row", out=out, group=comm)
    out_splits_offsets.copy_(torch.stack([splits, _offsets(splits)]))


def all_to_all_vdev_2d(
    input: Tensor,
    out: Tensor,
    in_splits: Tensor,
    out_splits_offsets: Tensor,
    group_name: str,
    major_align: int | None = None,
) -> None:
    """Sends rows to experts, of which every rank has E.

    ``in_splits`` [W * E] is sorted by rank, then by expert; ``out`` and ``out_splits_offsets`` [2, W * E] by expert,
    then by the rank that the rows come from. The rows of an expert begin at a multiple of ``major_align``, and take at
    least that many.
    """
    comm = _communicator(group_name, input)
    align = 1 if major_align is None else major_align
    with guard(comm, _FIRST):
        _core.checked_least("major_align", align, 1)
        matrix = _by_rank("in_splits", in_splits, in_splits.shape, comm)
        _check("out_splits_offsets", out_splits_offsets, (2, matrix.numel()))
    received = _exchanged(matrix, comm)  # [from, expert]
    splits = received.T.reshape(-1)
    rows = received.sum(0)
    firsts = _offsets(torch.clamp((rows + align - 1) // align, min=1) * align)
    offsets = (_offsets(received.T, 1) + firsts[:, None]).reshape(-1)
    packed = all_to_all_v(_sent(input, matrix), matrix.sum(1), received.sum(1), unit="row", group=comm)
    if len(packed):
        out.index_copy_(0, _rows(offsets.view(-1, comm.size).T.reshape(-1), received.reshape(-1)), packed)
    out_splits_offsets.copy_(torch.stack([splits, offsets]))


def all_to_all_vdev_2d_offset(
    input: Tensor, out: Tensor, in_splits_offsets: Tensor, out_splits_offsets: Tensor, group_name: str
) -> None:
    """Brings rows back; ``in_splits_offsets`` is the output of `all_to_all_vdev_2d`, and rows between regions stay.

    ``out`` and ``out_splits_offsets`` [2, W * E] are packed and sorted by rank, then by expert.
    """
    comm = _communicator(group_name, input)
    with guard(comm, _FIRST):
        shape = in_splits_offsets.shape[1:]
        _check("in_splits_offsets", in_splits_offsets, (2, *shape))
        matrix, offsets = (_by_expert(row, shape, comm) for row in in_splits_offsets)
        _check("out_splits_offsets", out_splits_offsets, (2, matrix.numel()))
        packed = input.index_select(0, _rows(offsets.reshape(-1), matrix.reshape(-1)))
    received = _exchanged(matrix, comm)
    all_to_all_v(packed, matrix.sum(1), received.sum(1), unit="row", out=out, group=comm)
    splits = received.reshape(-1)
    out_splits_offsets.copy_(torch.stack([splits, _offsets(splits)]))


def one_shot_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Returns the sum of all ranks' tensors."""
    return two_shot_all_reduce_(input.clone(memory_format=torch.contiguous_format), reduce_op, group_name)


def one_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
    """Writes the sum of all ranks' tensors to ``out``."""
    return out.copy_(one_shot_all_reduce(input, reduce_op, group_name))


def one_shot_all_reduce_copy(symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Copies ``local_input`` to the first elements of ``symm_buffer``; returns the sum of all ranks'."""
    with guard(_communicator(group_name, local_input), "all_reduce"):
        if symm_buffer.numel() < local_input.numel():
            sizes = symm_buffer.numel(), local_input.numel()
            raise InvalidTensorError(f"symm_buffer has {sizes[0]} elements, expected at least {sizes[1]}", id=2127)
        symm_buffer.view(-1)[: local_input.numel()].copy_(local_input.reshape(-1))
    return one_shot_all_reduce(local_input, reduce_op, group_name)


def one_shot_all_reduce_copy_out(
    symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str, out: Tensor
) -> Tensor:
    """Does `one_shot_all_reduce_copy`, and writes the sum to ``out``."""
    return out.copy_(one_shot_all_reduce_copy(symm_buffer, local_input, reduce_op, group_name))


def two_shot_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Replaces the tensor by the sum of all ranks' tensors."""
    comm = _communicator(group_name, input)
    all_reduce(input, _reduction(comm, "all_reduce", reduce_op), group=comm)
    return input


def two_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, output: Tensor) -> Tensor:
    """Writes the sum of all ranks' tensors to ``output``."""
    return one_shot_all_reduce_out(input, reduce_op, group_name, output)


def reduce_scatter_out(input: Tensor, group_name: str, split_last_dim: bool, output: Tensor) -> Tensor:
    """Writes this rank's part of the sum to ``output``: of dimension 0, or of the last."""
    return output.copy_(_reduced_part(input, "sum", -1 if split_last_dim else 0, group_name))


def tile_reduce(in_tile: Tensor, out_tile: Tensor, root: int, group_name: str, reduce_op: str = "sum") -> None:
    """Writes the sum of all ranks' tiles to ``out_tile`` on rank ``root`` of the group."""
    comm = _communicator(group_name, in_tile)
    total = in_tile.clone(memory_format=torch.contiguous_format)
    reduce(total, op=_reduction(comm, "reduce", reduce_op), group=comm, group_dst=root)
    if comm.rank == root:
        out_tile.copy_(total)


def multi_root_tile_reduce(
    in_tiles: Sequence[Tensor], out_tile: Tensor, roots: Sequence[int], group_name: str, reduce_op: str = "sum"
) -> None:
    """Writes the sum of all ranks' tiles ``in_tiles[i]`` to ``out_tile`` on rank ``roots[i]``."""
    comm = _communicator(group_name, out_tile)
    with guard(comm, "reduce"):
        if len(in_tiles) != len(roots) or len(set(roots)) != len(roots):
            raise InvalidParamError(
                f"roots is {list(roots)}, expected another rank for each of {len(in_tiles)} tiles", id=1458
            )
    for tile, root in zip(in_tiles, roots, strict=True):
        tile_reduce(tile, out_tile, root, group_name, reduce_op)


def fused_all_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Returns the ranks' matrices, concatenated along ``gather_dim``, and their products with each of ``Bs``."""
    rows, dim = _gathered(A, gather_dim, group_name)
    last = dim == A.dim() - 1
    matrix = rows.movedim(0, dim)
    products = [matrix @ B if last else (rows @ B).movedim(0, dim) for B in Bs]
    return matrix if return_A else None, products


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """Returns this rank's part, along ``scatter_dim``, of the sum of the ranks' products."""
    return _reduced_part(A @ B, reduce_op, scatter_dim, group_name)


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Does `fused_all_gather_matmul` with codes and scales, as ``torch._scaled_mm`` takes them.

    ``A_scale`` is one number, or has one of each of this rank's rows, or of all ranks'.
    """
    rows, dim = _gathered(A, gather_dim, group_name)
    matrix, scale = rows.movedim(0, dim), A_scale
    if A_scale.numel() > 1 and A_scale.shape[:-1] == A.shape[:-1]:
        scale = _gathered(A_scale, dim, group_name)[0].flatten(0, -2)
    elif A_scale.numel() > 1:
        with guard(_communicator(group_name, A), _FIRST):
            if A_scale.shape[:-1] != matrix.shape[:-1]:
                shapes = f"{tuple(A.shape[:-1])} or {tuple(matrix.shape[:-1])}"
                raise InvalidTensorError(
                    f"A_scale has shape {tuple(A_scale.shape)}, expected [1], or rows {shapes}", id=2128
                )
        scale = A_scale.movedim(dim, 0).flatten(0, -2)
    terms = zip(Bs, B_scales, biases, result_scales, out_dtypes, use_fast_accum, strict=True)
    products = [_scaled(rows, B, scale, *of_B, dtype, fast).movedim(0, dim) for B, *of_B, dtype, fast in terms]
    return matrix, products


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Does `fused_matmul_reduce_scatter` with codes and scales, as ``torch._scaled_mm`` takes them.

    The product has shape ``output_shape`` before it is scattered along ``orig_scatter_dim``.
    """
    scale = A_scale.flatten(0, -2) if A_scale.numel() > 1 else A_scale
    product = _scaled(A, B, scale, B_scale, bias, result_scale, out_dtype, use_fast_accum)
    if output_shape is not None:
        product = product.reshape(*output_shape[:-1], B.shape[1])
    return _reduced_part(product, reduce_op, orig_scatter_dim, group_name)


def _low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    return _gathered(tensor, 0, group_name)[0]


def _low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return _reduced_part(tensor, reduce_op, 0, group_name)


def nvshmem_all_to_all(input: Tensor, out: Tensor, group_name: str) -> Tensor:
    """Sends the j-th of W equal parts to rank j; the parts for this rank lie in ``out``, in the order of ranks."""
    all_to_all_single(out, input, group=_communicator(group_name, input))
    return out


def nvshmem_broadcast(input: Tensor, root: int, group_name: str) -> Tensor:
    """Replaces the tensor by that of rank ``root`` of the group."""
    broadcast(input, group=_communicator(group_name, input), group_src=root)
    return input


def memset32_(input: Tensor, offset: int, val: int, count: int) -> Tensor:
    """Writes a number to ``count`` elements from ``offset`` on, of a contiguous tensor of 32-bit integers."""
    if input.dtype not in (torch.int32, torch.uint32) or input.dim() != 1 or not input.is_contiguous():
        raise InvalidTensorError(
            f"input is {input.dtype} {tuple(input.shape)}, expected 32-bit integers in one row", id=2129
        )
    if count < 1 or not 0 <= offset <= len(input) - count:
        raise InvalidParamError(
            f"offset is {offset} and count {count}, expected elements of the {len(input)} of input", id=1459
        )
    input.view(torch.int32)[offset : offset + count] = (val + 2**31) % 2**32 - 2**31
    return input


def stream_write_value32_(input: Tensor, offset: int, val: int) -> Tensor:
    """Writes a number to the element at ``offset``."""
    return memset32_(input, offset, val, 1)


@dataclass(frozen=True)
class Handle:
    """What ``rendezvous`` returns for a tensor on CPU or NPU.

    Other attributes of torch's handle raise NotImplementedError: a rank does not map its peers' memory.
    """

    rank: int
    world_size: int
    device: torch.device
    buffer_size: int
    _comm: AnyCommunicator

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Waits for all ranks; the group's timeout counts."""
        barrier(group=self._comm)

    def __getattr__(self, name: str) -> NoReturn:
        if not hasattr(torch._C._distributed_c10d._SymmetricMemory, name):
            raise AttributeError(f"no attribute {name!r}")
        raise NotImplementedError(f"{name} is not offered: here a rank does not map its peers' memory")


def _gathered(tensor: Tensor, dim: int, group_name: str) -> tuple[Tensor, int]:
    """Concatenates all ranks' tensors along a dimension; returns the result with that in front, and its number."""
    comm = _communicator(group_name, tensor)
    every = tensor.new_empty(comm.size, *tensor.shape)
    all_gather_into_tensor(every, tensor.contiguous(), group=comm)
    dim %= tensor.dim()
    return every.movedim(dim + 1, 1).flatten(0, 1), dim


def _reduced_part(tensor: Tensor, reduce_op: str, dim: int, group_name: str) -> Tensor:
    comm = _communicator(group_name, tensor)
    operation = _reduction(comm, "reduce_scatter_tensor", reduce_op)
    with guard(comm, "reduce_scatter_tensor"):
        if tensor.shape[dim] % comm.size:
            raise InvalidTensorError(
                f"dimension {dim} is {tensor.shape[dim]}, expected a multiple of {comm.size}", id=2130
            )
    front = tensor.movedim(dim, 0).contiguous()
    part = front.new_empty(len(front) // comm.size, *front.shape[1:])
    reduce_scatter_tensor(part, front, operation, group=comm)
    return part.movedim(0, dim).contiguous()


def _reduction(comm: AnyCommunicator, operator: str, reduce_op: str) -> Any:
    with guard(comm, operator):
        if reduce_op not in _REDUCTIONS:
            raise InvalidParamError(f"reduce_op is {reduce_op!r}, expected 'sum' or 'avg'", id=1460)
        return _REDUCTIONS[reduce_op]


def _scaled(matrix: Tensor, *arguments: Any) -> Tensor:
    """Multiplies codes ``[…, k]``; ``arguments``: the other matrix, scales, bias, the result's scale and dtype."""
    B, scale, B_scale, bias, result_scale, dtype, fast = arguments
    operands = matrix.flatten(0, -2).contiguous(), B, scale.contiguous(), B_scale, bias, result_scale
    product = torch.ops.aten._scaled_mm(*operands, out_dtype=dtype, use_fast_accum=fast)  # dtype: may be a number
    return product.unflatten(0, matrix.shape[:-1])


def _communicator(group_name: str, tensor: Tensor) -> AnyCommunicator:
    return from_group(_resolve_process_group(group_name), device=device_of(tensor))  # type: ignore[arg-type]


def _check(name: str, splits: Tensor, shape: Sequence[int]) -> None:
    if splits.dtype != torch.int64 or tuple(splits.shape) != tuple(shape):
        shown = f"{splits.dtype} of shape {tuple(splits.shape)}"
        raise InvalidTensorError(f"{name} is {shown}, expected torch.int64 of shape {tuple(shape)}", id=2131)


def _by_rank(name: str, splits: Tensor, shape: Sequence[int], comm: AnyCommunicator) -> Tensor:
    """Returns the splits as [W, E]; raises InvalidTensorError if W does not divide them."""
    if len(shape) != 1 or shape[0] % comm.size:
        raise InvalidTensorError(
            f"{name} has shape {tuple(splits.shape)}, expected a multiple of {comm.size} splits", id=2132
        )
    _check(name, splits, shape)
    return splits.view(comm.size, -1)


def _by_expert(splits: Tensor, shape: Sequence[int], comm: AnyCommunicator) -> Tensor:
    return _by_rank("in_splits_offsets", splits, shape, comm).view(-1, comm.size).T.contiguous()


def _exchanged(splits: Tensor, comm: AnyCommunicator) -> Tensor:
    received = torch.empty_like(splits)
    all_to_all_single(received, splits, group=comm)
    return received


def _sent(input: Tensor, splits: Tensor) -> Tensor:
    """Returns the rows that are sent; torch's buffers may be larger."""
    return input[: int(splits.sum())]


def _offsets(splits: Tensor, dim: int = 0) -> Tensor:
    return splits.cumsum(dim) - splits


def _rows(offsets: Tensor, splits: Tensor) -> Tensor:
    """Returns the indices of the rows of regions that begin at ``offsets``."""
    starts = torch.repeat_interleave(offsets - _offsets(splits), splits)
    return starts + torch.arange(len(starts), device=starts.device)


@functools.wraps(symmetric.empty)
def _empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    kind = torch.device(device or torch.get_default_device()).type
    if kind == "npu":
        return torch.empty(*size, dtype=dtype, device=device)
    if kind != "cpu":
        return _of_torch(*size, dtype=dtype, device=device)
    return in_arena(size[0] if len(size) == 1 else size, dtype)


@functools.wraps(symmetric.rendezvous)
def _rendezvous(tensor: Tensor, group: ProcessGroup | str) -> Any:
    if device_of(tensor) not in ("cpu", "npu"):
        return _meet_of_torch(tensor, group)  # type: ignore[arg-type]
    name = group if isinstance(group, str) else group.group_name
    comm = _communicator(name, tensor)
    handle = Handle(comm.rank, comm.size, tensor.device, tensor.untyped_storage().nbytes(), comm)
    handle.barrier()
    return handle


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"torch.ops.symm_mem.{name} is refused: {REFUSED[name]}")

    return refuse


OFFERED = (
    "_low_contention_all_gather", "_low_contention_reduce_scatter", "all_to_all_vdev", "all_to_all_vdev_2d",
    "all_to_all_vdev_2d_offset", "fused_all_gather_matmul", "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter", "memset32_", "multi_root_tile_reduce",
    "nvshmem_all_to_all", "nvshmem_broadcast", "one_shot_all_reduce", "one_shot_all_reduce_copy",
    "one_shot_all_reduce_copy_out", "one_shot_all_reduce_out", "reduce_scatter_out", "stream_write_value32_",
    "tile_reduce", "two_shot_all_reduce_", "two_shot_all_reduce_out",
)  # fmt: skip
"""Operators that CPU tensors, and NPU tensors, have."""

_of_torch, _meet_of_torch = symmetric.empty, symmetric.rendezvous
symmetric.empty, symmetric.rendezvous = _empty, _rendezvous
_library = torch.library.Library("symm_mem", "IMPL")
for _name in (*OFFERED, *REFUSED):
    _function = globals()[_name] if _name in OFFERED else _refusal(_name)
    for _key in ("CPU", "PrivateUse1"):
        _known = torch._C._dispatch_has_kernel(f"symm_mem::{_name}")  # a torch of another version has others
        if _known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{_name}", _key):
            _library.impl(_name, _function, _key)
