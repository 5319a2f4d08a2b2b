"""Counts the house: files, lines by kind, functions of one statement, error texts that stand twice, rooms and arrows.

``python docs/house_counts.py [REVISION ...]`` prints a table with a column for the working tree and one for each
revision of git.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ("python/alltoallv", "python/alltoallv_tools", "python/alltoallv_emulator", "tests")
CPP = ("op_host", "op_kernel", "emulator", "tests")
HOLE = "{}"  # what stands for a value in a text


def files(tree: Path, folder: str, *suffixes: str) -> list[Path]:
    return sorted(path for path in (tree / folder).rglob("*") if path.suffix in suffixes and path.is_file())


def kinds_of_python(text: str) -> Counter[str]:
    """Lines: docstrings; heads of functions after the first line, and decorators; imports; comments; empty; code."""
    lines, kind = text.splitlines(), {}

    def mark(node: ast.expr | ast.stmt, name: str, begin: int | None = None, end: int | None = None) -> None:
        for number in range(begin or node.lineno, (end or node.end_lineno or node.lineno) + 1):
            kind[number] = name

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            mark(node, "imports")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                mark(decorator, "heads")
            if not isinstance(node, ast.ClassDef):
                mark(node, "heads", node.lineno + 1, node.body[0].lineno - 1)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                mark(first, "docstrings")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            kind[number] = "empty"
        elif line.lstrip().startswith("#"):
            kind.setdefault(number, "comments")
    return Counter(kind.get(number, "code") for number in range(1, len(lines) + 1))


def kinds_of_cpp(text: str) -> Counter[str]:
    """Lines: includes; comments; lone braces; empty; code."""

    def kind(line: str) -> str:
        if not line:
            return "empty"
        if line.startswith("#include"):
            return "imports"
        if line.startswith(("//", "/*", "*")):
            return "comments"
        return "braces" if re.fullmatch(r"[{}();,]+", line) else "code"

    return Counter(kind(line.strip()) for line in text.splitlines())


def functions(paths: Sequence[Path]) -> tuple[int, int]:
    """How many there are, and how many of them have one statement beside a docstring."""
    every = short = 0
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = [
                    one for one in node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
                ]
                every += 1
                short += len(body) == 1
    return every, short


def python_texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            parts = node.exc.args[0]
            if isinstance(parts, ast.Constant) and isinstance(parts.value, str):
                yield parts.value
            elif isinstance(parts, ast.JoinedStr):
                yield "".join(str(one.value) if isinstance(one, ast.Constant) else HOLE for one in parts.values)


def cpp_texts(path: Path) -> Iterator[str]:
    for call in re.findall(r"throw [^;]*?\(((?:[^;\"]|\"(?:[^\"\\]|\\.)*\")*)\);", path.read_text()):
        if found := re.findall(r"\"((?:[^\"\\]|\\.)*)\"|([^\s\",+]+)", call):
            pieces = [text if text else HOLE for text, _ in found]
            yield re.sub(r"(?:\{\})+", HOLE, "".join(pieces))


def count(tree: Path) -> dict[str, int]:
    rows: dict[str, int] = {}

    def lines(folder: str, paths: Sequence[Path], kinds: Counter[str]) -> None:
        rows[f"{folder}: files"] = len(paths)
        rows[f"{folder}: lines"] = sum(kinds.values())
        rows.update({f"{folder}: {kind}": number for kind, number in sorted(kinds.items())})

    for folder in PYTHON:
        paths, name = files(tree, folder, ".py"), folder + " (Python)" if folder in CPP else folder
        lines(
            name,
            paths,
            sum((kinds_of_python(path.read_text()) for path in paths), Counter()),
        )
        rows[f"{name}: functions"], rows[f"{name}: functions of one statement"] = functions(paths)
    for folder in CPP:
        paths = files(tree, folder, ".cpp", ".h", ".cc")
        lines(folder + " (C++)", paths, sum((kinds_of_cpp(path.read_text()) for path in paths), Counter()))
    texts = Counter(text for path in files(tree, "python/alltoallv", ".py") for text in python_texts(path))
    texts += Counter(text for path in files(tree, "op_host", ".cpp", ".h") for text in cpp_texts(path))
    rows["error texts"] = len(texts)
    rows["error texts that stand twice or more"] = sum(number > 1 and len(text) > 12 for text, number in texts.items())
    picture = tree / "docs" / "house.svg"
    if picture.exists():
        rows["rooms"] = picture.read_text().count("lines</text>")
        rows["arrows"] = picture.read_text().count("<line ")
    return rows


def at(revision: str) -> dict[str, int]:
    data = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
        return count(Path(folder))


def tracked() -> dict[str, int]:
    """The working tree without what git does not know."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(ROOT / name)
        return count(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="of git, for a column beside the working tree")
    revisions = parser.parse_args().revisions
    columns = {revision: at(revision) for revision in revisions} | {"working tree": tracked()}
    print("|  |", " | ".join(columns), "|")
    print("|---|", "|".join("--:" for _ in columns), "|")
    for row in dict.fromkeys(name for column in columns.values() for name in column):
        print(f"| {row} |", " | ".join(f"{column[row]:,}" if row in column else "" for column in columns.values()), "|")


if __name__ == "__main__":
    main()
