"""Writes docs/front-ends.md: what each front end offers, as the matrix tests it. ``python tests/matrix/page.py``."""

from __future__ import annotations

from pathlib import Path

from cases import CASES
from columns import COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "front-ends.md"
HEAD = """# Front ends

Written by `python tests/matrix/page.py` from the rows of tests/matrix, which call every function below in every front
end: the same values bit for bit, and the same errors on every rank, of the same class, text and code. `c10d` is
`torch.distributed` on backend `alltoallv`. Functions that only one front end has, such as `alltoallv.torch.functional`,
are on its own page.
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
    lines += ["", "## Why not", ""]
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
