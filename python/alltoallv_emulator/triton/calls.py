"""Operations of Triton's IR that need more than their operands: shapes, attributes, memory, the place in the grid."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from alltoallv_emulator.triton import operators
from alltoallv_emulator.triton.ir import Op, Type, split
from alltoallv_emulator.triton.memory import Memory
from alltoallv_emulator.triton.operators import rounded

__all__ = ["CALLS", "Descriptor", "Form", "Launch", "reduce", "rounded", "scan"]


class Launch(NamedTuple):
    """A program of a launch."""

    memory: Memory
    program_id: tuple[int, int, int]
    grid: tuple[int, int, int]


class Form(NamedTuple):
    """What is known of an operation when the program is made."""

    op: Op
    types: list[Type | None]  # of the operands
    results: list[Type]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.results[0].shape or ()

    def number(self, name: str) -> int:
        """Returns an attribute that is an integer."""
        return int(re.search(rf"\b{name} = (-?\d+)", self.op.text)[1])  # type: ignore[index]

    def numbers(self, name: str) -> list[int]:
        """Returns an attribute that is a list of integers; empty if there is none."""
        match = re.search(rf"\b{name} = (?:array<i\d+(?:: ([^>]*))?>|\[([^\]]*)\])", self.op.text)
        return [int(number) for number in re.findall(r"-?\d+", (match[1] or match[2] or "") if match else "")]


class Descriptor(NamedTuple):
    """A block pointer or a tensor descriptor: a window on a tensor in memory."""

    base: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offsets: tuple[Any, ...]
    kind: Type  # of a block
    padding: float = 0.0

    @classmethod
    def of_host(cls, tensor: Any, kind: Type) -> Descriptor:
        """Makes one of the descriptor that a program gave a kernel."""
        padding = math.nan if getattr(tensor, "padding", "zero") == "nan" else 0.0
        block = kind.pointee or kind
        base = np.int64(tensor.base.data_ptr())
        return cls(base, tuple(tensor.shape), tuple(tensor.strides), (0,) * len(tensor.shape), block, padding)

    def moved(self, offsets: Sequence[Any]) -> Descriptor:
        return self._replace(offsets=tuple(int(a) + int(b) for a, b in zip(self.offsets, offsets, strict=True)))

    def places(self, checked: list[int]) -> tuple[Any, Any]:
        """Returns the addresses of a block's elements, and which of them are inside in the dimensions ``checked``."""
        addresses: Any = np.int64(self.base)
        inside = np.ones(self.kind.shape or (), bool)
        shape, width = self.kind.shape or (), operators.width_of(self.kind)
        for dim, size in enumerate(shape):
            index = (int(self.offsets[dim]) + np.arange(size)).reshape([-1] + [1] * (len(shape) - dim - 1))
            addresses = addresses + index * int(self.strides[dim]) * width
            if dim in checked:
                inside = inside & (index >= 0) & (index < int(self.shape[dim]))
        return np.broadcast_to(addresses, shape), inside


