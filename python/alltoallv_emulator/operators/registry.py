"""How a formula becomes an operator: arguments by name, and refusals in the caller that name the argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from alltoallv_emulator import aten

__all__ = ["Refused", "differentiate", "dtype_of", "expect", "kernel", "names", "operator"]

Formula = TypeVar("Formula", bound=Callable[..., Any])
_formulas: dict[str, tuple[Callable[..., Any], frozenset[str], bool]] = {}


class Refused(NotImplementedError):
    """An argument's value that a formula does not cover; the operator's name is put before the text."""


def operator(*names: str, ignores: Sequence[str] = (), on_host: bool = True) -> Callable[[Formula], Formula]:
    """Registers a function of CPU tensors as the operators ``npu::`` of these names (with ``.overload``, if any).

    The function takes what it covers of the schema's arguments, by their names. Of the others, those in ``ignores``
    cannot change the result; any other must have its default value, or the call is refused. With ``on_host=False`` the
    function gets the npu tensors themselves.
    """

    def register(formula: Formula) -> Formula:
        _formulas.update(dict.fromkeys(names, (formula, frozenset(ignores), on_host)))
        return formula

    return register


def names() -> list[str]:
    """The operators that have a formula."""
    return sorted(_formulas)


def expect(condition: object, argument: str, value: object, expected: str) -> None:
    """Refuses the call if the condition does not hold."""
    if not condition:
        if isinstance(value, torch.Tensor):
            value = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        raise Refused(f"{argument} is {value}; the emulator expects {expected}")


def kernel(name: str) -> Callable[..., Any]:
    """What to register for the operator: its formula, on views of the memory, or its refusal."""
    base, _, overload = name.partition(".")
    found = _formulas.get(name)
    if found is None:
        return functools.partial(_refuse, name)
    formula, ignores, on_host = found
    schema = getattr(getattr(torch.ops.npu, base), overload or "default")._schema
    computed = _Operator(name, schema, formula, ignores)
    return aten.on_host(computed) if on_host else computed


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"npu::{name} is not among the operators of the emulator: see docs/npu-operators.md")


class _Operator:
    def __init__(self, name: str, schema: Any, formula: Callable[..., Any], ignores: frozenset[str]) -> None:
        self._name, self._schema, self._formula, self._ignores = name, schema, formula, ignores
        self._takes = set(inspect.signature(formula).parameters)
        self._defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        unknown = self._takes - {a.name for a in schema.arguments}
        if unknown:
            raise TypeError(f"npu::{name} has no argument {', '.join(sorted(unknown))}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._defaults | dict(zip([a.name for a in self._schema.arguments], args, strict=False)) | kwargs
        try:
            for argument, value in given.items():
                if argument not in self._takes and argument not in self._ignores:
                    default = self._defaults.get(argument)
                    same = value is default or (not isinstance(value, torch.Tensor) and value == default)
                    expect(same, argument, value, f"{default}")
            return self._formula(**{argument: value for argument, value in given.items() if argument in self._takes})
        except Refused as refused:
            raise NotImplementedError(f"npu::{self._name}: {refused}") from None


def dtype_of(code: int | torch.dtype | None, default: torch.dtype, argument: str) -> torch.dtype:
    """The dtype that an argument means: torch's numbers of dtypes, or a dtype."""
    if code is None or isinstance(code, torch.dtype):
        return code or default
    dtype = {
        0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16,
        6: torch.float32, 7: torch.float64, 11: torch.bool, 12: torch.int8, 13: torch.uint8, 14: torch.int32,
        15: torch.bfloat16, 16: torch.quint4x2,
    }.get(code)  # fmt: skip
    expect(dtype is not None, argument, code, "a dtype of integers up to 64 bits, or float16, float32, bfloat16")
    assert dtype is not None
    return dtype


def differentiate(
    formula: Callable[..., Any], inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of the inputs, given those of the formula's outputs."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in inputs]
        results = formula(*leaves)
        outputs = [results] if isinstance(results, torch.Tensor) else list(results)
        return list(torch.autograd.grad(outputs, leaves, list(gradients)))
