"""The ATB-shaped AllToAllV operator on NumPy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv.atb.params import AllToAllVParam, DeviceInfo
from alltoallv.communicator import Communicator, connect
from alltoallv.errors import InvalidParamError, InvalidTensorError

Array = npt.NDArray[Any]
P = ParamSpec("P")
T = TypeVar("T")


A = TypeVar("A")  # array or tensor


class Operation(ABC, Generic[A]):
    """What the operator does with arrays of any kind; a front end says how it sees one."""

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
        self._core = _core.AllToAllVOperation(param, device, core, self._connect)
        self._communicator = communicator
        # Shape, dtype and place of the input that is set up for.
        self._plan: Hashable = None
        self._output: Hashable = None
        self._shape: tuple[int, ...] = ()  # of the output

    @property
    def param(self) -> _core.AllToAllVParam:
        """A copy of the param that the operation was made with."""
        return self._core.param

    def _exchange(self, x: A, out: A | None, timeout: float | None) -> A:
        x = self._checked(self._as_input, x)
        if out is not None:
            self._checked(self._check_output, out)
        if self._key(x) != self._plan or (out is not None and self._key(out) != self._output):
            self._set_up(x, out)  # says what is wrong
        if out is None:
            out = self._checked(self._allocate, self._shape, x)
        self._execute(x, out, -1.0 if timeout is None else timeout)
        return out

    def _set_up(self, x: A, out: A | None) -> None:
        self._plan = None
        inputs = [self._checked(self._describe, x)]
        expected = self._core.infer_shape(inputs)
        outputs = [expected if out is None else self._checked(self._describe, out)]
        self._core.setup(inputs, outputs)
        self._shape = tuple(expected.shape)
        self._plan = self._key(x)
        self._output = (self._shape, *self._key(x)[1:])

    def _checked(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`; what it raises the peers raise too."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            code = 27 if isinstance(error, MemoryError) else getattr(error, "code", 3)
            self._core.announce(code, str(error))
            raise

    def _connect(self, param: _core.AllToAllVParam) -> _core.Communicator:
        """Makes or finds the communicator that the param describes."""
        return connect(param)

    @abstractmethod
    def _as_input(self, x: A) -> A:
        """``x``, or a contiguous copy; refuses what is none."""

    @abstractmethod
    def _check_output(self, out: A) -> None:
        """Refuses what cannot be written into."""

    @abstractmethod
    def _key(self, x: A) -> tuple[Hashable, ...]:
        """Shape first; with another key the operation is set up anew."""

    @abstractmethod
    def _describe(self, x: A) -> _core.TensorDesc: ...

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], like: A) -> A: ...

    @abstractmethod
    def _execute(self, x: A, out: A, timeout: float) -> None: ...


class AllToAllVOperation(Operation[Array]):
    """Exchanges data between all ranks as its param says; a plan, so that a call that repeats is cheap.

    Checks and set-up are paid once per shape and dtype of the input. A call blocks until this rank's output
    is complete. Calls are collective: every rank makes the same ones in the same order. When a rank's own
    checks fail in a call, the call fails on every rank.
    """

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
        return self._exchange(x, out, timeout)

    def _as_input(self, x: Array) -> Array:
        if self._communicator is not None and self._communicator.backend != "shm":
            raise InvalidTensorError("x lies in host memory, expected a tensor on an NPU: alltoallv.torch has them", 14)
        check_array("x", x)
        return np.asarray(x, order="C")  # keeps the number of dimensions, which ascontiguousarray does not

    def _check_output(self, out: Array) -> None:
        check_array("out", out)
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise InvalidParamError("out is not contiguous and writable, expected both")

    def _key(self, x: Array) -> tuple[Hashable, ...]:
        return x.shape, x.dtype

    def _describe(self, x: Array) -> _core.TensorDesc:
        return _core.TensorDesc(x.shape, x.dtype.name)

    def _allocate(self, shape: tuple[int, ...], like: Array) -> Array:
        return memory.empty(shape, like.dtype)

    def _execute(self, x: Array, out: Array, timeout: float) -> None:
        self._core.execute(x.ctypes.data, x.nbytes, out.ctypes.data, out.nbytes, timeout)


def check_array(name: str, array: object) -> None:
    if not isinstance(array, np.ndarray):
        raise InvalidTensorError(f"{name} is a {type(array).__name__}, expected a NumPy array", 5)
    if not array.dtype.isnative:
        message = f"{name} has dtype {array.dtype.str}, expected this machine's byte order"
        raise InvalidTensorError(message, 13)
