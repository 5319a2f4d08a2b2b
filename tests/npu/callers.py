"""Writes which operators for NPUs installed packages call, how often and with which arguments by name.

    nox -r -s vllm --install-only
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 .nox/vllm/bin/python tests/npu/callers.py docs/notes/npu-callers.md vllm-ascend

Reads the packages' files, as they are; a call by another name (an alias, getattr, a string) is not seen.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

SPACES = {"torch_npu": "npu", "torch.ops.npu": "npu", "torch.ops.atb": "atb", "torch_npu.atb": "atb"}
SPACES |= {f"torch.ops.{space}": space for space in ("_C_ascend", "cann_ops_transformer")}
NO_OPERATOR = re.compile(r"(npu|profiler|utils|distributed|contrib|optim|multiprocessing|_C|[A-Z_]*[A-Z]\w*)$")


class Call(NamedTuple):
    """One call of an operator in a file."""

    operator: str
    arguments: tuple[str, ...]  # by name
    file: str


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def calls(text: str, file: str) -> Iterator[Call]:
    """Yields the calls of operators in the text of a module; an overload counts as its operator."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            for space, short in SPACES.items():
                operator, _, overload = name.removeprefix(f"{space}.").partition(".")
                known = name.startswith(f"{space}.") and overload in ("", "default", "out")
                if known and not NO_OPERATOR.match(operator):
                    yield Call(f"{short}::{operator}", tuple(k.arg for k in node.keywords if k.arg), file)


def page(packages: list[str]) -> str:
    """Returns the page, of the installed packages with these names."""
    lines = [
        "# Operators that programs for NPUs call",
        "",
        "`tests/npu/callers.py` writes this page from installed packages: in their Python files every call of",
        "`torch_npu.NAME`, `torch.ops.npu`, `torch.ops.atb` and `torch.ops._C_ascend`. *formula* says that the",
        "emulator computes the operator by a formula of its own; without one a call raises an error with the",
        "operator's name, unless it is torch_npu's own work on memory and formats.",
        f"Written on {datetime.now(timezone.utc):%Y-%m-%d}.",
    ]
    ours = _with_formula()
    for package in packages:
        wheel = distribution(package)
        found: list[Call] = []
        for file in wheel.files or ():
            if file.suffix == ".py":
                found += calls(Path(str(file.locate())).read_text(), str(file))
        many = Counter(call.operator for call in found)
        names, files = defaultdict(set), defaultdict(set)
        for call in found:
            names[call.operator] |= set(call.arguments)
            files[call.operator].add(call.file)
        here = sum(name in ours for name in many)
        lines += [
            "",
            f"## {package} {wheel.version}",
            "",
            f"{len(many)} operators, {len(found)} calls; {here} of the operators have a formula.",
            "",
            "| operator | formula | calls | files | arguments by name |",
            "|---|---|---|---|---|",
        ]
        for name in sorted(many):
            given = ", ".join(f"`{each}`" for each in sorted(names[name])) or "-"
            row = (f"`{name}`", "yes" if name in ours else "no", str(many[name]), str(len(files[name])), given)
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _with_formula() -> set[str]:
    """The operators that the emulator computes, by the names that the page gives them."""
    from alltoallv.npu_ops.registry import formulas
    from alltoallv_emulator.vllm_ascend import caches, experts, layers, printing, recurrent, sparse, speculation

    rooms = caches, experts, layers, printing, recurrent, sparse, speculation
    schemas = [*sparse.METADATA, caches.SWAP_BLOCKS_BATCH, *(schema for room in rooms for schema in room.OPERATORS)]
    own = {schema.partition("(")[0] for schema in schemas}
    both = {name.partition(".")[0] for name in formulas()}
    return {f"{space}::{name}" for space in ("npu", "atb") for name in both} | {f"_C_ascend::{name}" for name in own}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(sys.argv[2:]))
