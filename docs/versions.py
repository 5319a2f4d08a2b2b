"""Writes the table of versions in docs/compatibility.md from build/versions, which sessions of nox have left there.

A row whose session has not run again stays as it is.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/compatibility.md"
HEAD = "| versions | passed | failed | skipped | date | commit | command |\n|---|---|---|---|---|---|---|\n"


def key(row: str) -> tuple[str, str]:
    """Returns the versions and the command, which name a row."""
    versions, *_, command = row.strip("| ").split(" | ")
    return versions, command


def row(path: Path) -> str:
    """Returns what a session has found."""
    (suite,) = xml.parse(path).getroot().iter("testsuite")
    versions, commit, command = suite.attrib["name"].split("; ")
    failed, skipped = (
        sum(int(suite.attrib[name]) for name in names) for names in (("failures", "errors"), ("skipped",))
    )
    passed = int(suite.attrib["tests"]) - failed - skipped
    date = suite.attrib["timestamp"][:10]
    return f"| {versions} | {passed} | {failed} | {skipped} | {date} | {commit} | `{command}` |"


def main() -> None:
    text = PAGE.read_text()
    begin = text.index(HEAD) + len(HEAD)
    length = len(re.match(r"(\|.*\n)*", text[begin:])[0])  # type: ignore[index]
    lines = [*text[begin : begin + length].splitlines(), *map(row, sorted((ROOT / "build/versions").glob("*.xml")))]
    rows = {key(line): line for line in lines}
    PAGE.write_text(text[:begin] + "".join(f"{rows[name]}\n" for name in sorted(rows)) + text[begin + length :])


if __name__ == "__main__":
    main()
