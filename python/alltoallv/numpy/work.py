"""The handle of an asynchronous call."""

from __future__ import annotations

from alltoallv._calls import signature
from alltoallv._calls.handle import Handle

ending = signature.ending(
    "None, or the `Work` with ``async_op=True``.",
    group="A `Communicator`, or None for the default one.",
    async_op="Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.",
    timeout="Seconds to wait for the peers; default: the communicator's.",
)


class Work(Handle):
    """An operator under way. The arrays that it uses stay alive until it is done, even if the handle is dropped."""
