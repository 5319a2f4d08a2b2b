"""Tables as text, for all commands: printed whole, or a row at a time as it is measured.

tabulate and rich lay out a table when all its rows are there; a benchmark's come minutes apart, into pipes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Table:
    """Formats rows that come one by one. A column is its name and the format of its values: ``"time >10.2f"``."""

    def __init__(self, *columns: str) -> None:
        self._columns = [column.rsplit(" ", 1) for column in columns]

    def head(self) -> str:
        """Returns the names of the columns."""
        return self._joined((name, spec.split(".")[0]) for name, spec in self._columns)

    def row(self, *values: Any) -> str:
        """Returns a row; None is a value that is missing."""
        specs = (spec for _, spec in self._columns)
        pairs = zip(values, specs, strict=True)
        return self._joined(("-", spec.split(".")[0]) if value is None else (value, spec) for value, spec in pairs)

    @staticmethod
    def _joined(cells: Any) -> str:
        return " ".join(format(value, spec) for value, spec in cells).rstrip()


def table_lines(head: Sequence[str], rows: Sequence[Sequence[Any]], align: str = ">") -> Iterator[str]:
    """Yields the lines of a table whose rows are all there: a column is as wide as its widest cell."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(head, *rows, strict=True)]
    for cells in (head, *rows):
        yield "  ".join(f"{cell!s:{align}{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
