"""The code blocks of README.md and docs/: programs with a title are files, ``console`` blocks are run and compared.

A block belongs to the tests of one framework if the line before it is a comment ``<!-- with: torch -->``; without
one to the tests of NumPy. In expected output ``...`` stands for anything, alone in a line for other lines. Ranks' lines
may come in any order. Warnings of other packages are left out: which ones come depends on what a machine has.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- with: (\w+) -->\n)?^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WARNING = re.compile(r"(\[\d+\] |)\S*/site-packages/(?!alltoallv)\S+:\d+: \w*Warning: ")


@dataclass
class Block:
    """A fenced block of a page."""

    page: Path
    framework: str
    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    """All of them."""
    found = []
    for page in PAGES:
        for framework, language, rest, text in _BLOCK.findall(page.read_text("utf-8")):
            title = re.search(r'title="([^"]+)"', rest)
            found.append(Block(page, framework or "numpy", language, title[1] if title else "", text))
    return found


def pages(framework: str) -> list:
    """Parameters for pytest: the pages on which a framework has commands with output.

    On every change run NumPy's, whose processes start at once, and of the others what a newcomer reads first.
    """
    wanted = {one.page for one in blocks() if one.language == "console" and one.framework == framework}
    first = {"README", "quickstart"} | ({page.stem for page in wanted} if framework == "numpy" else set())
    slow = pytest.mark.slow
    return [pytest.param(page, id=page.stem, marks=[] if page.stem in first else slow) for page in sorted(wanted)]


def run_page(page: Path, framework: str, folder: Path) -> None:
    """Runs the commands of a page in a folder that holds its programs, and compares what they print."""
    commands = 0
    for block in blocks():
        if block.page != page or block.framework != framework:
            continue
        if block.title:
            (folder / block.title).write_text(block.text)
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, expected = part.partition("\n")
                compare(command, expected, folder)
                commands += 1
    assert commands


def without_warnings(said: str) -> str:
    """The text without Python's warnings from installed packages, each with the line of source that follows it."""
    lines: list[str] = []
    warned: set[str] = set()  # prefixes of ranks whose line of source is to come
    for line in said.splitlines():
        if warning := _WARNING.match(line):
            warned.add(warning[1])
            continue
        source = next((prefix for prefix in warned if line.startswith(f"{prefix}  ")), None)
        if source is None:
            lines.append(line)
        else:
            warned.remove(source)
    return "\n".join(lines)


def compare(command: str, expected: str, folder: Path) -> None:
    """Runs one command line as a user would."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, text=True, timeout=240, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = without_warnings(done.stdout)
    if command.startswith(("torchrun", "mpiexec")):  # their ranks write lines and the ends of lines apart
        said = re.sub(r"(?<=.)(?=rank \d+: )", "\n", said)
    wanted = [line for line in expected.splitlines() if line.strip()]
    got = [line.rstrip() for line in said.splitlines() if line.strip()]
    message = f"$ {command}\nexpected:\n{expected}\ngot:\n{done.stdout}"
    patterns = [re.escape(line.rstrip()).replace(re.escape("..."), ".*") for line in wanted]
    if not any(re.match(r"(\[\d+\]|rank \d+)", line) for line in wanted):
        assert re.fullmatch("\n".join(patterns), "\n".join(got), re.DOTALL), message
        return
    for pattern in (one for one in patterns if one != ".*"):
        found = next((line for line in got if re.fullmatch(pattern, line)), None)
        assert found is not None, message
        got.remove(found)
    assert not got or ".*" in patterns, message