def reduce(combine: Callable[..., Any], axis: int, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Combines all elements along the axis: the first half with the second, and so on."""
    values = [np.moveaxis(np.asarray(array), axis, 0) for array in arrays]
    while (size := len(values[0])) > 1:
        half = size // 2
        halves = combine(*[value[:half] for value in values], *[value[half : 2 * half] for value in values])
        rest = [value[2 * half :] for value in values]
        values = [np.concatenate([a, b]) if len(b) else np.asarray(a) for a, b in zip(halves, rest, strict=True)]
    return tuple(value[0] for value in values)


def scan(combine: Callable[..., Any], axis: int, reverse: bool, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Combines every element with all before it along the axis, or after it."""
    values = [np.moveaxis(np.asarray(array), axis, 0)[:: -1 if reverse else 1] for array in arrays]
    step = 1
    while step < len(values[0]):
        later = combine(*[value[:-step] for value in values], *[value[step:] for value in values])
        values = [np.concatenate([value[:step], tail]) for value, tail in zip(values, later, strict=True)]
        step *= 2
    return tuple(np.moveaxis(value[:: -1 if reverse else 1], 0, axis) for value in values)


_AXES = {"x": 0, "y": 1, "z": 2}


def _program_id(launch: Launch, form: Form) -> Any:
    return np.int32(launch.program_id[_AXES[form.op.text.split()[0]]])


def _num_programs(launch: Launch, form: Form) -> Any:
    return np.int32(launch.grid[_AXES[form.op.text.split()[0]]])


def _make_range(launch: Launch, form: Form) -> Any:
    return np.arange(form.number("start"), form.number("end"), dtype=np.int32)


def _addptr(launch: Launch, form: Form, pointer: Any, offset: Any) -> Any:
    kind = form.results[0].pointee
    assert kind is not None
    return pointer + offset.astype(np.int64) * operators.width_of(kind)


def _bitcast(launch: Launch, form: Form, value: Any) -> Any:
    source = form.types[0]
    assert source is not None
    if "ptr" in (source.element, form.results[0].element):
        return value
    return operators.from_bits(operators.bits_of(value, source.element), form.results[0].element)


def _checked(form: Form) -> list[int]:
    return form.numbers("boundaryCheck")


def _load(launch: Launch, form: Form, pointer: Any, *rest: Any) -> Any:
    if isinstance(pointer, Descriptor):
        addresses, inside = pointer.places(_checked(form))
        padding = math.nan if "padding = 2" in form.op.text or "pad_nan" in form.op.text.lower() else 0.0
        return launch.memory.load(addresses, inside, np.full(addresses.shape, padding), pointer.kind)
    mask, other = (*rest, None, None)[:2]
    return launch.memory.load(pointer, mask, other, form.results[0])


def _store(launch: Launch, form: Form, pointer: Any, value: Any, mask: Any = None) -> None:
    if isinstance(pointer, Descriptor):
        addresses, inside = pointer.places(_checked(form))
        launch.memory.store(addresses, value, inside, pointer.kind)
    else:
        kind = form.types[0]
        assert kind is not None
        assert kind.pointee is not None
        launch.memory.store(pointer, value, mask, kind.pointee)


def _atomic_rmw(launch: Launch, form: Form, pointer: Any, value: Any, mask: Any = None) -> Any:
    operator = form.op.text.split(",")[0].strip()
    return launch.memory.update(operator, pointer, value, mask, form.results[0])


def _atomic_cas(launch: Launch, form: Form, pointer: Any, expected: Any, value: Any) -> Any:
    return launch.memory.compare_and_swap(pointer, expected, value, form.results[0])


def _make_descriptor(launch: Launch, form: Form, base: Any, *rest: Any) -> Descriptor:
    kind = form.results[0].pointee
    assert kind is not None
    dims = len(kind.shape or ())
    padding = math.nan if "padding = 2" in form.op.text or "pad_nan" in form.op.text.lower() else 0.0
    offsets = rest[2 * dims :] or (0,) * dims
    return Descriptor(base, rest[:dims], rest[dims : 2 * dims], offsets, kind, padding)


def _advance(launch: Launch, form: Form, pointer: Descriptor, *offsets: Any) -> Descriptor:
    return pointer.moved(offsets)


def _all_dims(descriptor: Descriptor) -> list[int]:
    return list(range(len(descriptor.kind.shape or ())))


def _descriptor_load(launch: Launch, form: Form, descriptor: Descriptor, *offsets: Any) -> Any:
    addresses, inside = descriptor.moved(offsets).places(_all_dims(descriptor))
    other = np.full(addresses.shape, descriptor.padding)
    return launch.memory.load(addresses, inside, other, descriptor.kind).reshape(form.shape)


def _descriptor_store(launch: Launch, form: Form, descriptor: Descriptor, *rest: Any) -> None:
    *offsets, value = rest
    addresses, inside = descriptor.moved(offsets).places(_all_dims(descriptor))
    launch.memory.store(addresses, value.reshape(addresses.shape), inside, descriptor.kind)


def _dot(launch: Launch, form: Form, a: Any, b: Any, c: Any) -> Any:
    wide = np.int32 if a.dtype.kind == "i" else np.float64 if a.dtype == np.float64 else np.float32
    return (np.matmul(a.astype(wide), b.astype(wide)) + c).astype(c.dtype)


def _histogram(launch: Launch, form: Form, values: Any, mask: Any = None) -> Any:
    size = form.shape[0]
    chosen = values[(values >= 0) & (values < size) & (True if mask is None else mask)]
    return np.bincount(chosen, minlength=size).astype(np.int32)


def _print(launch: Launch, form: Form, *values: Any) -> None:
    text = re.match(r'\s*"(.*?)"', form.op.text)
    where = ", ".join(map(str, launch.program_id))
    sys.stdout.write(f"pid ({where}){text[1] if text else ''}{' '.join(str(np.asarray(value)) for value in values)}\n")


def _assert(launch: Launch, form: Form, condition: Any) -> None:
    if not np.all(condition):
        text = re.search(r'"(.*?)"', form.op.text)
        raise AssertionError(f"{text[1] if text else 'an assertion'} (program {launch.program_id})")


def _poison(launch: Launch, form: Form) -> Any:
    return np.zeros(form.shape, operators.dtype_of(form.results[0]))[()]


def _split(launch: Launch, form: Form, value: Any) -> tuple[Any, Any]:
    return value[..., 0], value[..., 1]


def _select(launch: Launch, form: Form, condition: Any, a: Any, b: Any) -> Any:
    return np.where(condition, a, b)[()] if not isinstance(a, Descriptor) else (a if condition else b)


def strides_of(name: str) -> list[int]:
    """Returns the strides that the name of a function of `cann.extension` has."""
    return [int(stride) for stride in name.split(".")[2].split("x") if stride]


def _window(sizes: Sequence[int], strides: Sequence[int], offsets: Sequence[Any], shape: Sequence[int]) -> Any:
    """Returns the slices that choose elements of an array, which must be inside."""
    for size, stride, offset, length in zip(sizes, strides, offsets, shape, strict=True):
        if offset < 0 or int(offset) + (size - 1) * stride >= length:
            raise IndexError(
                f"a slice has offset {int(offset)}, size {size} and stride {stride}, expected inside of {length}"
            )
    return tuple(
        slice(int(offset), int(offset) + (size - 1) * stride + 1, stride)
        for size, stride, offset in zip(sizes, strides, offsets, strict=True)
    )


def _extract_slice(form: Form, strides: Sequence[int], ful: Any, *offsets: Any) -> Any:
    return ful[_window(form.shape, strides, offsets, ful.shape)]


def _insert_slice(form: Form, strides: Sequence[int], ful: Any, sub: Any, *offsets: Any) -> Any:
    result = np.array(ful)
    result[_window(sub.shape, strides, offsets, ful.shape)] = sub
    return result


def _get_element(form: Form, strides: Sequence[int], source: Any, *places: Any) -> Any:
    sizes = (1,) * source.ndim
    return source[_window(sizes, sizes, places, source.shape)].reshape(-1)[0]


def _places(text: str, count: int, values: tuple[Any, ...]) -> tuple[list[Any], list[int], list[int]]:
    """Reads ``%x[OFFSETS] [SIZES] [STRIDES]``, where a name stands for the next of the values."""
    lists = re.findall(r"\[([^\]]*)\]", text)
    named = iter(values[count:])
    offsets, sizes, strides = ([next(named) if "%" in item else int(item) for item in split(part)] for part in lists)
    return offsets, [int(size) for size in sizes], [int(stride) for stride in strides]


def _ascend_extract(launch: Launch, form: Form, *values: Any) -> Any:
    offsets, sizes, strides = _places(form.op.text, 1, values)
    return values[0][_window(sizes, strides, offsets, values[0].shape)].reshape(form.shape)


def _ascend_insert(launch: Launch, form: Form, *values: Any) -> Any:
    offsets, _, strides = _places(form.op.text, 2, values)
    return _insert_slice(form, strides, values[1], values[0], *offsets)


def _ascend_element(launch: Launch, form: Form, source: Any, *places: Any) -> Any:
    return _get_element(form, (), source, *places)


SLICES: dict[str, Callable[..., Any]] = {
    "extract_slice": _extract_slice, "insert_slice": _insert_slice, "get_element": _get_element,
}  # fmt: skip


def _extern(launch: Launch, form: Form, *values: Any) -> Any:
    symbol = re.search(r'symbol = "(.*?)"', form.op.text)[1]  # type: ignore[index]
    function = operators.FUNCTIONS.get(symbol.removeprefix("alltoallv_"))
    if function is None:
        raise NotImplementedError(f"the function {symbol} is not among what the emulator has of libdevice")
    return np.asarray(function(*values)).astype(operators.dtype_of(form.results[0]))


CALLS: dict[str, Callable[..., Any]] = {
    "tt.extern_elementwise": _extern,
    "tensor.extract_slice": _ascend_extract,
    "tensor.insert_slice": _ascend_insert,
    "tensor.extract": _ascend_element,
    "tt.get_program_id": _program_id,
    "tt.get_num_programs": _num_programs,
    "tt.make_range": _make_range,
    "tt.addptr": _addptr,
    "tt.bitcast": _bitcast,
    "arith.bitcast": _bitcast,
    "tt.load": _load,
    "tt.store": _store,
    "tt.atomic_rmw": _atomic_rmw,
    "tt.atomic_cas": _atomic_cas,
    "tt.make_tensor_ptr": _make_descriptor,
    "tt.make_tensor_descriptor": _make_descriptor,
    "tt.advance": _advance,
    "tt.descriptor_load": _descriptor_load,
    "tt.descriptor_store": _descriptor_store,
    "tt.dot": _dot,
    "tt.histogram": _histogram,
    "tt.print": _print,
    "tt.assert": _assert,
    "ub.poison": _poison,
    "tt.split": _split,
    "arith.select": _select,
    "tt.splat": lambda launch, form, value: np.full(form.shape, value),
    "tt.unsplat": lambda launch, form, value: value.reshape(-1)[0],
    "tt.broadcast": lambda launch, form, value: np.broadcast_to(value, form.shape),
    "tt.expand_dims": lambda launch, form, value: np.expand_dims(value, form.number("axis")),
    "tt.reshape": lambda launch, form, value: np.reshape(value, form.shape),
    "tt.trans": lambda launch, form, value: np.transpose(value, form.numbers("order")),
    "tt.join": lambda launch, form, a, b: np.stack([a, b], -1),
    "tt.cat": lambda launch, form, a, b: np.concatenate([a, b]),
    "tt.gather": lambda launch, form, source, index: np.take_along_axis(source, index, form.number("axis")),
    # Of triton-ascend: along the last dimension.
    "tt.sort": lambda launch, form, value: np.sort(value)[..., :: -1 if "true" in form.op.text else 1],
}
