"""What `help()` says about quantized collectives: the same in every front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

_ASYNC = """
        group: {group}.
        async_op: Return ``(output, {work})`` at once; the output is complete after the ``wait()`` of the {work}."""

_TIMEOUT = """
        timeout: Seconds to wait for the peers, above 0; default: the communicator's own."""

_CALL = _ASYNC + _TIMEOUT

_LEARNT = """
            Without ``recv_counts`` it is None at first, and the ``result()`` of the {work} gives it."""

_ERRORS = """
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer; no output has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come in time."""

_REDUCES = """
        op: ``"sum"`` or ``"avg"``.
        error_feedback: An ``ErrorFeedback``, the state of this vector, kept by the caller from call to call; on all
            ranks or none."""

_OVERFLOW = """
        overflow: What a finite value becomes that the output's dtype cannot hold: ``"saturate"``: its largest;
            ``"raise"``: ValueOverflowError; ``"infinity"``."""

ALL_REDUCE = f"""The sum of the ``input`` of all ranks, whose terms travel as codes; the same bits on every rank.

    Without a scale every group of elements has its own (dynamic). With ``scale`` the input is int8 and the result
    ``(sum of all inputs + W * offset) * scale``, exact up to one rounding, for W ranks. With ``comm_quant_scale_1`` and
    ``_2`` the input becomes codes by the first, and their sum by the second.

    Args:
        input: One shape and dtype on all ranks: float32, float16, bfloat16; int8 with ``scale``.
        scale: A number, or {{tensor}}: one value, or one per entry of the last axis, ``[n]`` or ``[1, n]``, of float16,
            bfloat16 or float32; equal on all ranks.
        offset: A number that is added to the codes of every rank, with ``scale``.
        bits: Of a code: 8, or 4. Dynamic only, as the next four.
        group_size: Elements per scale; groups begin at the first element of the flat {{tensor}}.
        gather: ``"full"`` gathers the sum in the output's dtype, ``"quantized"`` quantizes it again: fewer bytes, about
            1.4 times the error.{_REDUCES}
        out_dtype: float32, float16 or bfloat16; default: the input's, float16 for int8.{_OVERFLOW}
        comm_quant_scale_1, comm_quant_scale_2: As ``scale``, both or neither.
        out: Where the result goes; may be the input itself if the dtypes agree. Left out, it is allocated.{_CALL}

    Returns:
        The result in the input's shape.{{gradient}}

    Raises:
        PeerMismatchError: the ranks differ in operator, elements, dtypes or any of these options, scales and offset
            included; no output has been written.
        ValueOverflowError: on every rank, with ``overflow="raise"``; the output is undefined.{_ERRORS}
    """

REDUCE_SCATTER = f"""The sum of the ``input`` of all ranks, of which rank j gets its part of the rows of dimension 0.

    The terms travel as codes. Every part is quantized by itself: groups begin at its first element.

    Args:
        input: One shape, of at least 1 dimension, and dtype on all ranks: float32, float16, bfloat16.
        recv_counts: Rows that each rank gets, W integers >= 0, equal on all ranks; their sum is dimension 0. Default:
            equal shares.
        bits: Of a code: 8, or 4.
        group_size: Elements per scale.{_REDUCES}
        out_dtype: float32, float16 or bfloat16; default: the input's.{_OVERFLOW}
        out: Shape ``[recv_counts[rank], *input.shape[1:]]``, apart from the input. Left out, it is allocated.{_CALL}

    Returns:
        This rank's part.{{gradient}}

    Raises:
        PeerMismatchError: the ranks differ in operator, counts, dtypes or any of these options; no output has been
            written.
        ValueOverflowError: on every rank, with ``overflow="raise"``; the output is undefined.{_ERRORS}
    """

ALL_TO_ALL = f"""Sends rows to every rank as codes with their float32 scales, in one exchange; a MoE dispatch.

    Args:
        input: Rows ``[T, ...]`` of float32, float16 or bfloat16, sorted by the rank they go to.
        send_counts: Rows for every rank, W integers >= 0; their sum is T.
        recv_counts: Rows from every rank; left out, the peers tell.
        bits: Of a code: 8, or 4.
        group_size: Elements per scale; groups begin anew with every row. Default: one scale per row.
        out_dtype: Of the rows received: float32, float16 or bfloat16; default: the input's.{_OVERFLOW}
            Each rank looks at the rows that it sends, by its own ``out_dtype``.{_ASYNC}{_LEARNT}{_TIMEOUT}

    Returns:
        The rows received, dequantized, in the order of ranks: ``[sum(recv_counts), ...]``.{{gradient}}

    Raises:
        PeerMismatchError: two ranks differ in operator, counts, length of rows, bits or group size.
        ValueOverflowError: with ``overflow="raise"``.{_ERRORS}
    """


def of(text: str, **words: str) -> Callable[[F], F]:
    """Gives a function this docstring, with the front end's words."""

    def describe(function: F) -> F:
        function.__doc__ = text.format(**words)
        return function

    return describe
