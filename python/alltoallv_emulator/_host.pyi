"""Calls operators with CPU tensors over the memory of npu tensors (emulator/python/on_host.cpp)."""

from collections.abc import Callable
from typing import Any

import torch

def install(
    tensor: type[torch.Tensor],
    dtype: type[torch.dtype],
    stream: Callable[[int], int] | None,
    synchronize: Callable[[torch.device], None],
    to_npu: Callable[[torch.Tensor, torch.device], torch.Tensor],
    empty_like: Callable[..., torch.Tensor],
    waiting: list[Any],
) -> None:
    """Tells the module, once, what it needs of torch and of host_views.

    ``stream`` returns the handle of a device's current stream; None if torch_npu has a queue in front of its streams.
    ``waiting`` is not empty while a graph's replay waits.
    """

class OnHost:
    """A function that calls ``function`` as `host_views.on_host` says, and ``otherwise`` for unusual arguments."""

    def __init__(self, function: Callable[..., Any], otherwise: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
