"""A column of the matrix: one front end, and how the collectives of `cases` are called there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alltoallv.testing import golden

Array = np.ndarray[Any, Any]

#: Where a collective writes what it does not return, in the names of `alltoallv.numpy`.
OUTPUTS = {
    "all_to_all_single": "output",
    "all_to_all": "output_tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "broadcast": "array",
    "scatter": "out",
}


@dataclass(frozen=True)
class Row:
    """One collective of one front end.

    Attributes:
        name: What it is called there.
        names: Its arguments that are called otherwise than in `alltoallv.numpy`; also in error texts.
        output: The argument that holds the output afterwards; None: it is returned.
        prepare: Changes the arguments further, for a signature of another kind.
    """

    name: str
    names: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda arguments: arguments


def in_parts(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Prepares a call that takes a list of tensors for what is one tensor of a part per rank in `alltoallv.numpy`."""

    def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
        whole = arguments.get(name)
        return {**arguments, name: None if whole is None else [whole[j] for j in range(len(whole))]}

    return prepare


#: The collectives that torch.distributed calls otherwise, and whoever follows its names.
DISTRIBUTED = {
    "all_reduce": Row("all_reduce", {"input": "tensor"}, "input"),
    "broadcast": Row("broadcast", {"array": "tensor", "root": "src"}, "array"),
    "all_gather": Row("all_gather", {"input": "tensor", "out": "tensor_list"}, "out", in_parts("out")),
    "reduce": Row("reduce", {"input": "tensor", "root": "dst"}, "input"),
    "gather": Row("gather", {"input": "tensor", "out": "gather_list", "root": "dst"}, "out", in_parts("out")),
    "scatter": Row("scatter", {"out": "tensor", "input": "scatter_list", "root": "src"}, "out", in_parts("input")),
    "reduce_scatter": Row("reduce_scatter_tensor", {"out": "output"}, "out"),
}


#: The name that a root has in these.
WRONG_SOURCE = {
    f"broadcast: from rank {root}": ("InvalidParamError", f"src is {root}, expected 0 <= src < 3") for root in (3, -1)
}


class Column:
    """What every front end's adapter says.

    Attributes:
        name: Of the front end, in the ids of tests and in the table of the documentation.
        module: What holds its functions.
        package: What must be installed.
        rows: Its collectives, by their name in `alltoallv.numpy`; left out: those that are called alike.
        lacks: Collectives and features it does not offer, and why.
        dtypes: Those that its framework has.
        own: Faults that the framework's signature reports otherwise, by the case's name: class and text.
        prefix: Before the errors of a rank's own arguments, with {function} and {rank}; not before those in `own`.
        unheard: Faults that the framework finds before a backend is asked, so that the peers would wait.
        not_contiguous, no_group: Parts of texts that are its own.
        cases: Of what it alone has.
    """

    name: str
    module: str
    package: str
    rows: dict[str, Row] = {}
    lacks: dict[str, str] = {}
    dtypes: tuple[str, ...] = golden.DTYPES
    own: dict[str, tuple[str, str]] = {}
    prefix: str = ""
    unheard: frozenset[str] = frozenset()
    cases: list[Any] = []
    not_contiguous = "is not contiguous, expected a contiguous tensor"
    no_group = "group is a int, expected a Communicator or None"

    def __init__(self) -> None:
        self.functions: Any = importlib.import_module(self.module)

    @classmethod
    def row(cls, function: str) -> Row:
        """How a collective is called here."""
        return cls.rows.get(function, Row(function, output=OUTPUTS.get(function)))

    @classmethod
    def installed(cls) -> bool:
        """Whether the framework can be imported; a folder of tests of its name is none."""
        spec = importlib.util.find_spec(cls.package)
        return spec is not None and spec.origin is not None

    @contextlib.contextmanager
    def group(self, communicator: Any) -> Iterator[Any]:
        """What the functions take as ``group``."""
        yield communicator

    def tensor(self, array: Array) -> Any:
        """The framework's copy of an array."""
        return np.array(array)

    def array(self, tensor: Any) -> Array:
        """A copy of a tensor."""
        return np.array(tensor)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Of the sum of the squares of the function's output."""
        raise NotImplementedError

    def call(self, function: str, group: Any, arguments: dict[str, Any]) -> Any:
        """The output, complete, of a call with the arguments of `alltoallv.numpy`."""
        row = self.row(function)
        output = None if row.output is None else arguments.get(row.output)
        theirs = {row.names.get(name, name): value for name, value in row.prepare(arguments).items()}
        returned = getattr(self.functions, row.name)(**{"group": group, **theirs})
        if arguments.get("async_op"):
            made, work = returned if isinstance(returned, tuple) else (None, returned)
            assert work.wait() is self.waited
            assert work.is_completed()
            returned = work.result() if row.output is None and made is None else made
        if output is None:
            return returned if row.output is None else None
        assert arguments.get("async_op") or returned is None or self.returns_handles, returned
        return output

    #: Whether a call that is not asynchronous also has a handle.
    returns_handles = False
    #: What the handle's `wait` returns.
    waited: bool | None = True
