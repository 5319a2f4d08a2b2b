"""The ATB-shaped AllToAllV operator on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv.communicator import Communicator, connect
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.params import AllToAllVParam, DeviceInfo

Array = npt.NDArray[Any]
P = ParamSpec("P")
T = TypeVar("T")


class AllToAllVOperation:
    """Exchanges data between all ranks as its param says; a plan, so that a call that repeats is cheap.

    Checks and set-up are paid once per shape and dtype of the input. A call blocks until this rank's output
    is complete. Calls are collective: every rank makes the same ones in the same order. When a rank's own
    checks fail in a call, the call fails on every rank.
    """

    def __init__(
        self,
        param: AllToAllVParam,
        communicator: Communicator | None = None,
        *,
        device: DeviceInfo | None = None,
    ) -> None:
        """Checks the param as ATB's CreateOperation does.

        Args:
            param: Copied; later changes have no effect.
            communicator: One of ``param.rank_size`` ranks in which this is ``param.rank``. Left out, the one
                that the param describes is made or found at the first call.
            device: On NPU, the device whose family and count the param is checked against.

        Raises:
            InvalidParamError: a field has a value that ATB refuses too (docs/compatibility.md).
        """
        core = None if communicator is None else communicator.core
        self._core = _core.AllToAllVOperation(param, device, core, connect)
        # Shape and dtype of the input that is set up for.
        self._plan: tuple[tuple[int, ...], np.dtype[Any]] | None = None
        self._output_shape: tuple[int, ...] = ()

    @property
    def param(self) -> _core.AllToAllVParam:
        """A copy of the param that the operation was made with."""
        return self._core.param

    def __call__(self, x: Array, *, out: Array | None = None, timeout: float | None = None) -> Array:
        """Exchanges `x`.

        Args:
            x: Any shape of 1 to 8 dimensions, taken flat; one of ATB's seven dtypes: float16, float32, int8,
                int16, int32, int64, bfloat16. Copied first if it is not contiguous.
            out: Shape ``[1, sum(recv_counts)]``, dtype of `x`, contiguous and writable, apart from `x` in
                memory. Left out, one is allocated.
            timeout: Seconds to wait for the peers; left out, the communicator's own.

        Returns:
            `out`, or the array allocated.

        Raises:
            InvalidTensorError, InvalidParamError: this rank's arguments, or those of a peer.
            PeerMismatchError: two ranks disagree about the operator, dtype or counts.
            PeerLostError, CommTimeoutError: a rank died, left, or did not arrive.
        """
        x = self._checked(contiguous, x)
        if out is not None:
            self._checked(check_output, out)
        if (x.shape, x.dtype) != self._plan:
            self._set_up(x, out)
        elif out is not None and (out.shape != self._output_shape or out.dtype != x.dtype):
            self._set_up(x, out)  # says what is wrong
        if out is None:
            out = self._checked(memory.empty, self._output_shape, x.dtype)
        seconds = -1.0 if timeout is None else timeout
        self._core.execute(x.ctypes.data, x.nbytes, out.ctypes.data, out.nbytes, seconds)
        return out

    def _set_up(self, x: Array, out: Array | None) -> None:
        self._plan = None
        inputs = [self._checked(describe, x)]
        expected = self._core.infer_shape(inputs)
        outputs = [expected if out is None else self._checked(describe, out)]
        self._core.setup(inputs, outputs)
        self._output_shape = tuple(expected.shape)
        self._plan = (x.shape, x.dtype)

    def _checked(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`; what it raises the peers raise too."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            code = 27 if isinstance(error, MemoryError) else getattr(error, "code", 3)
            self._core.announce(code, str(error))
            raise


def check_array(name: str, array: object) -> None:
    if not isinstance(array, np.ndarray):
        raise InvalidTensorError(f"{name} is a {type(array).__name__}, expected a NumPy array", 5)
    if not array.dtype.isnative:
        message = f"{name} has dtype {array.dtype.str}, expected this machine's byte order"
        raise InvalidTensorError(message, 13)


def contiguous(x: Array) -> Array:
    check_array("x", x)
    return np.asarray(x, order="C")  # keeps the number of dimensions, which ascontiguousarray does not


def check_output(out: Array) -> None:
    check_array("out", out)
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidParamError("out is not contiguous and writable, expected both")


def describe(array: Array) -> _core.TensorDesc:
    return _core.TensorDesc(array.shape, array.dtype.name)
