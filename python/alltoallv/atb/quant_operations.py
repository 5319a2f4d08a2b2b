"""The ATB-shaped quantized AllReduce on tensors of any framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from alltoallv import _core
from alltoallv._calls import adapters
from alltoallv._calls.adapters import Adapter
from alltoallv._calls.guard import Member
from alltoallv.atb.operations import A, Operation, describe
from alltoallv.atb.params import DeviceInfo, QuantAllReduceParam, QuantType
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.quantization.requests import Feedback
from alltoallv.quantization.spec import Quantization, QuantizedReduction

_OPERATOR = "quantized_all_reduce"


class QuantAllReduceOperation(Operation):
    """A quantized all-reduce as a plan, which is set up once per shape.

    With a shared scale, int8 to float16: ``(sum of x of all ranks + rank_size * offset) * scale``. The sum is exact,
    then one multiplication and one rounding to float16, half to even; values that do not fit become the largest one.
    With ``QuantType.DYNAMIC`` it does what `alltoallv.numpy.quantized_all_reduce` does without a scale.

    Takes NumPy arrays and tensors of torch, MindSpore and Paddle, and returns the same kind; every rank gets the
    same bits, on every device. A call on the CPU blocks until the output is complete. Calls are collective; when a
    rank's own checks fail, the call fails on every rank.

    With torch tensors on a GPU or an NPU the codes travel over NCCL, HCCL or gloo, as bytes of an all-to-all and an
    all-gather, and are summed on the device. A call is enqueued on torch's current stream; the host waits only to read
    ``scale`` and ``offset``, which the ranks compare. Without a communicator, tensors on a GPU go through the default
    group of torch.distributed. Results have gradients in MindSpore's PyNative mode alone, with DYNAMIC: of the
    sum, not quantized. In its graphs the results of the cell `alltoallv.mindspore.QuantAllReduceCell` have.
    """

    def __init__(
        self,
        param: QuantAllReduceParam,
        communicator: Communicator | Member | None = None,
        *,
        device: DeviceInfo | None = None,
    ) -> None:
        """Checks the param as ATB's CreateOperation does; the arguments are as for `AllToAllVOperation`.

        ``communicator`` may also be a result of `alltoallv.torch.from_group`, for torch tensors of its device.

        Raises:
            InvalidParamError: a field has a value that ATB also refuses.
        """
        super().__init__(param, QuantAllReduceParam, communicator, device)
        self._param = param
        self._core = _core.QuantAllReduceOperation(param.core(), device, self._given_core, self._connect)
        self._begin(self._core, _OPERATOR, communicator)
        self._member: Communicator | None = self._communicator

    @property
    def param(self) -> QuantAllReduceParam:
        """The param that the operation was made with."""
        return self._param

    def __call__(
        self,
        x: A,
        scale: A | None = None,
        offset: A | None = None,
        *,
        out: A | None = None,
        error_feedback: Feedback[Any] | None = None,
        timeout: float | None = None,
    ) -> A:
        """Reduces `x`.

        Args:
            x: int8, 1 to 8 dimensions, the last a multiple of 16; with DYNAMIC float32, float16 or bfloat16 of any
                1 to 8 dimensions.
            scale: float16, equal on all ranks: ``[1]``, with PER_CHANNEL ``[n]`` or ``[1, n]`` for the last axis.
                None with DYNAMIC, as the offset.
            offset: float16, ``[1]``, equal on all ranks.
            out: Has the param's output dtype and the shape of `x`; contiguous and writable; with DYNAMIC it may be `x`.
                Left out, one is allocated: in shared memory, or on the device of `x`.
            error_feedback: With DYNAMIC the front end's ``ErrorFeedback`` (for Paddle NumPy's), on all ranks or none.
            timeout: Seconds to wait for the peers; left out, and on GPU and NPU, the communicator's own.

        Raises:
            InvalidTensorError, InvalidParamError: an argument of this rank, or of a peer, is wrong; ``code`` is ATB's.
            PeerMismatchError: two ranks differ in operator, number of elements, scale, offset or mode.
            ValueOverflowError: with ``overflow="raise"``, on every rank.
            PeerLostError, CommTimeoutError: a rank died, left, or did not arrive.
            HcclError: on NPU, a call into HCCL failed.
        """
        adapter = self._adapter(x)
        tensors = {"x": x} | {name: a for name, a in (("scale", scale), ("offset", offset)) if a is not None}
        y: A | None = adapter.differentiated(self, x, out, error_feedback, timeout)
        return adapter.call(self._reduce, adapter, tensors, out, error_feedback, timeout) if y is None else y

    def _reduce(
        self, adapter: Adapter[A], tensors: dict[str, A], out: A | None, feedback: Feedback[Any] | None, timeout: Any
    ) -> A:
        x = tensors["x"]
        self._find_engine(adapter, x)
        limit = self._checked(_core.read_timeout, timeout)
        inputs: list[A] = [self._checked(self._as_input, name, a, adapter) for name, a in tensors.items()]
        states = [] if feedback is None else self._checked(self._states, feedback, inputs[0], adapter)
        if out is not None:
            self._checked(self._check_output, out, adapter)
        target = self._set_up(adapter, inputs, out, states)
        if (self._npu or adapter.queues()) and self._engine is None:
            self._engine = adapter.engine(x, self._member)
        run: Callable[[], None]
        if self._engine is None:
            places = [adapters.find("x", a).region(a) for a in (*inputs, target, *states)]
            run = partial(self._core.execute, places[: len(inputs)], places[len(inputs) :], limit)
        else:
            self._checked(adapter.check_place, self._engine, inputs[0], target, *states)
            request = self._checked(self._request, adapter, inputs, target)
            run = partial(adapter.reduce, self._engine, request, (target, inputs[0], *states))
        adapter.show(_OPERATOR, (target, *states), inputs, run)
        return target

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        core = super()._connect(param)
        if self._npu:
            self._member = Communicator(core)
        return core

    def _check_create(self, device: DeviceInfo) -> None:
        _core.QuantAllReduceOperation(self._param.core(), device)

    def _states(self, feedback: Feedback[Any], x: A, adapter: Adapter[A]) -> list[Any]:
        """Returns the arrays of the error feedback, which the call replaces."""
        param = self._param
        if param.quant_type != QuantType.DYNAMIC:
            raise InvalidParamError(
                "error_feedback is given with a shared scale, expected quant_type 16 (DYNAMIC)", id=1221
            )
        desc = describe(x)
        counts = (math.prod(desc.shape),)
        request = QuantizedReduction(_OPERATOR, desc.dtype, desc.dtype, counts, param.quantization)
        arrays = adapter.feedback.arrays_of(feedback, request, param.rank_size, param.rank, x)
        return [a for a in arrays if a is not None]

    def _request(self, adapter: Adapter[A], inputs: Sequence[A], out: A) -> QuantizedReduction:
        """Returns the request for an engine, from tensors that it reaches."""
        dtype, out_dtype = adapter.dtype(inputs[0]), adapter.dtype(out)
        target, source = adapter.region(out), adapter.region(inputs[0])
        if target[0] != source[0] or out_dtype != dtype:
            _core.check_apart(target, source)
        return self._terms(adapter, inputs, out_dtype)

    def request(self, *inputs: A) -> QuantizedReduction:
        """Returns what a call with tensors of these shapes and dtypes asks of an engine, after ATB's checks of them."""
        expected = self._checks.infer_shape([self._checked(describe, x) for x in inputs])
        return self._checked(self._terms, adapters.find("x", inputs[0]), inputs, expected.dtype)

    def _terms(self, adapter: Adapter[A], inputs: Sequence[A], out_dtype: str) -> QuantizedReduction:
        shape, dtype = tuple(describe(inputs[0]).shape), adapter.dtype(inputs[0])
        counts = (math.prod(shape),)
        if self._param.quant_type == QuantType.DYNAMIC:
            return QuantizedReduction(_OPERATOR, dtype, out_dtype, counts, self._param.quantization, shape=shape)
        scale, offset = (adapter.values(x).reshape(-1).astype(np.float32) for x in inputs[1:])
        terms = Quantization(), scale, None, float(offset[0]), shape
        return QuantizedReduction(_OPERATOR, dtype, out_dtype, counts, *terms)
