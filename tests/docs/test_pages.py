"""Lists in docs/ are complete, and name what exists."""

from __future__ import annotations

import ast
import re

import pytest
from documented import ROOT

import alltoallv
from alltoallv import errors

PYTHON = ROOT / "python"


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def test_every_error_is_explained():
    classes = [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)]
    text = page("errors")
    for name in set(classes) - {"AllToAllVError"}:
        assert re.search(rf"^## .*\b{name}\b", text, re.MULTILINE), name
        codes = re.search(rf"`{name}`[^|]*\| (\d+)", text)
        assert codes is not None, name
        assert int(codes[1]) == getattr(errors, name).code, name
        row = re.search(rf"^\| `{name}` \((.*?)\) \|", text, re.MULTILINE)
        bases = re.findall(r"an? (\w+)", row[1]) if row else []
        family = [one for one in getattr(errors, name).__bases__ if one is not errors.AllToAllVError]
        assert [one.__name__ for one in family] == bases, name


@pytest.mark.parametrize(
    "module", ["alltoallv.torch", "alltoallv.numpy", "alltoallv.mindspore", "alltoallv.paddle", "alltoallv"]
)
def test_migration_names_exist(module):
    pattern = rf"^## From [^\n]* to `{re.escape(module)}`\n(.*?)(?=^## |\Z)"
    (section,) = re.findall(pattern, page("migration"), re.MULTILINE | re.DOTALL)
    names = {
        name
        for row in re.findall(r"^\| [^|]+ \| (.+) \|$", section, re.MULTILINE)
        for name in re.findall(r"`(\w+(?:\.\w+)?)[^`]*`", row)
    }
    assert len(names) >= 5
    known = alltoallv._offered(module) if module != "alltoallv" else alltoallv.__all__
    for name in names - {"unit", "alltoallv"}:
        owner, _, member = name.partition(".")
        assert hasattr(getattr(alltoallv, owner), member) if member else name in known, name


@pytest.mark.parametrize("module", ["torch", "numpy", "mindspore", "paddle", "testing"])
def test_options_have_types(module):
    """No function, and no method of a class that a module offers takes ``**options: Any``."""
    names, found, untyped = alltoallv._offered(f"alltoallv.{module}"), set(), []
    for path in [PYTHON / "alltoallv" / "quantization" / "spec.py", *(PYTHON / "alltoallv" / module).rglob("*.py")]:
        for node in ast.parse(path.read_text("utf-8")).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name not in names:
                continue
            found.add(node.name)
            functions = [node] if isinstance(node, ast.FunctionDef) else node.body
            for function in functions:
                taken = function.args.kwarg if isinstance(function, ast.FunctionDef) else None
                private = taken and function.name.startswith("_") and not function.name.endswith("__")
                if taken and not private and (taken.annotation is None or ast.unparse(taken.annotation) == "Any"):
                    untyped.append(f"{path.name}: {node.name}.{function.name}")
    assert len(found) > 5
    assert untyped == []


def test_every_environment_variable_is_explained():
    before = r"getenv\(|environ(?:\.get\(|\.pop\(|\[)|integer\(os\.environ, |in os\.environ|^"
    read = re.compile(rf"""(?:{before})\s*["'](ALLTOALLV_\w+)["']""")
    files = [
        *(ROOT / "op_host").rglob("*.cpp"),
        *(PYTHON / "alltoallv").rglob("*.py"),
        *(PYTHON / "alltoallv_tools").rglob("*.py"),
    ]
    found = {name for path in files for name in read.findall(path.read_text("utf-8"))}
    assert len(found) > 8
    assert {name for name in found if f"`{name}`" not in page("environment") and "EMULATOR" not in name} == set()


def test_tests_that_pages_name_exist():
    """What is promised is held by tests that are there."""
    named = [
        (path.stem, name)
        for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
        for name in re.findall(r"`(tests/[\w/.]+)`", path.read_text("utf-8"))
    ]
    assert [one for one in named if not (ROOT / one[1]).exists()] == []
    promises = page("reliability").partition("## What is promised")[2].partition("\n\nElsewhere")[0]
    for row in re.findall(r"^\| (\*\*.*) \|$", promises, re.MULTILINE):
        assert "`tests/" in row.rpartition(" | ")[2], row


def test_the_chinese_readme_has_what_the_english_one_has():
    """Headings by level, code, tables by their cells, links and pictures: in one order."""

    def shape(name: str) -> dict[str, list]:
        text = (ROOT / name).read_text("utf-8")
        code = re.findall(r"(?:<!-- with: \w+ -->\n)?```.*?\n```\n", text, re.DOTALL)
        prose = re.sub(r"```.*?\n```\n", "", text, flags=re.DOTALL)
        links = re.findall(r"\]\(([^)]+)\)", prose)
        return {
            "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
            "code": code + re.findall(r"^    .*$", prose, re.MULTILINE),
            "tables": [row.count("|") for row in re.findall(r"^\|.*$", prose, re.MULTILINE)],
            "names": sorted(set(re.findall(r"`[^`\n]+`", prose))),
            "links": [link for link in links if "README" not in link or "/" in link],
        }

    assert shape("README.zh-CN.md") == shape("README.md")
