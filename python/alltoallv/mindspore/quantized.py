"""Quantized collectives on MindSpore tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, ops

from alltoallv._calls.adapters import Adapter
from alltoallv._calls.collectives import leaf_products
from alltoallv._calls.counts import Counts
from alltoallv.communicator import Communicator
from alltoallv.mindspore import device_quantized
from alltoallv.mindspore.collectives import multiply
from alltoallv.mindspore.device_quantized import Codes, Moves, Rows
from alltoallv.mindspore.front_end import ADAPTER, apply, check_async, enter, learnt, refuse_timeout
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import CommHandle, Done, executor, in_queue, tracks, wants_gradient
from alltoallv.quantization import requests
from alltoallv.quantization.functions import Quantized, ReductionCall, RowsCall
from alltoallv.quantization.requests import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.requests import exclude, present
from alltoallv.quantization.spec import (
    Accuracy,
    Format,
    Gather,
    GroupSize,
    Options,
    Overflow,
    Quantization,
    SumOp,
    coding,
    grouping,
)
from alltoallv.quantization.spec import Bounded as Bounded

__all__ = [
    "Bounded",
    "ErrorFeedback",
    "quantized_all_reduce",
    "quantized_all_to_all",
    "quantized_linear_all_reduce",
    "quantized_reduce_scatter",
]


class _QueuedReduction(ReductionCall[Tensor]):
    """A quantized reduction that runs in MindSpore's queue; made under the guard."""

    def __init__(
        self, adapter: Adapter[Tensor], comm: Communicator, reduction: requests.Reduction[Tensor], timeout: float | None
    ) -> None:
        refuse_timeout(timeout)
        self.reduction, self.comm = reduction, comm
        if reduction.request.scale is None:
            Codes(reduction.request.quantization, 1)  # refuses formats

    def run(self) -> Any:
        reduction = self.reduction
        states = reduction.error, reduction.gather_error, reduction.bounds
        flat = device_quantized.reduce(self.comm, reduction.request, reduction.input, *states)
        reduction.output.copy_(flat.reshape(reduction.output.shape))
        return reduction.result

    def submit(self) -> tuple[Any, CommHandle]:
        out = self.run()
        return out, Done(out)


class _QueuedRows(RowsCall[Tensor]):
    """A quantized_all_to_all that runs in MindSpore's queue; made under the guard, which quantizes its rows."""

    def __init__(
        self, adapter: Adapter[Tensor], comm: Communicator, rows: requests.Rows[Tensor], timeout: float | None
    ) -> None:
        refuse_timeout(timeout)
        self._adapter, self._comm, self.rows, self._timeout = adapter, comm, rows, timeout
        self._tail = tuple(rows.input.shape[1:])
        self._steps = Rows(Moves(comm, digest=rows.digest()), rows)
        self._pair = self._steps.encode(rows.input)

    def run_counted(self) -> tuple[Any, list[int]]:
        recvs, spec = self.rows.recvs, self.rows.received()
        if recvs is None:
            recvs = learnt(self._comm, self.rows.sends)
        out = self._steps.exchange(self._pair, recvs).reshape(sum(recvs), *self._tail)
        if not self.rows.bound:
            return out, recvs
        codes: Any = self._steps.codes
        if out.size:
            bounds = device_quantized.bounds_of_rows(codes.seen[-1], spec, self.rows.out_dtype)
        else:
            bounds = ops.zeros((sum(recvs), spec.groups(self.rows.length)), mindspore.float32)
        return Bounded(out, bounds, spec.format), recvs

    def submit(self) -> tuple[Any, CommHandle]:
        out = self.run()
        return None if self.rows.recvs is None else out, Done(out)


