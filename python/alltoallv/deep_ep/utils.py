"""Events of calls that are done when they return, so that nothing waits for them, and sizes of no buffers."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class Config:
    """Accepts sizes of kernels and buffers, which this package does not need; all are ignored."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0: no memory is needed."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class EventHandle:
    """An event that has happened already."""

    def current_stream_wait(self) -> None:
        """Returns at once."""


class EventOverlap:
    """The end of a call; as a context manager it waits after what runs inside."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Returns at once."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
