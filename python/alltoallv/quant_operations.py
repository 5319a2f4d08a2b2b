"""The ATB-shaped quantized AllReduce on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv.communicator import Communicator, connect
from alltoallv.dtypes import numpy_dtype
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.feedback import Feedback
from alltoallv.params import DeviceInfo
from alltoallv.quant_params import QuantAllReduceParam, QuantType
from alltoallv.quantization import QuantizedReduction

Array = npt.NDArray[Any]
P = ParamSpec("P")
T = TypeVar("T")


class QuantAllReduceOperation:
    """A quantized all-reduce as a plan, set up once per shape.

    With a shared scale, int8 to float16: ``(sum of x of all ranks + rank_size * offset) * scale``. The sum is exact,
    then one multiplication and one rounding to float16, half to even; what does not fit becomes the largest float16.
    With ``QuantType.DYNAMIC`` what `alltoallv.numpy.quantized_all_reduce` does without a scale.

    Every rank gets the same bits. A call blocks until the output is complete. Calls are collective; when a rank's own
    checks fail, the call fails on every rank.
    """

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
        self._core = _core.QuantAllReduceOperation(param.core(), device, core, connect)
        self._plan: Hashable = None  # shapes that are set up for
        self._expected: _core.TensorDesc | None = None  # the output that is set up for

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
        given = [(name, a) for name, a in (("x", x), ("scale", scale), ("offset", offset)) if a is not None]
        inputs = [self._checked(_contiguous, name, a) for name, a in given]
        states = [] if error_feedback is None else self._checked(self._states, error_feedback, inputs[0])
        if out is not None:
            self._checked(_check_output, out)
        shapes = tuple((a.shape, a.dtype.name) for a in (*inputs, *states))
        key = (*shapes, len(states), None if out is None else (out.shape, out.dtype.name))
        if key != self._plan or self._expected is None:
            self._plan = None
            descs = [_describe(a) for a in inputs]
            self._expected = self._core.infer_shape(descs)
            self._core.setup(descs, [self._expected if out is None else _describe(out), *map(_describe, states)])
            self._plan = key
        if out is None:
            out = self._checked(memory.empty, inputs[0].shape, numpy_dtype(self._expected.dtype))
        places, targets = ([(a.ctypes.data, a.nbytes) for a in arrays] for arrays in (inputs, [out, *states]))
        self._core.execute(places, targets, -1.0 if timeout is None else timeout)
        return out

    def _states(self, feedback: Feedback[Array], x: Array) -> list[Array]:
        """The arrays of the error feedback, which are replaced."""
        param = self._param
        if param.quant_type != QuantType.DYNAMIC:
            raise InvalidParamError("error_feedback is given with a shared scale, expected quant_type 16 (DYNAMIC)")
        if not isinstance(feedback, Feedback):
            raise InvalidParamError(f"error_feedback is a {type(feedback).__name__}, expected an ErrorFeedback")
        name = x.dtype.name
        request = QuantizedReduction("quantized_all_reduce", name, name, (x.size,), param.quantization)
        return [a for a in feedback.arrays(request, param.rank_size, param.rank, x) if a is not None]

    def _checked(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`; what it raises the peers raise too."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            code = 27 if isinstance(error, MemoryError) else getattr(error, "code", 3)
            self._core.announce(code, str(error))
            raise


def _contiguous(name: str, array: Array) -> Array:
    if not isinstance(array, np.ndarray):
        raise InvalidTensorError(f"{name} is a {type(array).__name__}, expected a NumPy array", 5)
    return np.asarray(array, order="C")


def _check_output(out: Array) -> None:
    _contiguous("out", out)
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidParamError("out is not contiguous and writable, expected both")


def _describe(array: Array) -> _core.TensorDesc:
    return _core.TensorDesc(array.shape, array.dtype.name)
