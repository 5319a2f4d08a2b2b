"""Quantized collectives on torch tensors; docs/quantization.md has the rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls import experts
from alltoallv._calls.collectives import check_shapes
from alltoallv._calls.counts import Counts, as_counts, shares
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.quantization import requests
from alltoallv.quantization.spec import (
    Accuracy,
    Format,
    Gather,
    GroupSize,
    Options,
    Overflow,
    Quantization,
    SumOp,
    accuracy_argument,
    chosen_format,
    coding,
    grouping,
)
from alltoallv.quantization.spec import Bounded as Bounded
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import Done
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.eager.observers import is_tracing
from alltoallv.torch.eager.tensors import needs_grad, row_size
from alltoallv.torch.engines.kernels import kernels_for, offers_format
from alltoallv.torch.graph import ops
from alltoallv.torch.graph.calling import is_watched, outcome, watch_call
from alltoallv.torch.graph.ops import Operator
from alltoallv.torch.quantized import ops as quantized_ops
from alltoallv.torch.quantized.adapter import ADAPTER, ErrorFeedback
from alltoallv.torch.quantized.ops import RowExchange

__all__ = [
    "Bounded",
    "quantized_all_reduce",
    "quantized_all_to_all",
    "quantized_linear_all_reduce",
    "quantized_reduce_scatter",
]


# The format that keeps an error.


def with_format(
    comm: Any, operator: str, input: Tensor, options: Options, accuracy: Accuracy | None, feedback: Any = None
) -> Options:
    """Returns the options with the format that keeps ``max_error``, on which the ranks agree here."""
    if accuracy is None or accuracy.max_error is None:
        return options
    with guard(comm, operator):
        accuracy.check(options, feedback)
        x = ADAPTER.read("input", input)
        requests.check_float(ADAPTER.dtype(x))
        out_dtype = requests.output_dtype(ADAPTER, options, ADAPTER.dtype(x))
        word = accuracy.word(_largest_magnitude(x))
        words = torch.full((comm.size,), word, dtype=torch.int64, device="cpu")
        received = torch.empty_like(words)
        layout = experts.layout(words.numpy().reshape(-1, 1))
        call = calls.exchange(groups.on_host(comm), "exchange_counts", received, words, layout)
    call.run()
    by_rows = operator == "quantized_all_to_all"
    count = math.prod(x.shape[1:] if by_rows else x.shape)
    in_host_memory = isinstance(comm, Communicator) or (by_rows and x.is_cpu)

    def offers(spec: Quantization) -> bool:
        return in_host_memory or offers_format(spec, kernels_for(x.device.type), not by_rows)

    return chosen_format(received.tolist(), options, count, out_dtype, by_rows, offers)


def _largest_magnitude(x: Tensor) -> int:
    """Returns the bits, without sign, of the largest magnitude; NaN is above inf. Waits for tensors of a device."""
    if x.is_cpu or not x.numel():
        return _core.largest_magnitude(ADAPTER.dtype(x), x.data_ptr(), x.numel())
    return int(x.detach().abs().amax().float().view(torch.int32).item()) & 0x7FFFFFFF


Scale: TypeAlias = Tensor | float | None


def quantized_all_reduce(
    input: Tensor,
    *,
    scale: Scale = None,
    offset: float | None = None,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    gather: Gather = "full",
    op: SumOp = "sum",
    out_dtype: torch.dtype | None = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    comm_quant_scale_1: Scale = None,
    comm_quant_scale_2: Scale = None,
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
    accuracy = Accuracy.asked(bound, max_error, bits, format)
    plain = scale is comm_quant_scale_1 is comm_quant_scale_2 is offset is out_dtype is leaves is timeout is None
    if plain and accuracy is None and not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        terms = coded, elements, gather, op, overflow
        states = None if error_feedback is None else ADAPTER.feedback.states_of(error_feedback)
        result = _core.quantized_all_reduce(shared.core, input, out, *terms, states, bool(async_op))
        if result is NotImplemented and out is error_feedback is None and not async_op:
            result = ops.quantized_sum(shared, input, terms)
        if result is not None and result is not NotImplemented:
            return calls.started(shared, result, input) if async_op else result
    options = Options(
        scale,
        comm_quant_scale_1,
        comm_quant_scale_2,
        offset,
        coded,
        elements,
        gather,
        op,
        overflow,
        out_dtype,
        leaves=leaves,
    )
    row = quantized_ops.quantized_all_reduce, requests.all_reduce
    rest: Any = {"out": out, "feedback": error_feedback, "async_op": async_op, "limit": timeout, "accuracy": accuracy}
    return _reduced(*row, input, (), options, group, **rest)


def quantized_reduce_scatter(
    input: Tensor,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    op: SumOp = "sum",
    out_dtype: torch.dtype | None = None,
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
    row, counts = (quantized_ops.quantized_reduce_scatter, requests.reduce_scatter), (recv_counts,)
    accuracy = Accuracy.asked(bound, max_error, bits, format)
    rest: Any = {"out": out, "feedback": error_feedback, "async_op": async_op, "limit": timeout, "accuracy": accuracy}
    return _reduced(*row, input, counts, options, group, **rest)


def _reduced(
    operator: Operator,
    request: Callable[..., Any],
    input: Tensor,
    counts: tuple[Counts | None, ...],
    options: Options,
    group: Group,
    *,
    out: Tensor | None,
    feedback: ErrorFeedback | None,
    async_op: bool,
    limit: float | None,
    accuracy: Accuracy | None,
) -> Any:
    """Runs a quantized reduction: by its operator with gradients and in a graph, else at once.

    ``request`` checks the arguments; ``counts`` are the rows of a reduce-scatter, whose group a graph must know.
    """
    comm: Any = None
    if counts or not torch.compiler.is_compiling():
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
    traced, wants_grad = is_tracing(input), needs_grad(input)
    watches = is_watched() and not (traced or wants_grad)
    seen = watches and feedback is None and limit is None and accuracy is None and not async_op
    with guard(comm, f"quantized_{request.__name__}"):
        terms = accuracy_argument(accuracy)
        if traced:
            requests.exclude("this is recorded for a graph", error_feedback=feedback, timeout=limit, **terms)
        if wants_grad:
            excluded = {"out": out, "async_op": async_op, "error_feedback": feedback, "timeout": limit, **terms}
            requests.exclude("input requires grad", **excluded)
        if traced or wants_grad or seen:
            parts: tuple[Any, ...] = ()
            if counts:
                row_size(input)  # raises for a tensor without rows
                parts = shares("recv_counts", counts[0], "input", input.shape[0], comm.size), comm.rank
            options = options if traced else _checked(options)
    if not (traced or wants_grad or seen):
        options = with_format(comm, f"quantized_{request.__name__}", input, options, accuracy, feedback)
        with guard(comm, f"quantized_{request.__name__}"):
            reduction = request(ADAPTER, comm, input, *counts, options, out, feedback, accuracy is not None)
            states = [x for x in (reduction.error, reduction.gather_error, reduction.bounds) if x is not None]
            call = calls.quantized_reduce(comm, reduction)
            seconds = calls.limit(comm, limit)
    else:
        scales = map(_as_tensor, options[:3])
        return outcome(operator(input, *parts, *scales, *options[3:], group), out, async_op)
    run = functools.partial(call.submit if async_op else call.run, seconds)
    work = run() if not watches else watch_call(call.name, comm, [reduction.output, *states], [call.like], run)
    return (call.result, work) if async_op else call.result


def _checked(options: Options) -> Options:
    """Raises here, under the guard, for options that torch would refuse in the arguments of an operator."""
    quantization = Quantization.checked(*options[4:9])
    for name, value in zip(requests.SCALES, options, strict=False):
        requests.as_scale(ADAPTER, name, value)
    requests.output_dtype(ADAPTER, options, "float32")
    # An all-to-all's groups are its rows where nothing is said.
    return options._replace(
        format=quantization.format, group_size=None if options.group_size is None else quantization.group_size
    )


def _as_tensor(scale: Scale) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.tensor(scale, dtype=torch.float32, device="cpu")


def quantized_all_to_all(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    out_dtype: torch.dtype | None = None,
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
    options = Options(
        format=coding(bits, format),
        group_size=grouping(group_size, input),
        overflow=overflow,
        out_dtype=out_dtype,
        quantize_gradient=quantize_gradient,
    )
    accuracy = Accuracy.asked(bound, max_error, bits, format)
    terms = accuracy_argument(accuracy)
    comm: Any = None
    if not torch.compiler.is_compiling():
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
    traced = is_tracing(input)
    seen = timeout is None and accuracy is None and is_watched()
    if traced or ((needs_grad(input) or seen) and not async_op):
        with guard(None if traced else comm, RowExchange.operator):
            requests.exclude("input requires grad, or is recorded for a graph", timeout=timeout, **terms)
            if not traced:
                options, send_counts = _checked(options), as_counts("send_counts", send_counts, comm.size)
                recv_counts = None if recv_counts is None else as_counts("recv_counts", recv_counts, comm.size)
            sends = torch.as_tensor(send_counts, device="cpu")
            recvs = None if recv_counts is None else torch.as_tensor(recv_counts, device="cpu")
            is_known = traced and recv_counts is not None and not isinstance(recv_counts, Tensor)
            length = sum(cast("list[int]", recv_counts)) if is_known else -1
        rows, _ = quantized_ops.quantized_all_to_all(input, sends, recvs, length, *options, group)
        if async_op and recvs is None:
            return None, Done(rows)
        return outcome(rows, None, async_op)
    with guard(comm, RowExchange.operator):
        if needs_grad(input):
            raise InvalidParamError("input requires grad, which async_op excludes", id=1455)
    options = with_format(comm, RowExchange.operator, input, options, accuracy)
    with guard(comm, RowExchange.operator):
        limit = calls.limit(comm, timeout)
        exchange = RowExchange(comm, input, send_counts, recv_counts, options, accuracy is not None)

    def run() -> Any:
        return (exchange.output, exchange.submit(limit)) if async_op else exchange.run(limit)[0]

    if not is_watched():
        return run()
    outputs = [x for x in (exchange.output if accuracy else (exchange.output,)) or () if isinstance(x, Tensor)]
    return watch_call(RowExchange.operator, comm, outputs, [input], run)


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
) -> Tensor | None:
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
    comm: Any = None
    if not is_tracing(input):
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return None
    with guard(comm, "quantized_all_reduce"):
        if comm is not None:
            check_shapes(input.shape, weight.shape, None if bias is None else bias.shape)
        elements: Any = group_size
        if group_size == "token":
            elements = max(weight.shape[0], 1)
        elif group_size == "tensor":
            elements, chunks = max(grouping("tensor", input[..., :1]) * weight.shape[0], 1), 1
        options = Options(
            format=str(coding(bits, format)),
            group_size=elements,
            gather=gather,
            op=op,
            overflow=overflow,
            leaves=leaves,
        )
    result: Tensor = quantized_ops.quantized_linear(input, weight, chunks, *options, group)
    return result if bias is None else result + bias
