"""What each front end offers, as the matrix tests it: the tables of the site's page docs/front-ends.md."""

from __future__ import annotations

from cases import CASES
from columns import COLUMNS


def tables() -> str:
    """The tables, as Markdown."""
    lines = ["## Functions", "", *_header("collective")]
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
    print(tables())
