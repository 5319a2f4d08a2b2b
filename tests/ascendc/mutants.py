"""Kernels without one of their barriers, events, EnQue, DeQue or FreeTensor: all of them in one library.

Each of these statements gets a switch, so the kernels are compiled once: ``if (keeps(17)) PipeBarrier<PIPE_V>();``.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import compiled

CALL = (
    r"(?:PipeBarrier<\w+>|SetFlag<[\w:]+>|WaitFlag<[\w:]+>|\w+\.EnQue|\w+\.FreeTensor|DataCacheCleanAndInvalid<[^;]*>)"
)
STATEMENT = re.compile(rf"({CALL}\([^;]*\)|\w+ = \w+\.(?:template )?DeQue<\w+>\(\));")
ANY = re.compile(r"PipeBarrier<|SetFlag<|WaitFlag<|\.EnQue\(|DeQue<|\.FreeTensor\(|DataCacheCleanAndInvalid<")
HEAD = """#include <atomic>
extern "C" {
std::atomic<int> alltoallv_removed{-1};
std::atomic<bool> alltoallv_reached[1000];
}
inline bool alltoallv_keeps(int i) {
    alltoallv_reached[i] = true;
    return i != alltoallv_removed;
}
"""


@dataclass(frozen=True)
class Site:
    """One statement that can be removed."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class Mutants:
    """The library, and its switches."""

    def __init__(self, folder: Path):
        self.sites: list[Site] = []
        changed = folder / "op_kernel" / "ascendc"
        changed.mkdir(parents=True)
        sources = sorted([*compiled.KERNELS.glob("*.h"), *compiled.KERNELS.glob("*.cpp")])
        for path in sources:
            (changed / path.name).write_text(self._with_switches(path))
        kernels = [path.name for path in sources if path.suffix == ".cpp"]
        twin = [f"{compiled.KERNELS}/twin/{name}.cpp" for name in ("core", "kernels")]
        names = [*(f"{changed}/{name}" for name in kernels), *twin]
        source = folder / "all.cpp"
        source.write_text(HEAD + "".join(f'#include "{name}"\n' for name in names))
        self.library = ctypes.CDLL(str(compiled.library(source, folder / "mutants.so", [folder, changed])))
        self._removed = ctypes.c_int.in_dll(self.library, "alltoallv_removed")
        self._reached = (ctypes.c_bool * 1000).in_dll(self.library, "alltoallv_reached")

    def _with_switches(self, path: Path) -> str:
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            code, slashes, comment = line.partition("//")
            if not ANY.search(code):
                continue
            found = STATEMENT.search(code)
            assert found, f"{path.name}:{i + 1}: expected one statement in one line, got {line.strip()}"
            switched = f"if (alltoallv_keeps({len(self.sites)})) {found.group(0)}"
            lines[i] = code[: found.start()] + switched + code[found.end() :] + slashes + comment
            self.sites.append(Site(path.name, i + 1, found.group(1)))
        return "\n".join(lines) + "\n"

    def remove(self, site: int | None) -> None:
        """Switches off that statement, and no other."""
        self._removed.value = -1 if site is None else site

    def reached(self) -> set[int]:
        """The statements that have run since the last call."""
        found = {i for i in range(len(self.sites)) if self._reached[i]}
        ctypes.memset(self._reached, 0, 1000)
        return found
