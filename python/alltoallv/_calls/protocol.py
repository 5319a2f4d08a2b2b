"""What front ends may ask of any communicator, and of a call under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from alltoallv.quantization.spec import QuantizedReduction


class Pending(Protocol):
    """A call under way."""

    def wait(self, seconds: float = -1.0) -> bool:
        """False if it is not done within ``seconds``; raises what the call raised. Negative: no limit."""

    def done(self) -> bool:
        """True once it has succeeded or failed."""


class Member(Protocol):
    """A rank's membership in a group, over whichever engine moves its data: what guards, handles and users need.

    `alltoallv.Communicator` (shared memory) is one, so is every communicator of `alltoallv.torch.engines`.
    """

    rank: int
    size: int
    domain: str
    backend: str

    @property
    def usable(self) -> bool: ...
    def fail(self, operator: str, error: BaseException) -> None: ...
    def keep(self, pending: Any) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def flight_record(self) -> dict[str, Any]: ...
    def abort(self, reason: str = ...) -> None: ...
    def destroy(self) -> None: ...


class Call(Protocol):
    """A collective that has passed this rank's checks."""

    def run(self) -> Any: ...
    def submit(self) -> Pending: ...


class QuantizedEngine(Protocol):
    """A communicator on tensors of one framework that has quantized reductions."""

    def quantized_reduce(
        self, request: QuantizedReduction, output: Any, input: Any, error: Any = None, gather_error: Any = None
    ) -> Call:
        """``request`` on contiguous tensors on one device; the output has been allocated.

        Args:
            request: Compared between the ranks, scales included, before any data move.
            output: ``request.out_dtype``; all elements, or this rank's part of a reduce_scatter.
            input: ``request.dtype``, all elements. May be the output of an all-reduce if the dtypes agree.
            error: Error feedback, or None: float32, one per element of the input; replaced.
            gather_error: Error feedback of the second quantization, with ``gather="quantized"``, or None: float32, one
                per element of ``request.quantization.part(request.count, size, rank)``; replaced.

        The call raises ValueOverflowError on every rank if a value does not fit and ``overflow`` is "raise".
        """
