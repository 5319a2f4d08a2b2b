"""Reads Triton's IR (TTIR), as its compiler prints it: an operation a line, regions in braces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Block", "Function", "Op", "Type", "parse", "parse_type", "split"]

_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_BLOCK = re.compile(r"\^(\w+)(?:\((.*)\))?:")
_OPEN, _CLOSE = "<([{", ">)]}"


@dataclass(frozen=True)
class Type:
    """A type: the name of a scalar, or "ptr" or "desc" with what it points to; a scalar's shape is None."""

    element: str
    shape: tuple[int, ...] | None = None
    pointee: Type | None = None


@dataclass
class Op:
    """An operation. ``text`` is what stands between its name and its types, with the operands."""

    name: str
    results: list[str]
    text: str
    types: str = ""
    regions: list[list[Block]] = field(default_factory=list)

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.text)


@dataclass
class Block:
    """A block of a region."""

    label: str = ""
    arguments: list[tuple[str, str]] = field(default_factory=list)  # names and types
    ops: list[Op] = field(default_factory=list)


@dataclass
class Function:
    """A function."""

    name: str
    public: bool
    arguments: list[tuple[str, str]]
    blocks: list[Block]


def split(text: str, separator: str = ",") -> list[str]:
    """Splits at separators that are in no brackets and no quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif quoted or (char == ">" and text[i - 1] == "-"):  # of an arrow
            continue
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif depth == 0 and text.startswith(separator, i) and i >= start:
            parts.append(text[start:i])
            start = i + len(separator)
    return [*parts, text[start:]] if text.strip() else []


def parse_type(text: str) -> Type:
    """Returns the type that ``text`` names."""
    text = text.strip()
    if text.startswith("tensor<"):
        *shape, element = split(split(text[7:-1])[0], "x")
        return Type(parse_type(element).element, tuple(map(int, shape)), parse_type(element).pointee)
    if text.startswith("!tt.ptr<"):
        return Type("ptr", None, parse_type(split(text[8:-1])[0]))
    if text.startswith("!tt.tensordesc<"):
        inner = text[15:-1]
        return Type("desc", None, parse_type(inner if inner.startswith("tensor<") else f"tensor<{inner}>"))
    return Type(text)


def parse(text: str) -> list[Function]:
    """Returns the functions of a module."""
    lines = iter(text.splitlines())
    functions = []
    for line in lines:
        match = re.match(r"\s*tt\.func (\w+ )?@(\"[^\"]*\"|[\w$.]+)\((.*)", line)
        if not match:
            continue
        if not line.endswith("{"):
            continue  # a function that has no body
        blocks, _ = _region(lines)
        arguments = _named(_until_close(match[3]))
        functions.append(Function(match[2], (match[1] or "public ") == "public ", arguments, blocks))
    return functions


def _until_close(text: str) -> str:
    depth = 1
    for i, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE and text[i - 1 : i + 1] != "->")
        if depth == 0:
            return text[:i]
    raise ValueError(f"the line of Triton's IR ends inside brackets: {text}")


def _named(text: str) -> list[tuple[str, str]]:
    """Reads ``%name: type, ...``, where attributes may follow a type."""
    pairs = []
    for part in split(text):
        name, _, kind = part.strip().partition(":")
        pairs.append((name.strip(), split(kind.strip(), " ")[0]))
    return pairs


def _region(lines: Iterator[str]) -> tuple[list[Block], str]:
    """Reads to the line that closes the region; returns the blocks and that line."""
    blocks = [Block()]
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("}"):
            return blocks, stripped
        label = _BLOCK.match(stripped)
        if label:
            block = Block(label[1], _named(label[2] or ""))
            blocks = [*blocks, block] if blocks[0].ops else [block]
        elif stripped:
            blocks[-1].ops.append(_op(stripped, lines))
    raise ValueError("Triton's IR ends inside a region")


def _op(line: str, lines: Iterator[str]) -> Op:
    results: list[str] = []
    match = re.match(r"(%[\w$.:, %-]+?) = ", line)
    if match:
        for name in match[1].split(","):
            base, _, count = name.strip().partition(":")
            results += [f"{base}#{i}" for i in range(int(count))] if count else [base]
        line = line[match.end() :]
    name, rest = re.match(r'"?([\w$.]+)"?(.*)', line).groups()  # type: ignore[union-attr]
    op = Op(name, results, rest)
    if rest.endswith("{"):
        op.text, end = rest[:-1].rstrip().removesuffix("("), ""
        while not end or end.endswith("{"):
            blocks, end = _region(lines)
            op.regions.append(blocks)
        op.text += " " + end.lstrip("})")
    parts = split(op.text, " : ")
    if len(parts) > 1 and not name.startswith("scf."):
        op.text, op.types = " : ".join(parts[:-1]), parts[-1]
    elif name.startswith("scf.") and "->" in op.text:
        op.types = op.text[op.text.index("->") :]
    return op
