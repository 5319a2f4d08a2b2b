"""Error feedback: what the rounding of a quantized reduction lost, to be added before the next one."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from alltoallv.errors import InvalidParamError
from alltoallv.quantization import QuantizedReduction

T = TypeVar("T")
_NAMES = ("error", "gather_error")


class Feedback(Generic[T]):
    """The state of one vector that is reduced again and again, such as a gradient; owned by the caller.

    Give the same object to every reduction of that vector, one at a time. The arrays are made at the first use:
    ``error``, float32, one per element; with ``gather="quantized"`` also ``gather_error``, one per element of the part
    that this rank reduces (so it belongs to one number of ranks). Every rank has its own state: save it per rank. After
    a call that failed the state is undefined: `reset` it.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, T | None] = dict.fromkeys(_NAMES)

    def state_dict(self) -> dict[str, T | None]:
        """``error`` and ``gather_error``, the arrays themselves; None where there is none yet."""
        return dict(self._arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes copies of what `state_dict` gave, of this or another rank's past; None starts anew.

        Raises:
            InvalidParamError: keys other than those of `state_dict`.
        """
        if set(state) != set(_NAMES):
            raise InvalidParamError(f"the state has the keys {sorted(state)}, expected {list(_NAMES)}")
        self._arrays = {name: None if value is None else self._copy(value) for name, value in state.items()}

    def reset(self) -> None:
        """Forgets everything."""
        self._arrays = dict.fromkeys(_NAMES)

    def arrays(self, request: QuantizedReduction, size: int, rank: int, like: T) -> tuple[T, T | None]:
        """The state for a request: ``error`` and, if its sum is quantized too, ``gather_error``; for front ends.

        Args:
            like: The input, for the device of arrays that are made.

        Raises:
            InvalidParamError: the state is of another vector or another number of ranks.
        """
        error = self._array("error", request.count, like)
        if request.operator != "quantized_all_reduce" or request.quantization.gather != "quantized":
            return error, None
        return error, self._array("gather_error", request.quantization.part(request.count, size, rank)[1], like)

    def _array(self, name: str, count: int, like: T) -> T:
        array = self._arrays[name]
        if array is None:
            array = self._arrays[name] = self._zeros(count, like)
        found = self._count(array)
        if found != count:
            raise InvalidParamError(
                f"the error feedback's {name} has {found} elements, expected {count}: "
                "it is of another vector or another number of ranks; reset it"
            )
        return array

    def _zeros(self, count: int, like: T) -> T:
        raise NotImplementedError

    def _copy(self, value: Any) -> T:
        raise NotImplementedError

    def _count(self, array: T) -> int:
        raise NotImplementedError
