"""Makes a formula an operator: it takes arguments by name, and refusals name the argument."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch

from alltoallv.errors import InvalidParamError

__all__ = [
    "Formula", "Operator", "Refused", "backward", "defaults_of", "differentiate", "dtype_of", "exchanges", "expect",
    "formulas", "function", "operator", "present", "renamed", "takes", "this_call", "variant",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")
Input = TypeVar("Input", torch.Tensor, torch.Tensor | None)


class Formula(NamedTuple):
    """Holds a function of tensors, the arguments that cannot change its results, and whether it gets host tensors."""

    function: Callable[..., Any]
    ignores: frozenset[str]
    on_host: bool


# Exchanges rows in host memory over a device's process group, by device type: group, device, rows, and the numbers of
# rows for and from each rank.
Exchange = Callable[[Any, torch.device, torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
exchanges: dict[str, Exchange] = {}
_formulas: dict[str, Formula] = {}


class Refused(NotImplementedError):
    """Reports an argument's value that a formula does not cover; the operator's name is put before the text."""


class _Misnamed(TypeError):
    """Reports arguments that do not go with the schema; the operator's name is put before the text."""


class _Call(threading.local):
    """Holds whether this thread's call has met its peers. Until then a failure is announced to them.

    Formulas check before they meet whatever could fail later on one rank alone.
    """

    met = False
    met_tp = False  # the other rank of tensor parallelism
    part: Any = None  # the peers that are left, where ranks of the group have gone


this_call = _Call()


def operator(*names: str, ignores: Sequence[str] = (), on_host: bool = True) -> Callable[[Function], Function]:
    """Registers a function of CPU tensors as the operators ``npu::`` of these names (with ``.overload``, if any).

    The function takes what it covers of the schema's arguments, by their names. Of the others, those in ``ignores``
    ("*": all) cannot change the result; any other must have its default value, or the call is refused. With
    ``on_host=False`` the function gets the npu tensors themselves, where they are on an emulated NPU.
    """

    def register(function: Function) -> Function:
        _formulas.update(dict.fromkeys(names, Formula(function, frozenset(ignores), on_host)))
        return function

    return register


