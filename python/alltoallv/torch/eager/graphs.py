"""Finds out where torch records a call instead of running it, in a graph that runs later on other data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.fx.experimental.proxy_tensor import get_proxy_mode

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
