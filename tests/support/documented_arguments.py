"""Calls each function that has another library's name with each argument that the library documents.

A row is a call and what it gives: a value, an error that names the argument, or the word that an argument is ignored,
which docs/migration.md then says. The rows of a function together give every argument of the library's own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from documented import ROOT

ROW = re.compile(r"\| `(?P<library>[\w.]+)` \| (?P<functions>[^|]+) \| (?P<arguments>[^|]+) \| [^|]+ \|")


def ignored_on_purpose() -> set[tuple[str, str, str]]:
    """Returns what the page lists, as library, function and argument."""
    return {
        (row["library"], function, argument)
        for row in ROW.finditer((ROOT / "docs" / "migration.md").read_text("utf-8"))
        for function in re.findall(r"`(\w+)`", row["functions"])
        for argument in re.findall(r"`(\w+)`", row["arguments"])
    }


@dataclass
class Row:
    """A call of a function, and what it gives.

    Attributes:
        arguments: By name.
        want: What ``made`` returns after the call, or an exception's class.
        made: What to look at, given what the call has returned.
        ignores: Arguments that change nothing.
        refuses: The argument that the error names.
    """

    function: str
    arguments: dict[str, Any]
    want: Any = None
    made: Callable[[Any], Any] = lambda result: result
    ignores: Sequence[str] = ()
    refuses: str = ""


@dataclass
class Library:
    """A library's functions, and those that stand in for them."""

    name: str
    theirs: Any
    ours: Any
    rows: list[Row] = field(default_factory=list)

    def check(self, without: Iterable[tuple[str, str]] = ()) -> None:
        """Fails unless every row gives what it says, and the rows give every argument; ``without``: but for these."""
        listed, given = ignored_on_purpose(), dict[str, set[str]]()
        for number, row in enumerate(self.rows):
            label = f"{number}: {self.name}.{row.function}({', '.join(row.arguments)})"
            call = getattr(self.ours, row.function)
            given.setdefault(row.function, set()).update(row.arguments)
            if row.refuses:
                with pytest.raises(row.want, match=row.refuses):
                    call(**row.arguments)
                continue
            found = row.made(call(**row.arguments))
            assert found == row.want, (label, found, row.want)
            for argument in row.ignores:
                assert (self.name, row.function, argument) in listed, label
        for function, arguments in given.items():
            documented = set(inspect.signature(getattr(self.theirs, function)).parameters)
            missing = {(function, one) for one in documented - arguments} - set(without)
            assert not missing, f"{self.name}: no row gives {sorted(missing)}"
