"""Finds out who observes a call: a graph in which torch records it, to run it later on other data, or a profiler."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import _profiler_enabled
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from alltoallv._calls.guard import Member
from alltoallv.errors import InvalidParamError

P = ParamSpec("P")
T = TypeVar("T")
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def is_tracing(*tensors: object) -> bool:
    """Returns whether a call has to consist of operators, because its tensors stand for others.

    True under torch.compile, export and make_fx, under FakeTensorMode, where tensors have no data, in the transforms of
    torch.func, and for tensors on meta. Not under jit.trace, where calls are refused: its graphs lose collectives whose
    results nobody uses, and fold collectives of constants.
    """
    return (
        torch.compiler.is_compiling()
        or get_proxy_mode() is not None
        or torch._C._get_dispatch_mode(_FAKE) is not None
        or torch._C._are_functorch_transforms_active()
        or any(isinstance(x, torch.Tensor) and x.is_meta for x in tensors)
    )


def has_no_data(tensor: torch.Tensor) -> bool:
    """Returns whether there is nothing to move, nor a graph that moves it later: on meta, and in FakeTensorMode."""
    if tensor.is_meta:
        return True
    fake = torch._C._get_dispatch_mode(_FAKE) is not None
    return fake and not torch.compiler.is_compiling() and get_proxy_mode() is None


def check_untimed(timeout: float | None) -> None:
    """Raises if a timeout is given while a graph is made, because its operators have none."""
    if timeout is not None:
        raise InvalidParamError(f"timeout is {timeout!r}, expected None in a graph", id=1427)


def between_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a function that torch.compile leaves out of its graphs.

    `torch.compiler.disable` would make every call slower.
    """
    left_out = torch._disable_dynamo(function)  # its first call imports the compiler, which takes seconds

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return left_out(*args, **kwargs)
        return function(*args, **kwargs)

    return either


def hide(*kinds: type) -> None:
    """Makes torch.compile run the classes' methods as they are, and all that they call.

    Between its graphs the compiler looks at every Python function that runs, also those that torch's C++ calls.
    """
    skip = eval_frame._FrameAction.SKIP
    for kind in kinds:
        for each in vars(kind).values():
            if (code := getattr(getattr(each, "fget", each), "__code__", None)) is not None:
                eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


# Makes named ranges in torch.profiler, and in NVTX for CUDA tensors.
#
# Every collective is a range ``alltoallv.<operator>`` of the calling thread: the whole call, or the launch with
# ``async_op=True``, whose wait is a range ``alltoallv.wait``. With ``torch.profiler.profile(record_shapes=True)`` it
# carries the bytes that this rank sends and receives, the group, the rank and the counts; they stand in the events'
# ``kwinputs`` and in the exported trace. Without a profiler a range costs one check. NVIDIA's tools name a library in a
# variable before the process starts, which NVTX then loads.


_nothing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_nvtx = any(os.environ.get(f"NVTX_INJECTION{bits}_PATH") for bits in (64, 32))
_SHOWN = 64  # counts shown; counts of further ranks are cut


def span(
    operator: str,
    communicator: Member,
    itemsize: int,
    sends: Sequence[int],
    recvs: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    cuda: bool = False,
) -> contextlib.AbstractContextManager[Any]:
    """Opens the range of one call; ``sends`` and ``recvs`` are in elements of ``itemsize`` bytes; None: unknown yet."""
    nvtx = cuda and _nvtx
    if not (nvtx or _profiler_enabled()):
        return _nothing
    values: dict[str, Any] = {
        "group": communicator.domain,
        "rank": communicator.rank,
        "bytes_sent": sum(sends) * itemsize,
        "send_counts": _text(sends),
    }
    if recvs is not None:
        values |= {"bytes_received": sum(recvs) * itemsize, "recv_counts": _text(recvs)}
    if async_op:
        values["async"] = "True"
    return _range(f"alltoallv.{operator}", values, nvtx)


def waiting() -> contextlib.AbstractContextManager[Any]:
    """Opens the range of a wait for an asynchronous call."""
    return _range("alltoallv.wait", {}, False) if _profiler_enabled() else _nothing


def _range(name: str, values: dict[str, Any], nvtx: bool) -> contextlib.AbstractContextManager[Any]:
    recorded: contextlib.AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(name, [], values)
    if not nvtx:
        return recorded
    stack = contextlib.ExitStack()
    text = " ".join([name, *(f"{key}={value}" for key, value in values.items())])
    stack.enter_context(torch.cuda.nvtx.range(text.replace("{", "").replace("}", "")))
    stack.enter_context(recorded)
    return stack


def _text(counts: Sequence[int]) -> str:
    shown = ", ".join(map(str, counts[:_SHOWN]))
    return f"[{shown}{', ...' if len(counts) > _SHOWN else ''}]"