class _Quantized(Quantized[Tensor]):
    apply = staticmethod(apply)

    def reductions(self) -> type[ReductionCall[Tensor]]:
        return _QueuedReduction if in_queue() else ReductionCall

    def exchanges(self) -> type[RowsCall[Tensor]]:
        return _QueuedRows if in_queue() else RowsCall

    def offers(self, spec: Quantization) -> bool:
        return not in_queue() or spec.format in ("int8", "int4")

    def host(self, comm: Communicator) -> Communicator:
        if not in_queue():
            return comm
        executor.sync()  # the ranks agree about what is queued over the same communicator
        return on_host(comm)

    def largest_magnitude(self, x: Tensor, dtype: str) -> int:
        return device_quantized.largest_magnitude(x) if in_queue() else super().largest_magnitude(x, dtype)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.matmul(x, weight.T)

    def products(self, x: Tensor, weight: Tensor, leaves: int, size: int) -> Tensor:
        return ops.stack(leaf_products(x, weight, None, leaves, size, multiply))

    def join(self, parts: list[Tensor]) -> Tensor:
        return ops.cat(parts)

    def wants_grad(self, input: Tensor, **excluded: Any) -> bool:
        """False within a gradient function for a call that cannot have a gradient, unless its input needs one."""
        check_async(excluded["async_op"])
        if wants_gradient(input):
            exclude("input requires grad", **excluded)
        return tracks(input) and not present(excluded)


_functions = _Quantized(ADAPTER, enter)


