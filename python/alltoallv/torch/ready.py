"""Calls over shared memory whose checks an earlier call has passed: only the tensors are looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from torch import Tensor, dtype, is_grad_enabled
from torch.autograd import _profiler_enabled

from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError
from alltoallv.torch.calls import AnyCommunicator, Call, SharedCall
from alltoallv.torch.tensors import empty


class Ready:
    """A checked call without gaps, for tensors that need no conversion."""

    __slots__ = ("_complex", "_in_place", "_input", "_input_bytes", "_input_size", "_output", "_output_bytes",
                 "_output_size", "_run", "_shape")  # fmt: skip

    def __init__(
        self,
        run: Callable[[int, int], object],
        input: dtype,
        input_size: int,
        output: dtype,
        shape: tuple[int, ...],
        in_place: bool = False,
    ) -> None:
        """At least so many elements on either side; ``shape`` is that of an output that is not given.

        Args:
            run: Moves the data, from one address to another.
            in_place: Whether the output may lie where the input does, if their elements are equally long.
        """
        self._run, self._shape, self._in_place = run, shape, in_place and input.itemsize == output.itemsize
        self._input, self._input_size = input, input_size
        self._output, self._output_size = output, math.prod(shape)
        self._input_bytes, self._output_bytes = input.itemsize, output.itemsize
        self._complex = input.is_complex or output.is_complex

    def __call__(self, input: Tensor, out: Tensor | None) -> Tensor | None:
        """Runs it, and returns the output; None if these are no such tensors, with nothing done."""
        try:
            if _profiler_enabled() or not self._is_plain(input, self._input):
                return None
            if input.requires_grad and is_grad_enabled():
                return None
            if out is None:
                out = empty(self._shape, self._output)
            elif not self._is_plain(out, self._output):
                return None
            sends, receives = input.numel(), out.numel()
            if sends < self._input_size or receives < self._output_size:
                return None
            source, target = input.data_ptr(), out.data_ptr()
            if (sends and not source) or (receives and not target):  # no memory
                return None
            overlap = source < target + receives * self._output_bytes and target < source + sends * self._input_bytes
            if overlap and not (self._in_place and source == target):
                return None
        except (AllToAllVError, RuntimeError):  # out of memory, or a tensor without storage: for the guard to see
            return None
        self._run(source, target)
        return out

    def _is_plain(self, tensor: Tensor, dtype: dtype) -> bool:
        """Whether the elements lie in host memory one after the other. A sparse tensor raises RuntimeError."""
        return (
            type(tensor) is Tensor
            and tensor.dtype is dtype
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not (tensor.is_neg() or tensor.is_nested)
            and not (self._complex and tensor.is_conj())
        )


def again(comm: AnyCommunicator, what: Hashable, input: Tensor, out: Tensor | None) -> Tensor | None:
    """Runs what `remember` was told of an equal call, and returns the output; None if there is no such call.

    ``what``: the operator, and the arguments that are no tensors.
    """
    if type(comm) is not Communicator or type(input) is not Tensor or (type(out) is not Tensor and out is not None):
        return None
    try:
        ready = comm.repeats.find(_key(what, input, out))
    except RuntimeError:  # a nested tensor has no shape
        return None
    return None if ready is None else ready(input, out)


def remember(call: Call, what: Hashable, input: Tensor, out: Tensor | None, *, in_place: bool = False) -> None:
    """A call without gaps that has passed its checks: `again` finds it by the same arguments."""
    if isinstance(call, SharedCall):
        made = call.output
        ready = Ready(call.plan.run, input.dtype, input.numel(), made.dtype, made.shape, in_place)
        call.communicator.repeats.keep(_key(what, input, out), ready)


def _key(what: Hashable, input: Tensor, out: Tensor | None) -> Hashable:
    return what, input.dtype, input.shape, None if out is None else out.shape