def takes(function: Any, *names: str, optional: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Names the arguments that a function of ``**given`` takes; ``optional`` has those that older schemas lack."""
    function.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=optional.get(name, inspect.Parameter.empty))
            for name in names
        ]
    )


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of a function that have a default, and it."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }


def renamed(
    function: Callable[..., Any],
    doc: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
    results: Callable[[Any], Any] | None = None,
    **fixed: Any,
) -> Callable[..., Any]:
    """Returns a formula as one with other names for its arguments, and other results, for an operator like its own.

    Args:
        function: The formula.
        doc: The docstring of the new one, if it differs.
        names: The name in ``function`` of each argument that has another one.
        results: Makes the new formula's results from the results of ``function``, if they differ.
        fixed: Arguments of ``function`` that the new one does not take, and their values.
    """
    news = {old: new for new, old in names.items()}

    def run(**arguments: Any) -> Any:
        results_of = function(**{names.get(name, name): value for name, value in arguments.items()}, **fixed)
        return results_of if results is None else results(results_of)

    taken = (news.get(name, name) for name in inspect.signature(function).parameters if name not in fixed)
    takes(run, *taken, optional={news.get(name, name): value for name, value in defaults_of(function).items()})
    run.__doc__, run.__wrapped__ = doc or function.__doc__, function  # type: ignore[attr-defined]
    return run


def variant(formula: Callable[..., Any], name: str, doc: str, ignores: Sequence[str] = (), **fixed: Any) -> None:
    """Registers a formula of several operators as one of them, without the arguments whose values are ``fixed``.

    The formula also takes the operator's ``name``.
    """
    operator(name, ignores=ignores)(renamed(formula, doc, name=name, **fixed))


def backward(
    name: str,
    formula: Callable[..., Any],
    inputs: Sequence[str] = ("input",),
    grad: str = "grad_output",
    ignores: Sequence[str] = (),
) -> Callable[..., Any]:
    """Registers the operator that returns the gradients of a formula's ``inputs``, from ``grad``, its first output's.

    It takes the formula's arguments, and ``grad``.
    """

    def run(**arguments: Any) -> Any:
        of_output = arguments.pop(grad)

        def output(*values: Any) -> torch.Tensor:
            results = formula(**arguments | dict(zip(inputs, values, strict=True)))
            return results[0] if isinstance(results, tuple) else results

        gradients = differentiate(output, [arguments[input_name] for input_name in inputs], of_output)
        return gradients[0] if len(gradients) == 1 else tuple(gradients)

    takes(run, *inspect.signature(formula).parameters, grad, optional=defaults_of(formula))
    run.__doc__ = f"Returns the gradients of {', '.join(inputs)}."
    return operator(name, ignores=ignores)(run)


@functools.cache
def formulas() -> dict[str, Formula]:
    """Returns all operators that have a formula, by name."""
    package = __package__ or ""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return dict(sorted(_formulas.items()))


def expect(condition: object, argument: str, value: object, expected: str) -> None:
    """Raises `Refused`, which names the argument, if the condition does not hold."""
    if not condition:
        if isinstance(value, torch.Tensor):
            value = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        raise Refused(f"{argument} is {value}; the emulator expects {expected}")


def present(value: Value | None, argument: str, expected: str) -> Value:
    """Returns the value of an optional argument; raises `Refused` if it is not given."""
    expect(value is not None, argument, None, expected)
    return cast(Value, value)


class Operator:
    """Calls a formula as its schema says: arguments by place or name, defaults filled in."""

    def __init__(self, name: str, schema: Any, formula: Formula) -> None:
        self._name, self._formula = name, formula
        self._full = f"{schema.name.partition('::')[0]}::{name}"
        self._schema = schema  # torch's own operators also have this attribute
        parameters = inspect.signature(formula.function).parameters
        self._takes = set(parameters)
        self._tensors = {a.name: str(a.type) in ("Tensor", "Optional[Tensor]") for a in schema.arguments}
        self._by_place = [a.name for a in schema.arguments if not a.kwarg_only]
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self._defaults = {name: value for name, value in defaults.items() if name in self._takes}
        ignored = self._tensors if "*" in formula.ignores else formula.ignores
        others = self._tensors.keys() - self._takes - set(ignored)
        self._not_covered = {name: defaults.get(name) for name in others}  # they must have these values
        self._needed = [a.name for a in schema.arguments if not a.has_default_value()]
        # A formula has defaults for arguments that schemas of older releases lack.
        needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
        unknown = needed - {a.name for a in schema.arguments}
        if unknown:
            raise TypeError(f"{self._full} has no argument {', '.join(sorted(unknown))}")

    @property
    def doc(self) -> str:
        """The docstring of the formula."""
        return inspect.getdoc(self._formula.function) or ""

    def fits(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Returns whether there are tensors where the schema has tensors, and nowhere else."""
        arguments = dict(zip(self._by_place, args, strict=False)) | kwargs
        return arguments.keys() <= self._tensors.keys() and all(
            isinstance(value, torch.Tensor) == self._tensors[name]
            for name, value in arguments.items()
            if value is not None
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(self._by_place, args, strict=False)) | kwargs
        taken, this_call.met, this_call.met_tp, this_call.part = self._defaults.copy(), False, False, None
        try:
            self._check_names(args, kwargs, arguments)
            for argument, value in arguments.items():
                if argument in self._takes:
                    taken[argument] = value
                elif argument in self._not_covered:
                    default = self._not_covered[argument]
                    same = value is default or (not isinstance(value, torch.Tensor) and value == default)
                    expect(same, argument, value, f"{default}")
            return self._formula.function(**taken)
        except Exception as error:
            text = f"{self._full}: {error}"
            self._notify_peers(arguments, text)
            for refusal, kind in (
                (Refused, NotImplementedError),
                (InvalidParamError, InvalidParamError),
                (_Misnamed, TypeError),
            ):
                if isinstance(error, refusal):
                    raise kind(text) from None
            raise

    def refuse(self, args: Sequence[Any], kwargs: dict[str, Any], why: str) -> None:
        """Announces to the peers that this rank makes no such call."""
        this_call.met, this_call.met_tp, this_call.part = False, False, None
        self._notify_peers(dict(zip(self._by_place, args, strict=False)) | kwargs, f"{self._full}: {why}")

    def _check_names(self, args: Sequence[Any], kwargs: dict[str, Any], arguments: dict[str, Any]) -> None:
        places, names = self._by_place, list(self._tensors)
        if len(args) > len(places):
            raise _Misnamed(
                f"{len(args)} arguments are given by position, expected {len(places)} at most: {', '.join(places)}"
            )
        for name in kwargs:
            if name not in names:
                raise _Misnamed(f"there is no argument {name}, expected {', '.join(names)}")
            if name in places[: len(args)]:
                raise _Misnamed(f"{name} is given by position and by name, expected once")
        for name in self._needed:
            if name not in arguments:
                raise _Misnamed(f"{name} is missing, expected {', '.join(self._needed)}")

    def _notify_peers(self, arguments: dict[str, Any], why: str) -> None:
        """Announces a failure to peers that this rank has not met: they wait for it where ranks agree on the call."""
        names = [arguments[argument] for argument in ("hcom", "group_ep", "group", "groupTp") if argument in arguments]
        if this_call.met:
            names = []
        elif this_call.part is not None:
            names = [this_call.part]
        elif (info := arguments.get("elastic_info")) is not None and info.numel() and info.reshape(-1)[0]:
            names = []  # nobody would come of the ranks that have left
        if arguments.get("tp_world_size") == 2 and arguments.get("group_tp") and not this_call.met_tp:
            names.append(arguments["group_tp"])
        for name in names:
            with contextlib.suppress(RuntimeError):  # nobody is left to inform: the first error counts
                importlib.import_module(f"{__package__}.groups").refuse(name, self._name, why)


def function(name: str, schemas: Sequence[str]) -> Callable[..., Any]:
    """Returns the operator as one function, called like torch_npu's: a call takes the overload whose schema fits."""
    by_name, overloads = formulas(), []
    for text in schemas:
        schema = torch._C.parse_schema(text)
        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        overloads.append(Operator(full, schema, by_name[full]))

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = next((overload for overload in overloads if overload.fits(args, kwargs)), overloads[-1])
        return chosen(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "\n\n".join([*schemas, overloads[0].doc])
    return call


def dtype_of(code: int | torch.dtype | None, default: torch.dtype, argument: str) -> torch.dtype:
    """Returns the dtype that an argument means: one of torch's numbers of dtypes, or a dtype."""
    if code is None or isinstance(code, torch.dtype):
        return code or default
    dtype = {
        0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16,
        6: torch.float32, 7: torch.float64, 11: torch.bool, 12: torch.int8, 13: torch.uint8, 14: torch.int32,
        15: torch.bfloat16, 16: torch.quint4x2,
    }.get(code)  # fmt: skip
    expect(dtype is not None, argument, code, "a dtype of integers up to 64 bits, or float16, float32, bfloat16")
    return cast(torch.dtype, dtype)


def differentiate(formula: Callable[..., torch.Tensor], inputs: Sequence[Input], grad: torch.Tensor) -> list[Input]:
    """Returns the gradients of the inputs, None for None, given the gradient of the formula's output.

    It also works below autograd, where a dispatch mode (such as a graph's capture) calls the operators.
    """
    above = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with torch.enable_grad(), above:
        leaves = [None if value is None else value.detach().requires_grad_() for value in inputs]
        gradients = iter(torch.autograd.grad(formula(*leaves), [leaf for leaf in leaves if leaf is not None], grad))
        return [None if leaf is None else next(gradients) for leaf in leaves]