def quantized_all_reduce(
    input: Tensor,
    *,
    scale: Tensor | float | None = None,
    offset: float | None = None,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    gather: Gather = "full",
    op: SumOp = "sum",
    out_dtype: Any = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    comm_quant_scale_1: Tensor | float | None = None,
    comm_quant_scale_2: Tensor | float | None = None,
    bound: bool = False,
    max_error: float | None = None,
    leaves: int | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Returns the sum of the ``input`` of all ranks, whose terms travel as codes; every rank gets the same bits.

    Without a scale every group of elements has its own (dynamic). With ``scale`` the input is int8 and the result
    ``(sum of all inputs + W * offset) * scale``, exact up to one rounding, for W ranks. With ``comm_quant_scale_1``
    and ``_2`` the input becomes codes by the first, and their sum becomes codes by the second.

    Args:
        input: A tensor (in NumPy an array, as all that follow), of one shape and dtype on all ranks: float32,
            float16, bfloat16; int8 with ``scale``.
        scale: A number, or a tensor: one value, or one per entry of the last axis, ``[n]`` or ``[1, n]``, of
            float16, bfloat16 or float32; equal on all ranks.
        offset: A number that is added to the codes of every rank, with ``scale``.
        bits: 8, 6, 5, 4, 3 or 2: int8 and so on. For the dynamic mode only, like the next five.
        format: What the elements become: a row of the table in docs/quantization.md, such as ``"fp8_e4m3"`` or
            ``"mxfp8"``. Default: by ``bits``.
        group_size: Elements per scale; groups begin at the first element of the flat tensor. ``"token"``: the last
            axis; ``"tensor"``: all. Default: 128, 32 in MX formats and 16 in NVFP4, which have no other.
        gather: ``"full"`` gathers the sum in the output's dtype, ``"quantized"`` quantizes it again: fewer bytes,
            about 1.4 times the error.
        op: ``"sum"`` or ``"avg"``.
        error_feedback: An ``ErrorFeedback``, the state of this vector, kept by the caller from call to call; on all
            ranks or none.
        out_dtype: float32, float16 or bfloat16; default: the input's, float16 for int8.
        overflow: What a finite value becomes that the output's dtype cannot hold: ``"saturate"``: its largest;
            ``"raise"``: ValueOverflowError; ``"infinity"``.
        comm_quant_scale_1, comm_quant_scale_2: Each like ``scale``; both or neither.
        bound: Return ``Bounded(output, bound, format)``. ``bound`` is float32, one value per group of the flat result:
            no element of the group is further from the exact sum, or average, of the inputs with their error feedback;
            inf in groups with inf or NaN. On all ranks or none; for the dynamic mode, like the next.
        max_error: Return the same, in the format of the fewest bytes whose bound is nowhere above this number, equal on
            all ranks, which agree on it before in a small exchange. Instead of ``bits`` and ``format``, and without
            ``error_feedback``.
        leaves: L, a multiple of W, up to 4096, equal on all ranks: the input is this rank's share ``[L / W, ...]`` of L
            vectors, each of which becomes codes by itself, and all are added in a tree over L alone, so that the sum,
            ``[...]``, has the same bits for every W; ``op="avg"`` divides by L. For the dynamic mode, without
            ``error_feedback`` and ``max_error``.
        out: Where the result goes; may be the input itself if the dtypes agree. Left out, it is allocated.
        group: A group of the framework, a `Communicator`, or None for all ranks.
        async_op: Return ``(output, handle)`` at once; the output is complete after the handle's ``wait()``.
        timeout: Seconds to wait for the peers, above 0, over shared memory; default: the communicator's own.

    Returns:
        The result in the input's shape, or that of a leaf; where the framework has groups, None on a rank outside the
        group. In torch, Paddle, and MindSpore's PyNative differentiable, straight through the rounding: the gradient
        belongs to the sum (or average), not quantized. Not with ``out``, ``async_op``, ``error_feedback``, ``bound``,
        ``max_error``, in torch ``timeout``.

    Raises:
        PeerMismatchError: the ranks differ in operator, elements, dtypes or any of these options, scales and offset
            included; no output has been written.
        ValueOverflowError: on every rank, with ``overflow="raise"``; the output is undefined.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, or no format keeps ``max_error``;
            no output has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come in time.
    """
    coded, elements = coding(bits, format), grouping(group_size, input, leaves)
    scales, terms = (scale, comm_quant_scale_1, comm_quant_scale_2, offset), (coded, elements, gather, op, overflow)
    accuracy = Accuracy.asked(bound, max_error, bits, format)
    return _functions.quantized_all_reduce(
        input, scales, terms, out_dtype, leaves, out, error_feedback, group, async_op, timeout, accuracy
    )


def quantized_reduce_scatter(
    input: Tensor,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    op: SumOp = "sum",
    out_dtype: Any = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    bound: bool = False,
    max_error: float | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Adds up the ``input`` of all ranks and returns this rank's part of the rows of dimension 0.

    The terms travel as codes. Every part is quantized by itself: groups begin at its first element.

    Args:
        input: A tensor (in NumPy an array), of one shape, of at least 1 dimension, and dtype on all ranks: float32,
            float16, bfloat16.
        recv_counts: Rows that each rank gets, W integers >= 0, equal on all ranks; their sum is dimension 0.
            Default: equal shares.
        bits, format, group_size, op, error_feedback, out_dtype, overflow: See `quantized_all_reduce`, dynamic mode.
        bound, max_error: See `quantized_all_reduce`; the bound is of the groups of this rank's part.
        out: Shape ``[recv_counts[rank], *input.shape[1:]]``, apart from the input. Left out, it is allocated.
        group, async_op, timeout: See `quantized_all_reduce`.

    Returns:
        This rank's part; handles and gradients, which are gathered from all parts, as `quantized_all_reduce`.

    Raises:
        PeerMismatchError: the ranks differ in operator, counts, dtypes or any of these options; no output has been
            written.
        ValueOverflowError: on every rank, with ``overflow="raise"``; the output is undefined.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, or no format keeps ``max_error``;
            no output has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come in time.
    """
    coded, elements = coding(bits, format), grouping(group_size, input)
    options = Options(format=coded, group_size=elements, op=op, overflow=overflow, out_dtype=out_dtype)
    rest = out, error_feedback, group, async_op, timeout
    accuracy = Accuracy.asked(bound, max_error, bits, format)
    return _functions.quantized_reduce_scatter(input, recv_counts, options, *rest, accuracy)


def quantized_all_to_all(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    out_dtype: Any = None,
    overflow: Overflow = "saturate",
    bound: bool = False,
    max_error: float | None = None,
    quantize_gradient: bool = False,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Sends rows to every rank as codes with their float32 scales, in one exchange, such as a MoE dispatch.

    Args:
        input: Rows ``[T, ...]`` of float32, float16 or bfloat16, sorted by the rank they go to.
        send_counts: Rows for every rank, W integers >= 0; their sum is T.
        recv_counts: Rows from every rank; left out, the peers announce them.
        bits, format: See `quantized_all_reduce`.
        group_size: Elements per scale; groups begin anew with every row. Default: one scale per row, where the
            format leaves the choice.
        out_dtype: dtype of the rows received: float32, float16 or bfloat16; default: the input's.
        overflow: See `quantized_all_reduce`; "raise" looks at the rows sent.
        bound: Return ``Bounded(output, bound, format)``. ``bound`` is float32, ``[rows, groups of a row]``: no element
            of the group is further from what was sent; inf in groups with inf or NaN. Every rank asks for itself.
        max_error: Return the same, in the format of the fewest bytes whose bound is nowhere above this number; on all
            ranks. See `quantized_all_reduce`.
        quantize_gradient: The gradient's rows travel as codes too, with the same format, groups and ``overflow``,
            quantized from the result's dtype and given in the input's. On all ranks or none.
        group, timeout: See `quantized_all_reduce`.
        async_op: Return ``(output, handle)`` at once; the output is filled by the handle's ``wait()``. Without
            ``recv_counts`` it is None at first, and the handle's ``result()`` returns it.

    Returns:
        The rows received, dequantized, in the order of ranks: ``[sum(recv_counts), ...]``. The gradients of rows go
        back where the rows came from, quantized if asked for; otherwise as `quantized_all_reduce`.

    Raises:
        PeerMismatchError: two ranks differ in operator, counts, length of rows, dtypes or any of these options.
        ValueOverflowError: on every rank, with ``overflow="raise"``.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, or no format keeps ``max_error``;
            no output has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come in time.
    """
    coded, elements = coding(bits, format), grouping(group_size, input)
    options = Options(
        format=coded,
        group_size=elements,
        overflow=overflow,
        out_dtype=out_dtype,
        quantize_gradient=quantize_gradient,
    )
    rest = group, async_op, timeout, Accuracy.asked(bound, max_error, bits, format)
    return _functions.quantized_all_to_all(input, send_counts, recv_counts, options, *rest)


def quantized_linear_all_reduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int | None = None,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    gather: Gather = "full",
    op: SumOp = "sum",
    overflow: Overflow = "saturate",
    leaves: int | None = None,
    group: Group = None,
) -> Any:
    """Runs a linear layer split by its inputs over the ranks: sums ``input @ weight.T``, and adds ``bias``.

    The products travel as in `quantized_all_reduce`, a chunk of rows at a time: while one travels, the next is
    computed. Chunks have whole groups, so the sum has the scales of the undivided product.

    Args:
        input: ``[..., K]``, this rank's part of the features: float32, float16 or bfloat16; its leading dimensions
            are the same on all ranks.
        weight: ``[N, K]``, this rank's columns of the layer's weight, in the input's dtype.
        bias: ``[N]``, added once to the sum; every rank gives the same.
        chunks: The most parts that rows are divided into, equal on all ranks. Default: up to 4, each of at least
            2^17 elements of the product; 1 for NVFP4, whose scale of a tensor is a chunk's.
        bits, format, group_size, gather, op, overflow, group: See `quantized_all_reduce`, for the product.
        leaves: L, a multiple of W, up to 4096, equal on all ranks: every rank divides its product into L / W products
            of as many input features each, and all are added as by `quantized_all_reduce` with ``leaves``: with the
            same bits for every W, as far as the framework's product of one shape has; see `row_parallel_linear`.

    Returns:
        ``[..., N]`` in the input's dtype, the same bits on every rank without ``bias``; None on a rank outside the
        group. Differentiable where `quantized_all_reduce` is, in input, weight and bias: the gradient passes
        straight through the rounding, and is summed over the ranks, not quantized.

    Raises:
        PeerMismatchError: the ranks differ in shapes, dtypes, chunks or options.
        ValueOverflowError: on every rank, with ``overflow="raise"``.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come in time.
    """
    options = bits, format, group_size, gather, op, overflow, leaves
    return _functions.quantized_linear_all_reduce(input, weight, bias, chunks, *options, group)
