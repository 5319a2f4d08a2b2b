"""The ATB-shaped quantized AllReduce on NumPy arrays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv.atb.params import DeviceInfo
from alltoallv.atb.quant_params import QuantAllReduceParam, QuantType
from alltoallv.communicator import Communicator, connect
from alltoallv.dtypes import numpy_dtype
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization.feedback import Feedback
from alltoallv.quantization.spec import QuantizedReduction

Array = npt.NDArray[Any]
P = ParamSpec("P")
T = TypeVar("T")


A = TypeVar("A")  # array or tensor


class Checks(Protocol):
    """As one rank of several: what fails here the peers raise too."""

    def infer_shape(self, inputs: Sequence[_core.TensorDesc]) -> _core.TensorDesc: ...
    def setup(self, inputs: Sequence[_core.TensorDesc], outputs: Sequence[_core.TensorDesc]) -> None: ...
    def announce(self, code: int, message: str) -> None: ...


class QuantOperation(ABC, Generic[A]):
    """What the operator does with arrays of any kind; a front end says how it sees one."""

    def __init__(
        self,
        param: QuantAllReduceParam,
        communicator: Communicator | None = None,
        *,
        device: DeviceInfo | None = None,
    ) -> None:
        """Checks the param as ATB's CreateOperation does; the arguments are those of `AllToAllVOperation`.

        Raises:
            InvalidParamError: a field has a value that ATB refuses too.
        """
        core = None if communicator is None else communicator.core
        self._param = param
        self._core = _core.QuantAllReduceOperation(param.core(), device, core, self._connect)
        self._checks: Checks = self._core
        self._plan: Hashable = None  # shapes that are set up for
        self._expected: _core.TensorDesc | None = None  # the output that is set up for

    def _reduce(
        self,
        x: A,
        scale: A | None,
        offset: A | None,
        out: A | None,
        feedback: Feedback[A] | None,
        timeout: float | None,
    ) -> A:
        given = [(name, a) for name, a in (("x", x), ("scale", scale), ("offset", offset)) if a is not None]
        inputs = [self._checked(self._as_input, name, a) for name, a in given]
        states = [] if feedback is None else self._checked(self._states, feedback, inputs[0])
        if out is not None:
            self._checked(self._check_output, out)
        shapes = tuple(self._key(a) for a in (*inputs, *states))
        key = (*shapes, len(states), None if out is None else self._key(out))
        if key != self._plan or self._expected is None:
            self._plan = None
            descs = [self._describe(a) for a in inputs]
            self._expected = self._checks.infer_shape(descs)
            outputs = [self._expected if out is None else self._describe(out), *map(self._describe, states)]
            self._checks.setup(descs, outputs)
            self._plan = key
        if out is None:
            out = self._checked(self._allocate, inputs[0], self._expected.dtype)
        self._execute(inputs, [out, *states], -1.0 if timeout is None else timeout)
        return out

    def _states(self, feedback: Feedback[A], x: A) -> list[A]:
        """The arrays of the error feedback, which are replaced."""
        param = self._param
        if param.quant_type != QuantType.DYNAMIC:
            raise InvalidParamError("error_feedback is given with a shared scale, expected quant_type 16 (DYNAMIC)")
        desc = self._describe(x)
        counts = (math.prod(desc.shape),)
        request = QuantizedReduction("quantized_all_reduce", desc.dtype, desc.dtype, counts, param.quantization)
        arrays = Feedback.arrays_of(feedback, request, param.rank_size, param.rank, x)
        return [a for a in arrays if a is not None]

    def _checked(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`; what it raises the peers raise too."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            code = 27 if isinstance(error, MemoryError) else getattr(error, "code", 3)
            self._checks.announce(code, str(error))
            raise

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        """Makes or finds the communicator that the param describes."""
        return connect(param)

    @abstractmethod
    def _as_input(self, name: str, x: A) -> A:
        """``x``, or a contiguous copy; refuses what is none."""

    @abstractmethod
    def _check_output(self, out: A) -> None:
        """Refuses what cannot be written into."""

    @abstractmethod
    def _key(self, x: A) -> Hashable:
        """With another key the operation is set up anew."""

    @abstractmethod
    def _describe(self, x: A) -> _core.TensorDesc: ...

    @abstractmethod
    def _allocate(self, like: A, dtype: str) -> A:
        """An output in the shape of ``like``."""

    @abstractmethod
    def _execute(self, inputs: Sequence[A], outputs: Sequence[A], timeout: float) -> None:
        """``outputs``: the result, then the states of the error feedback."""


class QuantAllReduceOperation(QuantOperation[Array]):
    """A quantized all-reduce as a plan, set up once per shape.

    With a shared scale, int8 to float16: ``(sum of x of all ranks + rank_size * offset) * scale``. The sum is exact,
    then one multiplication and one rounding to float16, half to even; what does not fit becomes the largest float16.
    With ``QuantType.DYNAMIC`` what `alltoallv.numpy.quantized_all_reduce` does without a scale.

    Every rank gets the same bits. A call blocks until the output is complete. Calls are collective; when a rank's own
    checks fail, the call fails on every rank.
    """

    def __call__(
        self,
        x: Array,
        scale: Array | None = None,
        offset: Array | None = None,
        *,
        out: Array | None = None,
        error_feedback: Feedback[Array] | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Reduces `x`.

        Args:
            x: int8, 1 to 8 dimensions, the last a multiple of 16; with DYNAMIC float32, float16 or bfloat16 of any
                1 to 8 dimensions.
            scale: float16, equal on all ranks: ``[1]``, with PER_CHANNEL ``[n]`` or ``[1, n]`` for the last axis.
                None with DYNAMIC, as the offset.
            offset: float16, ``[1]``, equal on all ranks.
            out: Of the param's output dtype in the shape of `x`, contiguous and writable; with DYNAMIC it may be `x`.
                Left out, one is allocated.
            error_feedback: With DYNAMIC an `alltoallv.numpy.ErrorFeedback`, on all ranks or none.
            timeout: Seconds to wait for the peers; left out, the communicator's own.

        Raises:
            InvalidTensorError, InvalidParamError: this rank's arguments, or those of a peer; ``code`` is ATB's.
            PeerMismatchError: two ranks differ in operator, number of elements, scale, offset or mode.
            ValueOverflowError: with ``overflow="raise"``, on every rank.
            PeerLostError, CommTimeoutError: a rank died, left, or did not arrive.
        """
        return self._reduce(x, scale, offset, out, error_feedback, timeout)

    def _as_input(self, name: str, x: Array) -> Array:
        if not isinstance(x, np.ndarray):
            raise InvalidTensorError(f"{name} is a {type(x).__name__}, expected a NumPy array", 5)
        return np.asarray(x, order="C")

    def _check_output(self, out: Array) -> None:
        self._as_input("out", out)
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise InvalidParamError("out is not contiguous and writable, expected both")

    def _key(self, x: Array) -> Hashable:
        return x.shape, x.dtype.name

    def _describe(self, x: Array) -> _core.TensorDesc:
        return _core.TensorDesc(x.shape, x.dtype.name)

    def _allocate(self, like: Array, dtype: str) -> Array:
        return memory.empty(like.shape, numpy_dtype(dtype))

    def _execute(self, inputs: Sequence[Array], outputs: Sequence[Array], timeout: float) -> None:
        places, targets = ([(a.ctypes.data, a.nbytes) for a in arrays] for arrays in (inputs, outputs))
        self._core.execute(places, targets, timeout)
