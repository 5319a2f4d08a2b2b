"""Error feedback: keeps the rounding error of a quantized reduction and adds it before the next one."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import QuantizedReduction

T = TypeVar("T")
_NAMES = ("error", "gather_error")


class Feedback(Generic[T]):
    """Holds the state of one vector that is reduced again and again, in a framework's arrays ``T``; the caller owns it.

    The arrays are made at the first use. ``gather_error`` belongs to one number of ranks.
    """

    _title: ClassVar[str] = "an ErrorFeedback"  # for messages

    def __init__(self) -> None:
        self._arrays: dict[str, T | None] = dict.fromkeys(_NAMES)

    def state_dict(self) -> dict[str, T | None]:
        """Returns ``error`` and ``gather_error``, the arrays themselves; None for one that does not exist yet."""
        return dict(self._arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads copies of a state that `state_dict` returned on this or another rank; None starts from zero.

        Raises:
            InvalidParamError: the keys are not the keys of `state_dict`, or a value is not an array of numbers.
        """
        if not isinstance(state, dict):
            raise InvalidParamError(
                f"the state is {'a ' + type(state).__name__}, expected a dict of {', '.join(_NAMES)}", id=1178
            )
        if set(state) != set(_NAMES):
            raise InvalidParamError(
                f"the state has the keys {sorted(map(str, state))}, expected {list(_NAMES)}", id=1179
            )
        self._arrays = {name: self._taken(name, value) for name, value in state.items()}

    def reset(self) -> None:
        """Forgets all errors."""
        self._arrays = dict.fromkeys(_NAMES)

    @classmethod
    def states_of(cls, feedback: object) -> dict[str, T | None]:
        """Returns the arrays of an ``error_feedback``, which the core checks; none for what is of another kind."""
        return feedback._arrays if isinstance(feedback, cls) else {}

    @classmethod
    def arrays_of(
        cls, feedback: Feedback[T] | None, request: QuantizedReduction, size: int, rank: int, like: T
    ) -> tuple[T | None, T | None]:
        """Returns ``error`` and, if a request's sum is quantized, ``gather_error``; both are None without a state.

        Args:
            given: A caller's ``error_feedback``.
            like: The input; arrays are made on its device, or moved there.

        Raises:
            InvalidParamError: the state is of another kind, or belongs to another vector or another number of ranks.
        """
        if feedback is None:
            return None, None
        if not isinstance(feedback, cls):
            raise InvalidParamError(f"error_feedback is a {type(feedback).__name__}, expected {cls._title}", id=1180)
        error = feedback._array("error", request.count, like)
        if request.operator != "quantized_all_reduce" or request.quantization.gather != "quantized":
            return error, None
        return error, feedback._array("gather_error", request.quantization.part(request.count, size, rank)[1], like)

    def _array(self, name: str, count: int, like: T) -> T:
        array = self._arrays[name]
        if array is None:
            array = self._arrays[name] = self._zeros(count, like)
        elements = self._count(array)
        if elements != count:
            raise InvalidParamError(
                f"the error feedback's {name} has {elements} elements, expected {count}: "
                "it is of another vector or another number of ranks; reset it",
                id=1181,
            )
        array = self._arrays[name] = self._placed(array, like)
        return array

    def _taken(self, name: str, value: Any) -> T | None:
        try:
            return None if value is None else self._copy(value)
        except (TypeError, ValueError, RuntimeError):
            shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
            raise InvalidParamError(
                f"the state's {name} is {shown}, expected an array of numbers or None", id=1182
            ) from None

    def _placed(self, array: T, like: T) -> T:
        """Returns the array on the device of ``like``."""
        return array

    def _zeros(self, count: int, like: T) -> T:
        raise NotImplementedError

    def _copy(self, value: Any) -> T:
        raise NotImplementedError

    def _count(self, array: T) -> int:
        raise NotImplementedError


class ErrorFeedback(Feedback[npt.NDArray[Any]]):
    """Keeps what quantization has lost of one vector, in NumPy arrays: one class serves NumPy, MindSpore and Paddle.

    Give the same object to every reduction of that vector, one at a time. `state_dict` has ``error``, float32, one per
    element, and with ``gather="quantized"`` also ``gather_error``, one per element of the part that this rank reduces.
    Every rank has its own state: save it per rank. After a call that failed the state is undefined: `reset` it.
    """

    _title = "alltoallv.numpy.ErrorFeedback"

    def _zeros(self, count: int, like: object) -> npt.NDArray[Any]:
        return np.zeros(count, np.float32)

    def _copy(self, value: Any) -> npt.NDArray[Any]:
        return np.array(value, np.float32).reshape(-1)

    def _count(self, array: npt.NDArray[Any]) -> int:
        return array.size
