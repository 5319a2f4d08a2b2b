"""The ATB-shaped quantized AllReduce on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv.communicator import Communicator, connect
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.params import DeviceInfo
from alltoallv.quant_params import QuantAllReduceParam

Array = npt.NDArray[Any]
P = ParamSpec("P")
T = TypeVar("T")


class QuantAllReduceOperation:
    """``(sum of x of all ranks + rank_size * offset) * scale``, int8 to float16; a plan, set up once per shape.

    The sum is exact, then one multiplication and one rounding to float16, half to even; what does not fit becomes the
    largest float16. Every rank gets the same bits. A call blocks until the output is complete. Calls are collective;
    when a rank's own checks fail, the call fails on every rank.
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
        self._core = _core.QuantAllReduceOperation(param.core(), device, core, connect)
        self._plan: Hashable = None  # shapes that are set up for

    def __call__(
        self, x: Array, scale: Array, offset: Array, *, out: Array | None = None, timeout: float | None = None
    ) -> Array:
        """Reduces `x`.

        Args:
            x: int8, 1 to 8 dimensions, the last a multiple of 16.
            scale: float16, equal on all ranks: ``[1]``, with PER_CHANNEL ``[n]`` or ``[1, n]`` for the last axis.
            offset: float16, ``[1]``, equal on all ranks.
            out: float16 in the shape of `x`, contiguous and writable. Left out, one is allocated.
            timeout: Seconds to wait for the peers; left out, the communicator's own.

        Raises:
            InvalidTensorError, InvalidParamError: this rank's arguments, or those of a peer; ``code`` is ATB's.
            PeerMismatchError: two ranks differ in operator, number of elements, scale or offset.
            PeerLostError, CommTimeoutError: a rank died, left, or did not arrive.
        """
        inputs = [self._checked(_contiguous, name, a) for name, a in (("x", x), ("scale", scale), ("offset", offset))]
        if out is not None:
            self._checked(_check_output, out)
        shapes = tuple((a.shape, a.dtype.name) for a in inputs)
        key = (*shapes, None if out is None else (out.shape, out.dtype.name))
        if key != self._plan:
            self._plan = None
            descs = [_describe(a) for a in inputs]
            expected = self._core.infer_shape(descs)
            self._core.setup(descs, [expected if out is None else _describe(out)])
            self._plan = key
        if out is None:
            out = self._checked(memory.empty, inputs[0].shape, np.float16)
        places = [(a.ctypes.data, a.nbytes) for a in inputs]
        self._core.execute(places, (out.ctypes.data, out.nbytes), -1.0 if timeout is None else timeout)
        return out

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
