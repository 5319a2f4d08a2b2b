"""Functions with another library's names use each of their arguments, or docs/migration.md lists it as ignored."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[1]
STAND_INS = {
    "torch.distributed": "torch/api/collectives torch/api/reductions torch/api/p2p torch/process_group/backend"
    " torch/process_group/group torch/process_group/functions torch/symm_mem",
    "mint.distributed": "mindspore/collectives mindspore/messages mindspore/exchange mindspore/distributed",
    "mindspore.communication": "mindspore/comm_func",
    "paddle.distributed": "paddle/collectives paddle/exchange paddle/front_end paddle/messages",
    "paddle.distributed.stream": "paddle/stream",
    "paddle.ProcessGroup": "paddle/installation",
    "jax.lax": "jax/__init__",
    "mpi4py": "mpi/MPI mpi/communicators mpi/datatypes mpi/groups mpi/operations mpi/requests mpi/topologies",
}
ROW = re.compile(r"\| `(?P<library>[\w.]+)` \| (?P<functions>[^|]+) \| (?P<arguments>[^|]+) \| [^|]+ \|")


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if not any(ast.unparse(each) == "overload" for each in node.decorator_list):
                yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body)
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    each.name = node.name
                    yield each


def arguments(function: ast.FunctionDef) -> set[str]:
    given = function.args
    every = *given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg
    return {each.arg for each in every if each is not None} - {"self", "cls"}


def read(function: ast.FunctionDef) -> set[str]:
    return {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}


def test_every_argument_is_used_or_listed() -> None:
    page = (TOP / "docs" / "migration.md").read_text()
    listed = {
        (row["library"], function, argument)
        for row in ROW.finditer(page)
        for function in re.findall(r"`(\w+)`", row["functions"])
        for argument in re.findall(r"`(\w+)`", row["arguments"])
    }
    assert len(listed) > 10
    every: set[tuple[str, str, str]] = set()
    for library, names in STAND_INS.items():
        for name in names.split():
            for function in public(ast.parse((TOP / f"python/alltoallv/{name}.py").read_text()).body):
                every |= {(library, function.name, argument) for argument in arguments(function)}
                unread = {(library, function.name, argument) for argument in arguments(function) - read(function)}
                assert unread <= listed, f"{name}.py:{function.lineno} does not use {unread - listed}"
    assert listed <= every, f"there are no {listed - every}"
