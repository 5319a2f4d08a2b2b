"""Makes a Python program of Triton's IR: a function for each of its functions, a line or so for each operation."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alltoallv_emulator.triton import calls, operators
from alltoallv_emulator.triton.ir import Block, Function, Op, Type, parse, parse_type, split
from alltoallv_emulator.triton.memory import Memory

__all__ = ["Program"]

_NUMBER = re.compile(r"0x[0-9A-Fa-f]+|[-+]?\d+(?:\.\d*(?:[eE][-+]?\d+)?)?|true|false")
_TERMINATORS = {"tt.return", "cf.br", "cf.cond_br"}
_NOTHING = {"gpu.barrier", "ttg.barrier", "llvm.intr.assume", "tt.assert.end"}


class Program:
    """A kernel that can be launched.

    Args:
        text: Triton's IR.
    """

    def __init__(self, text: str) -> None:
        functions = parse(text)
        self.kernel = next(function for function in functions if function.public)
        self.arguments = [parse_type(kind) for _, kind in self.kernel.arguments]
        self._constants: dict[str, Any] = {"F": calls}
        for function in functions:
            exec("\n".join(_Translator(function, self._constants).lines), self._constants)

    def values(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns what `run` takes for the arguments of a launch: addresses and numbers, no objects of the caller."""
        return [_argument(value, kind) for value, kind in zip(arguments, self.arguments, strict=True)]

    def run(self, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """Runs all programs of the grid, one after the other, x first."""
        memory = Memory()
        function = self._constants[_identifier(self.kernel.name)]
        with np.errstate(all="ignore"):
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in range(grid[0]):
                        function(calls.Launch(memory, (x, y, z), grid), *values)


def _argument(value: Any, kind: Type) -> Any:
    """Returns what a function of the program takes for an argument of a launch."""
    if kind.element == "desc":
        return calls.Descriptor.of_host(value, kind)
    if kind.element == "ptr":
        return np.int64(value.data_ptr() if hasattr(value, "data_ptr") else value or 0)
    dtype = operators.dtype_of(kind)
    if np.dtype(dtype).kind == "i":
        bits = 8 * np.dtype(dtype).itemsize
        value = (int(value) + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    return operators.rounded(dtype(value), kind.element)


def _identifier(name: str) -> str:
    return "v_" + re.sub(r"\W", "_", name.replace("-", "_m").replace("#", "_r"))


class _Translator:
    """Translates a function to ``lines``; constants go to the program's globals."""

    def __init__(self, function: Function, constants: dict[str, Any]) -> None:
        self._constants = constants
        self._types: dict[str, Type] = {}
        self._depth = 0
        self.lines: list[str] = []
        self._define(function)

    def _add(self, line: str) -> None:
        self.lines.append("    " * self._depth + line)

    def _define(self, function: Function) -> None:
        self._learn(function.arguments)
        names = ", ".join(_identifier(name) for name, _ in function.arguments)
        self._add(f"def {_identifier(function.name)}(L, {names}):")
        self._depth += 1
        if len(function.blocks) == 1:
            self._block(function.blocks[0])
        else:
            self._add("block = 0")
            self._add("while True:")
            self._depth += 1
            labels = {block.label: (i, block) for i, block in enumerate(function.blocks)}
            for i, block in enumerate(function.blocks):
                self._learn(block.arguments)
                self._add(f"if block == {i}:")
                self._depth += 1
                self._block(block, labels)
                self._depth -= 1
            self._depth -= 1
        self._depth -= 1

    def _learn(self, arguments: Sequence[tuple[str, str]]) -> None:
        self._types.update((name, parse_type(kind)) for name, kind in arguments)

    def _block(self, block: Block, labels: dict[str, tuple[int, Block]] | None = None) -> None:
        """Translates the operations; what ends a region is left to the operation that has it."""
        for op in block.ops:
            if op.name in _TERMINATORS:
                self._jump(op, labels or {})
            else:
                self._operation(op)
        if not block.ops:
            self._add("pass")

    def _jump(self, op: Op, labels: dict[str, tuple[int, Block]]) -> None:
        if op.name == "tt.return":
            return self._add(f"return {self._tuple(op.operands)}")
        targets = re.findall(r"\^(\w+)(?:\(([^)]*)\))?", op.text)
        if op.name == "cf.cond_br":
            self._add(f"if {_identifier(op.operands[0])}:")
            self._depth += 1
            self._go(targets[0], labels)
            self._depth -= 1
        return self._go(targets[-1], labels)

    def _go(self, target: tuple[str, str], labels: dict[str, tuple[int, Block]]) -> None:
        number, block = labels[target[0]]
        self._assign([name for name, _ in block.arguments], Op("", [], target[1]).operands)
        self._add(f"block = {number}")
        self._add("continue")

    def _tuple(self, names: Sequence[str]) -> str:
        return "(" + "".join(f"{_identifier(name)}, " for name in names) + ")"

    def _assign(self, targets: Sequence[str], sources: Sequence[str]) -> None:
        if targets:
            self._add(f"{self._tuple(targets)} = {self._tuple(sources)}")

    def _operation(self, op: Op) -> None:
        if op.name in _NOTHING:
            return None
        special: Callable[[Op], None] | None = getattr(self, f"_{op.name.replace('.', '_')}", None)
        if special is not None:
            return special(op)
        kinds = _result_types(op)
        self._types.update(zip(op.results, kinds, strict=False))
        expression = self._expression(op, kinds)
        if op.results and kinds[0].element in operators.ROUNDED and op.name not in _EXACT:
            expression = f"F.rounded({expression}, {kinds[0].element!r})"
        targets = _identifier(op.results[0]) if len(op.results) == 1 else self._tuple(op.results)
        return self._add(f"{targets} = {expression}" if op.results else expression)

    def _expression(self, op: Op, kinds: list[Type]) -> str:
        values = [_identifier(name) for name in op.operands]
        listed = ", ".join(values)
        if op.name == "arith.constant":
            return self._constant(_constant(op.text, kinds[0]))
        if op.name in ("arith.addi", "arith.subi") and kinds[0].element == "i1":
            return f"{values[0]} ^ {values[1]}"
        if op.name in operators.BINARY:
            return f"{self._constant(operators.BINARY[op.name])}({listed})"
        if op.name in operators.UNARY:
            return f"{self._constant(operators.UNARY[op.name])}({listed})"
        if op.name in ("arith.cmpi", "arith.cmpf"):
            predicate = op.text.split(",")[0].split()[0]
            table = operators.COMPARISONS
            function = table.get(f"cmpf {predicate}", table[predicate]) if op.name == "arith.cmpf" else table[predicate]
            self._types[op.results[0]] = Type("i1", self._types[op.operands[0]].shape)
            return f"{self._constant(function)}({listed})"
        if op.name in operators.CONVERSIONS:
            if "rounding" in op.text and "rtne" not in op.text:
                raise NotImplementedError(f"{op.name} {op.text.strip()} is not among what the emulator has of Triton")
            dtype = self._constant(operators.dtype_of(kinds[0]))
            return f"{self._constant(operators.CONVERSIONS[op.name])}({listed}, {dtype})"
        if op.name not in calls.CALLS:
            raise NotImplementedError(f"the operator {op.name} is not among what the emulator has of Triton's")
        types = [self._types.get(name) for name in op.operands]
        call, form = self._constant(calls.CALLS[op.name]), self._constant(calls.Form(op, types, kinds))
        return f"{call}(L, {form}, {listed})"

    def _constant(self, value: Any) -> str:
        name = f"k{len(self._constants)}"
        self._constants[name] = value
        return name

    # Operations with regions, or that call functions.

    def _tt_call(self, op: Op) -> None:
        self._types.update(zip(op.results, _result_types(op), strict=True))
        name = re.search(r"@(\"[^\"]*\"|[\w$.]+)", op.text)[1]  # type: ignore[index]
        target = f"{self._tuple(op.results)} = " if op.results else ""
        if name.startswith("alltoallv."):
            form = calls.Form(op, [self._types.get(operand) for operand in op.operands], _result_types(op))
            function = self._constant(functools.partial(calls.SLICES[name.split(".")[1]], form, calls.strides_of(name)))
            return self._add(f"{target}({function}({', '.join(map(_identifier, op.operands))}),)")
        arguments = ", ".join(["L", *map(_identifier, op.operands)])
        return self._add(f"{target}{_identifier(name)}({arguments})")

    def _scf_for(self, op: Op) -> None:
        head, _, rest = op.text.partition("iter_args(")
        variable, *bounds = Op("", [], head).operands
        pairs = Op("", [], rest.partition(")")[0]).operands if rest else []
        inner, initial = pairs[::2], pairs[1::2]
        kinds = [self._types[name] for name in initial]
        self._types.update(zip(inner, kinds, strict=True))
        self._types.update(zip(op.results, kinds, strict=True))
        self._types[variable] = self._types[bounds[0]]
        dtype = self._constant(operators.dtype_of(self._types[bounds[0]]))
        self._assign(inner, initial)
        counter = f"i{len(self.lines)}"
        low, high, step = map(_identifier, bounds)
        self._add(f"for {counter} in range(int({low}), int({high}), int({step})):")
        self._depth += 1
        self._add(f"{_identifier(variable)} = {dtype}({counter})")
        self._body(op.regions[0], inner)
        self._depth -= 1
        self._assign(op.results, inner)

    def _body(self, region: list[Block], targets: Sequence[str]) -> None:
        """Translates a region of one block, and assigns what it yields."""
        if len(region) != 1:
            raise NotImplementedError("a region with several blocks is not among what the emulator has of Triton's")
        ops = region[0].ops
        yielded = ops[-1].operands if ops and ops[-1].name == "scf.yield" else []  # left out where it yields nothing
        self._learn(region[0].arguments)
        self._block(Block(ops=[op for op in ops if op.name != "scf.yield"]))
        if len(yielded) != len(targets):
            raise ValueError(f"a region of Triton's IR yields {len(yielded)} values, expected {len(targets)}")
        self._assign(targets, yielded)

    def _scf_if(self, op: Op) -> None:
        kinds = _result_types(op) if op.results else []
        self._types.update(zip(op.results, kinds, strict=True))
        self._add(f"if {_identifier(op.operands[0])}:")
        for i, region in enumerate(op.regions):
            if i:
                self._add("else:")
            self._depth += 1
            self._body(region, op.results)
            self._depth -= 1

    def _scf_while(self, op: Op) -> None:
        pairs = Op("", [], op.text.partition(" : ")[0]).operands
        before, initial = pairs[::2], pairs[1::2]
        self._types.update(zip(before, [self._types[name] for name in initial], strict=True))
        self._types.update(zip(op.results, _result_types(op), strict=False))
        self._assign(before, initial)
        self._add("while True:")
        self._depth += 1
        *ops, end = op.regions[0][0].ops
        self._block(Block(ops=ops))
        condition, *passed = end.operands
        self._assign(op.results, passed)
        self._add(f"if not {_identifier(condition)}: break")
        after = op.regions[1]
        self._assign([name for name, _ in after[0].arguments], passed)
        self._body(after, before)
        self._depth -= 1

    def _combine(self, op: Op, function: str) -> None:
        """Translates an operation whose region combines elements: to a function that combines arrays."""
        kinds = _result_types(op)
        self._types.update(zip(op.results, kinds, strict=True))
        (block,) = op.regions[0]
        if any(inner.regions for inner in block.ops):
            raise NotImplementedError(
                f"{op.name} whose function branches is not among what the emulator has of Triton's"
            )
        self._learn(block.arguments)
        name = f"combine{len(self.lines)}"
        self._add(f"def {name}({', '.join(_identifier(argument) for argument, _ in block.arguments)}):")
        self._depth += 1
        self._block(Block(ops=block.ops[:-1]))
        self._add(f"return {self._tuple(block.ops[-1].operands)}")
        self._depth -= 1
        operands = [name for name in op.operands if name in self._types][: len(op.results)]
        axis = int(re.search(r"axis = (\d+)", op.text)[1])  # type: ignore[index]
        extra = f", {'reverse = true' in op.text}" if function == "scan" else ""
        self._add(f"{self._tuple(op.results)} = F.{function}({name}, {axis}{extra}, {self._tuple(operands)})")

    def _tt_reduce(self, op: Op) -> None:
        self._combine(op, "reduce")

    def _tt_scan(self, op: Op) -> None:
        self._combine(op, "scan")


# Operators whose results the type has, if their operands are of the type.
_EXACT = {
    "arith.constant", "arith.select", "tt.load", "tt.splat", "tt.broadcast", "tt.reshape", "tt.trans", "tt.bitcast",
    "arith.bitcast", "tt.expand_dims", "tt.join", "tt.split", "tt.cat", "tt.gather", "tt.descriptor_load",
}  # fmt: skip


def _result_types(op: Op) -> list[Type]:
    """Returns the types of the results, as far as the types of the operation show them."""
    if not op.results:
        return []
    text = op.types or "i1"  # Triton's IR leaves it out for true and false
    if op.name == "tt.make_tensor_descriptor" and "tensordesc" not in text:  # it may print what is inside alone
        return [parse_type("!tt.tensordesc" + split(text)[-1].strip())]
    if op.name == "tt.make_tensor_ptr" and text.startswith("<"):  # nor does triton-ascend print the pointer's name
        return [parse_type("!tt.ptr" + split(text, " ")[0])]
    if op.name == "tensor.insert_slice":
        text = text.replace(" into ", " to ")
    if op.name == "tensor.extract":
        return [Type(parse_type(text).element)]
    for arrow in (" -> ", "-> ", " to "):
        if arrow in text:
            text = text.rsplit(arrow, 1)[1].strip()
            break
    else:
        text = split(text)[-1]
    if text.startswith("("):
        text = text[1 : text.rindex(")")]
    kinds = [parse_type(split(part.strip(), " ")[0]) for part in split(text)]
    if op.name in ("tt.load",):
        pointed = kinds[0].pointee or kinds[0]
        return [pointed if pointed.shape is not None else Type(pointed.element, kinds[0].shape, pointed.pointee)]
    if op.name == "tt.addptr":
        return [parse_type(split(op.types)[0])]
    if op.name == "tt.split":
        return kinds * 2 if len(kinds) == 1 else kinds
    return kinds


def _constant(text: str, kind: Type) -> Any:
    """Returns the value of a constant, an array or a scalar."""
    dtype = operators.dtype_of(kind)
    text = re.sub(r"dense<(.*)>", r"\1", text.split("{")[0].strip())
    if text.startswith('"0x'):
        data = np.frombuffer(bytes.fromhex(text[3:-1]), f"i{operators.width_of(kind)}")
        return operators.from_bits(data, kind.element).reshape(kind.shape or ())
    numbers = [_number(number, kind) for number in _NUMBER.findall(text)]
    if kind.shape is None:
        return dtype(numbers[0])
    if len(numbers) == 1:
        return np.full(kind.shape, numbers[0], dtype)
    if len(numbers) != math.prod(kind.shape):
        raise NotImplementedError(f"the constant {text} is not among what the emulator has of Triton's")
    return np.array(numbers, dtype).reshape(kind.shape)


def _number(text: str, kind: Type) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("0x") and np.dtype(operators.dtype_of(kind)).kind == "f":
        bits = int(text, 16).to_bytes(operators.width_of(kind), "little")
        return operators.from_bits(np.frombuffer(bits, f"i{len(bits)}"), kind.element)[0]
    if np.dtype(operators.dtype_of(kind)).kind == "f":
        return float(text)
    return int(text, 0)
