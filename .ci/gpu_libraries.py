"""Lets a CUDA build of torch start where the CUDA libraries are not: they are several GB, and no test here calls them.

PyPI's torch for x86_64 is such a build. What it is linked to is replaced by libraries of the same names whose functions
all return 100: to CUDA, "no device". Beside a CPU build, or where CUDA's own libraries are, nothing is made.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_CUDA = re.compile(r"lib(cu|nv|nccl)\w*\.so(?<!libcuda\.so)")  # the driver's is looked for when it is needed
_FUNCTION = re.compile(r"(__)?(cu|nv|nccl)[A-Za-z]\w*$")


def replace(packages: Path) -> list[str]:
    """Makes in ``packages``/torch/lib the libraries that it lacks; returns their names."""
    folder = packages / "torch/lib"
    built = [_read(path) for path in folder.glob("lib*.so")]
    here = {path.name for path in [*folder.iterdir(), *packages.glob("nvidia/**/*.so*"), *packages.glob("cu*/lib/*")]}
    lacking = sorted({name for library in built for name in library.needed if _CUDA.match(name)} - here)
    if not lacking:
        return []
    defined = set().union(*(library.defined for library in built))
    versioned = {name for library in built for name, version in library.wanted if version}
    parts: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in lacking}
    for library in built:
        for name, version in library.wanted:
            if (home := library.versions.get(version)) in parts:
                parts[home][version].add(name)
            elif not version and _FUNCTION.match(name) and name not in defined | versioned:
                parts[lacking[0]][""].add(name)  # the loader looks for it everywhere
    for name, functions in parts.items():
        _make(folder / name, name, functions)
    return lacking


class _Library(NamedTuple):
    """What a library needs: others, functions with their versions, and whose these versions are."""

    needed: set[str]
    wanted: set[tuple[str, str]]
    versions: dict[str, str]
    defined: set[str]


def _read(path: Path) -> _Library:
    command = ("readelf", "--wide", "--dynamic", "--dyn-syms", "--version-info", str(path))
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _Library(set(re.findall(r"\(NEEDED\).*\[(.+)\]", text)), set(), {}, set())
    for index, name in re.findall(r"^ *\d+: +\w+ +\w+ +\w+ +\w+ +\w+ +(\w+) (\S+)", text, re.MULTILINE):
        symbol, _, version = name.partition("@")
        if index == "UND":
            found.wanted.add((symbol, version.lstrip("@")))
        else:
            found.defined.add(symbol)
    home = ""
    for file, version in re.findall(r"Version: 1  File: (\S+)|  Name: (\S+)  Flags: ", text):
        home = file or home
        if version:
            found.versions[version] = home
    return found


def _make(path: Path, name: str, parts: dict[str, set[str]]) -> None:
    """Compiles a library of these functions, by the version that their callers want."""
    functions = sorted({each for names in parts.values() for each in names})
    # What returns text is asked for it where a call has failed.
    code = "".join(
        f'const char* {each}(void) {{ return "no CUDA"; }}\n'
        if "String" in each
        else f"long {each}(void) {{ return 100; }}\n"
        for each in functions
    )
    versions = "".join(
        f"{version or 'unversioned'} {{ global: {' '.join(f'{each};' for each in sorted(names))} }};\n"
        for version, names in parts.items()
        if version
    )
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "functions.c"), Path(folder, "versions")
        source.write_text(code)
        script.write_text(versions)
        flags = [f"-Wl,--version-script={script}"] if versions else []
        command = ["cc", "-shared", "-fPIC", "-w", "-O1", f"-Wl,-soname,{name}", *flags, "-o", str(path), str(source)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    print("made in the place of CUDA's:", *replace(Path(sys.argv[1])))
