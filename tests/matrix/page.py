"""Writes docs/front-ends.md: what each front end offers, as the matrix tests it. ``python tests/matrix/page.py``."""

from __future__ import annotations

from pathlib import Path

from cases import CASES
from columns import COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "front-ends.md"
HEAD = """# Front ends

This page lists what each front end offers. It is written by `python tests/matrix/page.py` from tests/matrix, which
calls every function below in every front end and checks that the results have the same bits, and that every rank
raises the same errors: the same class, text and code. The column `c10d` is `torch.distributed` on backend `alltoallv`.
The page of a front end has the functions that it alone offers, such as `alltoallv.torch.functional`.
"""


def page() -> str:
    """The text of the page."""
    lines = [HEAD, "## Functions", "", *_header("collective")]
    functions = dict.fromkeys(case.function for case in CASES)
    for function in functions:
        cells = ["-" if function in column.lacks else f"`{column.row(function).name}`" for column in COLUMNS]
        lines.append(_row(f"`{function}`", cells))
    lines += ["", "## Features", "", *_header("feature")]
    for need in dict.fromkeys(need for case in CASES for need in case.needs):
        lines.append(_row(need, ["-" if need in column.lacks else "yes" for column in COLUMNS]))
    lines += ["", "## What is missing, and why", ""]
    for column in COLUMNS:
        reasons: dict[str, list[str]] = {}
        for what, reason in column.lacks.items():
            reasons.setdefault(reason, []).append(f"`{what}`" if what in functions else what)
        lines += [f"- {column.name}: {', '.join(what)}: {reason}." for reason, what in reasons.items()]
    return "\n".join(lines) + "\n"


def _header(what: str) -> list[str]:
    names = [column.name for column in COLUMNS]
    return [_row(what, names), _row("---", ["---"] * len(names))]


def _row(first: str, cells: list[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


if __name__ == "__main__":
    PAGE.write_text(page())
