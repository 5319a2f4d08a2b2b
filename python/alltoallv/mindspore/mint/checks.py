"""Checks arguments as MindSpore's own functions do, with its texts and classes: TypeError instead of ValueError."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from mindspore import Tensor

from alltoallv import _core
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.front_end import check_async, enter
from alltoallv.mindspore.group import Group

P = ParamSpec("P")
R = TypeVar("R")

OPS = ("sum", "prod", "min", "max", "avg")
_TENSORS = {"tensor": "input", "input": "input", "input_tensor": "input", "output": "output", "output_tensor": "output"}
# Lists of one tensor per rank; this rank's entry must match the other tensor.
_LISTS = {"tensor_list": "tensor", "input_list": "output", "scatter_list": "tensor", "gather_list": "tensor"}
_ROOTS = {"scatter_list": "src", "gather_list": "dst"}  # lists that only one rank passes


def as_mint(function: Callable[P, R], ops: tuple[str, ...] = OPS, *, message: bool = False) -> Callable[P, R]:
    """Adds MindSpore's checks before the function's own; all ranks raise an error that one of them finds.

    A parameter's name determines its checks. A TypeError concerns this rank alone, as in MindSpore, and errors of a
    message only its two ranks.
    """
    parameters = inspect.signature(function).parameters
    operator = function.__name__.removesuffix("_uneven")  # the core's name
    operator = "reduce_scatter" if operator == "reduce_scatter_tensor" else operator
    lists, gathers = [name for name in _LISTS if name in parameters], "output_tensor" in parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        comm = None
        try:
            _check_values(function.__name__, arguments, ops)
            if message:
                name = "dst" if "dst" in arguments else "src"
                check_other(function.__name__, name, arguments[name], arguments["group"])
            if lists or gathers:
                comm = enter(arguments.get("group"))
                for name in lists:
                    _check_list(name, arguments, comm)
                if gathers:
                    _check_gathered(arguments["output_tensor"], arguments["input_tensor"], comm)
        except Exception as error:
            if message or isinstance(error, TypeError):
                raise
            with guard(comm or enter(arguments.get("group")), operator):
                raise error
        return function(*args, **kwargs)

    return call


def check_other(operator: str, name: str, peer: int, group: Group) -> int:
    """Returns the group's number of ``peer``; refuses a message from this rank to itself."""
    rank = groups.rank_in(group, peer, name)
    if rank == enter(group).rank:
        raise InvalidParamError(f"For {operator}, {name} is {peer}, this rank itself, expected another one", id=1341)
    return rank


def _check_values(operator: str, arguments: dict[str, Any], ops: tuple[str, ...]) -> None:
    for name, value in arguments.items():
        if value is inspect.Parameter.empty:
            continue  # the function itself reports what is missing
        if name in _TENSORS and not isinstance(value, Tensor):
            raise TypeError(f"For {operator}, the {_TENSORS[name]} tensor must be tensor, but got {type(value)}")
        if name == "op" and not isinstance(value, str):
            raise TypeError(f"For {operator}, the input op type must be str, but got {type(value)}")
        if name == "op" and value not in ops:
            raise TypeError(f"For {operator}, the input op value must be one of {', '.join(ops)}, but got {value!r}")
        if name == "async_op":
            check_async(value)


def _check_list(name: str, arguments: dict[str, Any], comm: Communicator) -> None:
    tensors, own = arguments[name], arguments[_LISTS[name]]
    rooted = name in _ROOTS
    at_root = not rooted or _rank_in(arguments, _ROOTS[name]) == comm.rank
    if tensors is None and not at_root:
        return
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Expected tensor, but got {type(tensor)}")
    if len({str(tensor.dtype) for tensor in tensors}) > 1:
        raise TypeError(f"{name} has dtypes {[str(x.dtype) for x in tensors]}, expected one dtype")
    if rooted and len({tensor.shape for tensor in tensors}) > 1:
        raise TypeError(f"{name} has shapes {[x.shape for x in tensors]}, expected one shape")
    if not at_root:
        return
    if len(tensors) != comm.size:
        raise TypeError(f"The argument list tensor len must be equal to group rank size, but got {len(tensors)}.")
    entry = tensors[comm.rank]
    if (entry.dtype, entry.shape) != (own.dtype, own.shape):
        expected = f"{own.dtype} and {own.shape}, as {_LISTS[name]} has"
        raise TypeError(f"{name}[{comm.rank}] has dtype {entry.dtype} and shape {entry.shape}, expected {expected}")


def _check_gathered(output: Tensor, input: Tensor, comm: Communicator) -> None:
    expected = (comm.size * input.shape[0], *input.shape[1:]) if input.ndim else (comm.size,)
    _core.check_shape("output_tensor", output.shape, expected)


def first_outputs(function: Callable[P, R]) -> Callable[P, R]:
    """Makes an all_to_all ignore outputs beyond one per rank, as MindSpore's does."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        outputs, group = arguments["output_tensor_list"], arguments.get("group")
        if isinstance(outputs, list | tuple):
            arguments["output_tensor_list"] = outputs[: enter(group).size]
        return cast("Callable[..., R]", function)(**arguments)

    return call


def _rank_in(arguments: dict[str, Any], name: str) -> int:
    try:
        return groups.rank_in(arguments["group"], arguments[name], name)
    except ValueError:
        return -1  # the function itself refuses it
