"""The twin names what a device would punish, in small kernels with one fault each, and refuses what 2201 lacks."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import compiled
import pytest

HERE = Path(__file__).resolve().parent
COPIES, DROPS, KEEPS = range(3)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("planted")
    source = compiled.as_one(folder / "all.cpp", HERE / "planted.cpp", compiled.KERNELS / "twin/core.cpp")
    library = ctypes.CDLL(str(compiled.library(source, folder / "planted.so")))
    for name in ("planted_name", "planted_kind"):
        getattr(library, name).restype = ctypes.c_char_p
    library.planted_run.argtypes = [ctypes.c_int, ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_size_t]
    library.see_flag.argtypes = [ctypes.c_ulonglong, ctypes.c_bool, ctypes.c_int]
    return library


def test_every_planted_fault_is_named(planted: ctypes.CDLL) -> None:
    wrong, kinds = [], set()
    for i in range(planted.planted_count()):
        name, kind = planted.planted_name(i).decode(), planted.planted_kind(i).decode()
        kinds.add(kind)
        for seed in range(3):
            text = ctypes.create_string_buffer(1000)
            planted.planted_run(i, seed, text, 1000)
            if text.value.decode().partition(": ")[0] != kind:
                wrong.append(f"a kernel that {name}: expected {kind or 'no fault'!r}, got {text.value.decode()!r}")
    assert not wrong, "\n".join(wrong)
    print(f"{planted.planted_count()} kernels, {len(kinds) - 1} kinds of fault: {', '.join(sorted(kinds - {''}))}")
    assert len(kinds) - 1 >= 20


def test_kinds_are_documented(planted: ctypes.CDLL) -> None:
    """docs/ascend-c.md lists what the twin names, all of it."""
    sources = [path.read_text() for path in (compiled.KERNELS / "twin").iterdir()]
    named = {k for text in sources for k in re.findall(r'Fault\(\s*(?:other == pipe_ \? )?"([^"]+)"', text)}
    named |= {k for text in sources for k in re.findall(r'require\((?:[^;"]+?),\s*"([^"]+)",', text)}
    named |= {"missing event", "missing barrier"}
    page = (compiled.ROOT / "docs" / "ascend-c.md").read_text()
    assert not {kind for kind in named if f"`{kind}`" not in page}


def test_a_flag_is_seen_before_its_data_without_a_barrier(planted: ctypes.CDLL) -> None:
    without = [planted.see_flag(seed, False, COPIES) for seed in range(40)]
    assert 0 in without, "40 runs without a barrier, and the data were there each time"
    assert [planted.see_flag(seed, True, COPIES) for seed in range(40)] == [1] * 40


def test_scalars_read_through_a_cache(planted: ctypes.CDLL) -> None:
    """A flag that was read too early is never seen, unless its line is dropped before each read."""
    assert [planted.see_flag(seed, True, DROPS) for seed in range(10)] == [1] * 10
    assert -1 in [planted.see_flag(seed, True, KEEPS) for seed in range(40)]


def test_what_2201_lacks_does_not_compile() -> None:
    source = HERE / "refused.cpp"
    expected = {i for i, line in enumerate(source.read_text().splitlines(), 1) if "REFUSED" in line}
    done = compiled.run_compiler(source, "-fsyntax-only", "-ftemplate-backtrace-limit=0")
    blamed = {int(line) for line in re.findall(r"refused\.cpp:(\d+):", done.stderr)}
    assert done.returncode != 0
    assert blamed & expected == expected, f"lines {sorted(expected - blamed)} compile"
    print(f"{len(expected)} of {len(expected)} refused")
