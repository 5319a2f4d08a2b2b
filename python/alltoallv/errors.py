"""The error family of alltoallv.

Every failure is one of these classes, with one sentence for a person and ``.code``, the status number of Huawei's
ATB (``ErrorType``), so that a code means the same in both libraries. The sentence ends with ``.id``, the id of the
condition, which stays when a sentence is reworded: programs and searches may rely on it.
"""

from __future__ import annotations


def _id_of(message: str) -> str:
    return message[-9:-1] if message[-11:-5] == " [A2A-" else ""


class AllToAllVError(RuntimeError):
    """Base of the family; a RuntimeError, as what torch's engines raise. ``code`` is ATB's status number.

    ``id``, where given, is the number of the condition: the message then ends with it, unless it ends with one already.
    """

    code: int = 3

    def __init__(self, message: str = "", code: int | None = None, *, id: int | None = None) -> None:
        if id is not None and not _id_of(message):
            message = f"{message} [A2A-{id}]"
        self.args = (message,)  # what torch.compile can trace, and then shows
        if code is not None:
            self.code = code

    @property
    def id(self) -> str:
        """The id of the condition, as "A2A-1203", with which the message ends; docs/error-ids.md lists all.

        Where one error tells of another, such as a peer's, it is that of the cause. Empty where the message has none.
        """
        return _id_of(str(self))

    def __reduce__(self) -> tuple[type[AllToAllVError], tuple[str, int]]:
        return type(self), (str(self), self.code)


class InvalidParamError(AllToAllVError, ValueError):
    """An argument has a value that the operator does not accept."""

    code = 1


class InvalidTensorError(AllToAllVError, ValueError):
    """A tensor has a number, dtype, shape or layout that the operator does not accept."""

    code = 8


class PeerMismatchError(AllToAllVError):
    """Two ranks disagree about an operation: operator, dtype, counts or order. The communicator stays usable."""

    code = 1


class PeerLostError(AllToAllVError):
    """A rank died, left or aborted. The communicator is unusable; make a new one."""

    code = 25


class CommTimeoutError(AllToAllVError, TimeoutError):
    """A rank did not arrive in time. The communicator is unusable; make a new one."""

    code = 25


class DeadlockError(AllToAllVError):
    """Ranks wait for each other in different groups; the message names the ranks and operators. Raised on all of them
    within about a second. The communicators in which they waited are unusable; make new ones.
    """

    code = 1


class HcclError(AllToAllVError):
    """A call into HCCL failed; the message gives HCCL's number, its name and the call."""

    code = 25


class BackendUnavailableError(AllToAllVError):
    """A backend cannot be used here; the message describes what is missing and how to get it."""

    code = 28


class ValueOverflowError(AllToAllVError, OverflowError):
    """A value does not fit the output's dtype, and ``overflow`` is "raise". Raised on every rank; the output is
    undefined, the communicator stays usable.
    """

    code = 3


class ResourceError(AllToAllVError, OSError):
    """This process, or a peer's, has run out of threads, descriptors or space; the message says of what, and on which
    rank. ``Communicator.usable`` shows whether the communicator goes on: not if other ranks were moving data by then.
    """

    code = 4


class OutOfMemoryError(ResourceError, MemoryError):
    """This process, or a peer's, has run out of memory; the message says on which rank."""

    code = 27
