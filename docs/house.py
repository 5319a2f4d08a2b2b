"""Draws docs/house.svg: the rooms of the house, how long each is, and who imports whom, read from the sources.

A line leads from a room to one that it imports, unless this follows from other lines. ``--check`` fails instead if the
picture does not match the sources, or if two folders have a test file of one name, which pytest cannot import both.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from math import fsum
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "house.svg"
CPP = (
    *(f"op_host/{name}" for name in ("all_to_all_v", "quant_all_reduce", "rows", "moe", "bindings")),
    *(
        f"op_host/runtime/{name}"
        for name in (
            "base",
            "abi",
            "core",
            "control",
            "bootstrap",
            "quantized",
            "shm",
            "hosts",
            "hccl",
            "aclnn",
            "device",
        )
    ),
    "op_kernel/cpu",
    "op_kernel/ascendc",
    "emulator",
)
# Modules of the package's top folder that make one room.
TOGETHER = {"extras": "errors", "membership": "launch", "dtypes": "memory", "tracing": "memory"}
WIDTH, BOX, ROW = 1120, 34, 62
Imports = dict[str, set[str]]


def files(folder: str, *suffixes: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split() if name.endswith(suffixes)]


def cpp_imports() -> Imports:
    """Each room of C++, with the rooms that its files include."""
    shown = {room.removeprefix("op_host/") + "/": room for room in CPP}

    def included(room: str) -> Iterator[str]:
        for path in files(room, ".cpp", ".h"):
            for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
                yield from (other for start, other in shown.items() if name.startswith(start) and other != room)

    return {room: set(included(room)) for room in CPP}


def python_room(module: str) -> str | None:
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if package != "alltoallv":
        return package
    return None if name in ("", "__main__") else TOGETHER.get(name, name)


def python_files(room: str) -> list[Path]:
    named = {
        path: path.relative_to(ROOT / "python").with_suffix("").parts for path in files("python", ".py", ".pyi", ".cc")
    }
    return [path for path, parts in named.items() if python_room(".".join(parts)) == room]


def python_imports() -> Imports:
    """Each room of Python, with the rooms that its modules import; the extension module is op_host/bindings."""
    sys.path.insert(0, str(ROOT / "python"))
    packages = ("alltoallv", "alltoallv_tools", "alltoallv_emulator")
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)
    imports: Imports = {}
    for module in graph.modules:
        if room := python_room(module):
            rooms = {python_room(name) for name in graph.find_modules_directly_imported_by(module)}
            imports.setdefault(room, set()).update(name for name in rooms if name and name != room)
    for room in imports:
        if any(re.search(r"import .*_core", path.read_text()) for path in python_files(room)):
            imports[room].add("op_host/bindings")
    return imports


def lines_of(room: str) -> int:
    own = files(room, ".cpp", ".h") if room in CPP else python_files(room)
    return sum(len(path.read_text().splitlines()) for path in own)


def reach(room: str, imports: Imports) -> set[str]:
    """What `room` imports, and what these import."""
    return imports[room].union(*(reach(other, imports) for other in imports[room]))


def level(room: str, imports: Imports) -> int:
    return 1 + max((level(other, imports) for other in imports[room]), default=-1)


def places_of(imports: Imports) -> dict[str, tuple[float, float]]:
    """The middle of each room: above what it imports, beside its neighbours in the order of what they import."""
    levels = {room: level(room, imports) for room in imports}
    places: dict[str, tuple[float, float]] = {}
    for number in range(max(levels.values()) + 1):
        wanted = {
            room: fsum(places[other][0] for other in imports[room]) / max(len(imports[room]), 1)  # whatever the order
            for room in sorted(levels)
            if levels[room] == number
        }
        for i, room in enumerate(sorted(wanted, key=wanted.__getitem__)):
            places[room] = (WIDTH * (i + 0.5) / len(wanted), ROW * (max(levels.values()) - number) + 40)
    return places


def draw(imports: Imports) -> str:
    places = places_of(imports)
    height = int(max(y for _, y in places.values())) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f6f7fa"/>',
    ]
    for room, others in sorted(imports.items()):
        needed = others - set[str]().union(*(reach(other, imports) for other in others))
        for other in sorted(needed):
            (x, y), (to_x, to_y) = places[room], places[other]
            out.append(
                f'<line x1="{x:.0f}" y1="{y + BOX / 2:.0f}" x2="{to_x:.0f}" y2="{to_y - BOX / 2:.0f}" stroke="#9ab"/>'
            )
    for room, (x, y) in sorted(places.items()):
        name, colour = room.removeprefix("op_host/").removeprefix("runtime/"), "#4477aa" if room in CPP else "#228833"
        wide = 8 * max(len(name), 9) + 10
        out.append(
            f'<rect x="{x - wide / 2:.0f}" y="{y - BOX / 2:.0f}" width="{wide}" height="{BOX}" rx="5" fill="{colour}"/>'
        )
        for text, size, dy in ((name, 13, -2), (f"{lines_of(room):,} lines", 10, 12)):
            out.append(
                f'<text x="{x:.0f}" y="{y + dy:.0f}" text-anchor="middle" font-size="{size}" fill="#fff">{text}</text>'
            )
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    picture = draw(cpp_imports() | python_imports())
    if "--check" not in sys.argv:
        PICTURE.write_text(picture)
        return 0

    names = Counter(path.name for path in files("tests", ".py") if path.name.startswith("test_"))
    if twice := [name for name, times in names.items() if times > 1]:
        print(f"tests has more than one {', '.join(twice)}, expected a name for each file that no other folder has")
        return 1

    def lengthless(text: str) -> str:
        return re.sub(r"[\d,]+ lines", "", text)

    if lengthless(PICTURE.read_text()) == lengthless(picture):
        return 0
    print("docs/house.svg does not match the sources: run python docs/house.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
