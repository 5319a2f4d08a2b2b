"""What Ascend adds to Triton's language. An operator becomes a call of a function that the emulator has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl
from triton.language.core import builtin

__all__ = ["compile_hint", "extract_slice", "get_element", "insert_slice", "multibuffer", "parallel"]

parallel = tl.range


def __getattr__(name: str) -> Any:
    raise AttributeError(f"{__name__}.{name} is not among what the emulator has of it: see docs/emulator.md")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _plains(values: Sequence[Any]) -> list[Any]:
    return [_plain(value) for value in _plain(values)]


def _call(name: str, numbers: Sequence[int], values: Sequence[Any], result: Any, semantic: Any, generator: Any) -> Any:
    """Calls ``alltoallv.NAME.NUMBERS.N``, where N tells functions of other types apart."""
    values = [semantic.to_tensor(value) for value in values]
    types = [value.type.to_ir(semantic.builder) for value in values]
    kind = semantic.builder.get_function_ty(types, [result.to_ir(semantic.builder)])
    signature = "_".join("x".join(map(str, [*value.shape, value.dtype])) for value in values).translate(
        str.maketrans("<>[], ", "______")
    )
    symbol = f"alltoallv.{name}.{'x'.join(map(str, numbers))}.{signature}"
    builder, module = semantic.builder, generator.module
    if not module.has_function(symbol):
        here = builder.get_insertion_point()
        builder.set_insertion_point_to_start(generator.fn.get_operation().get_block())
        builder.get_or_insert_function(module, symbol, kind, "private", True)
        builder.restore_insertion_point(here)
    handle = builder.call(module.get_function(symbol), [value.handle for value in values]).get_result(0)
    return tl.tensor(handle, result)


def _check(ful: Any, **lists: Sequence[Any]) -> None:
    for name, values in lists.items():
        if len(values) != len(ful.shape):
            raise ValueError(
                f"{name} has {len(values)} numbers, expected {len(ful.shape)}, as the tensor has dimensions"
            )


@builtin
def extract_slice(
    ful: Any, offsets: Any, sizes: Any, strides: Any, _semantic: Any = None, _generator: Any = None
) -> Any:
    """Returns the elements from ``offsets`` on, ``strides`` apart."""
    places, sizes, strides = _plains(offsets), _plains(sizes), _plains(strides)
    _check(ful, offsets=places, sizes=sizes, strides=strides)
    result = tl.block_type(ful.type.scalar, sizes)
    return _call("extract_slice", strides, [ful, *places], result, _semantic, _generator)


@builtin
def insert_slice(
    ful: Any, sub: Any, offsets: Any, sizes: Any, strides: Any, _semantic: Any = None, _generator: Any = None
) -> Any:
    """Returns ``ful`` with the elements of ``sub`` from ``offsets`` on, ``strides`` apart."""
    places, sizes, strides = _plains(offsets), _plains(sizes), _plains(strides)
    _check(ful, offsets=places, sizes=sizes, strides=strides)
    if list(map(int, sub.shape)) != sizes:
        raise ValueError(f"sizes are {sizes}, expected {list(map(int, sub.shape))}, the shape of sub")
    return _call("insert_slice", strides, [ful, sub, *places], ful.type, _semantic, _generator)


@builtin
def get_element(src: Any, indice: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """Returns one element."""
    places = _plains(indice)
    _check(src, indice=places)
    return _call("get_element", [], [src, *places], src.type.scalar, _semantic, _generator)


@builtin
def compile_hint(ptr: Any, hint_name: Any, hint_val: Any = None, _semantic: Any = None) -> None:
    """Has no effect: it tells CANN's compiler how to place data."""


@builtin
def multibuffer(src: Any, size: Any, _semantic: Any = None) -> None:
    """Has no effect: it tells CANN's compiler how to place data."""
