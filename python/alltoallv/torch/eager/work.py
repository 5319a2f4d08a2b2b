"""The handle of an asynchronous call, and what `all_to_all_v` returns where the counts lie on an NPU and the host does
not know them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled

from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import Ended, Handle, raise_for
from alltoallv.errors import InvalidParamError
from alltoallv.torch.eager import profile

Future: TypeAlias = torch.futures.Future[Any]
_LONG = 1e9  # seconds


class Work(Handle):
    """An operator under way, with the methods of ``torch.distributed.Work``.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    _seen = staticmethod(_profiler_enabled)

    def _waiting(self) -> contextlib.AbstractContextManager[Any]:
        return profile.waiting()

    def _seconds(self, timeout: Any) -> float | None:
        if isinstance(timeout, timedelta):
            return timeout.total_seconds() or None  # torch's zero means no limit
        return super()._seconds(timeout)

    def is_success(self) -> bool:
        """Returns True once the operator has succeeded."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Waits for the operator: its memory is the host's, which has no streams."""
        self.wait()

    def get_future(self) -> Future:
        """Returns a future of the output, completed by a thread that waits for the operator.

        It raises errors as RuntimeError, with their class and text in the message.
        """

        def result() -> Any:
            self.wait(_LONG)  # this thread has no stream of its own that anybody could use
            return self.result()

        outcome, future = promise()
        threading.Thread(target=settle, args=(outcome, result), name="alltoallv-future", daemon=True).start()
        return future


class Done(Ended, Work):
    """The handle of a call in a graph, which is done when it returns."""


def promise() -> tuple[Future, Future]:
    """Returns a future to `settle`, and the one for the caller, which then has the result or raises the error."""
    outcome: Future = torch.futures.Future()
    # torch's C++ would take a value of `set_exception` for a result; it recognizes an error that a callback raises.
    return outcome, outcome.then(_unwrap)


def settle(outcome: Future, result: Callable[[], Any]) -> None:
    """Completes a future of `promise` with what ``result()`` returns or raises."""
    try:
        outcome.set_result((result(), None))
    except Exception as error:
        outcome.set_result((None, error))


def _unwrap(outcome: Future) -> Any:
    result, error = outcome.value()
    if error is not None:
        raise error.with_traceback(None)
    return result


class Received(NamedTuple):
    """The result of an `all_to_all_v` with a capacity: three tensors on the device, filled by the device.

    Attributes:
        output: The input's dtype: ``capacity`` rows, or elements, of which the first are what was received, packed in
            the order of the ranks; zeros behind.
        recv_counts: int64, shape ``[W]``: how many came from each rank.
        status: int32; its column 0 is zeros, or describes what went wrong, the same on all ranks; `check` reads it.
    """

    output: Tensor
    recv_counts: Tensor
    status: Tensor

    def check(self) -> Received:
        """Waits for the device, and returns this result if the exchange was done; may be called when it suits.

        Raises:
            InvalidParamError: On every rank: one receives more than its capacity, or has counts that do not fit its
                input. Nothing was written anywhere, and the communicator stays usable.
            PeerMismatchError: The same for rows of different sizes, or counts that are not the ``recv_counts`` given.
            CommTimeoutError: A rank did not come in time (HCCL_EXEC_TIMEOUT); the group's kernels are of no more use.
        """
        raise_for(self.status.cpu().tolist())
        return self


def counts_on_device(name: str, counts: Counts, device: torch.device, size: int) -> Tensor:
    """Returns counts as int64 on the device; those that lie there are not read by the host."""
    tensor = counts if isinstance(counts, Tensor) else torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        raise InvalidParamError(f"{name} has dtype {tensor.dtype}, expected integers", id=1432)
    if tuple(tensor.shape) != (size,):
        raise InvalidParamError(
            f"{name} has shape {tuple(tensor.shape)}, expected ({size},), one entry per rank", id=1433
        )
    return tensor.to(device, torch.int64).contiguous()
