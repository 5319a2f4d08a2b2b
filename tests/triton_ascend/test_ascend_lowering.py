"""Every launch of the Triton kernels, with the tiles for an NPU, goes through Ascend's compiler up to its assembler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import lowering
import pytest
import torch
import triton

from alltoallv.quantization.spec import Overflow, Quantization
from alltoallv_triton import launch

#: Ascend 910B, and its successor, two of which make a 910C (A3).
TARGETS = ("Ascend910B1", "Ascend910_9391")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OVERFLOWS: tuple[Overflow, ...] = ("saturate", "raise", "infinity")
#: Groups: a representative of every way to tile them, in full; then one of every other tile.
GROUPS = {8: (128, 512), 4: (128, 512)}
WIDTHS = {8: (2, 4, 8, 16, 32, 64, 256), 4: (2, 4, 8, 16, 32, 64)}
PIECES = {8: (1, 3, 7, 12, 25, 50, 100, 200, 1024, 2048, 7168), 4: (1, 3, 7, 12, 25, 50, 100, 256, 1024, 7168)}
SOME_PIECES = (1, 100, 7168)
CHANNELS = (1, 2, 16, 48, 4096)
COUNT = 1 << 17


def codes(rows: int) -> torch.Tensor:
    return torch.empty(rows, COUNT, dtype=torch.int8)


def values(dtype: torch.dtype = torch.float32, rows: int = 1) -> torch.Tensor:
    return torch.empty(rows, COUNT, dtype=dtype)


Case = tuple[str, Callable[[], object]]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def quantizations(bits: int, group_size: int, dtype: torch.dtype, feedback: bool) -> Case:
    how, error = Quantization(f"int{bits}", group_size), values()[0] if feedback else None
    what = f"int{bits}, groups of {group_size}, {name_of(dtype)}{', error feedback' if feedback else ''}"
    return what, lambda: launch.quantize(values(dtype)[0], how, codes(1), values(), error)


def sums(bits: int, group_size: int, dtype: torch.dtype, overflow: Overflow, average: bool) -> Case:
    how = Quantization(f"int{bits}", group_size, overflow=overflow)
    what = f"int{bits}, groups of {group_size}, to {name_of(dtype)}, {overflow}{', average' if average else ''}"
    return what, lambda: launch.dequantize_sum(codes(4), values(rows=4), how, values(dtype)[0], average=average)


def requantizations(bits: int, group_size: int, feedback: bool, average: bool) -> Case:
    how, error = Quantization(f"int{bits}", group_size), values()[0] if feedback else None
    what = f"int{bits}, groups of {group_size}{', error feedback' if feedback else ''}{', average' if average else ''}"
    return what, lambda: launch.requantize(
        codes(4), values(rows=4), how, COUNT, codes(1), values(), average=average, error=error
    )


def shared_sums(channels: int, dtype: torch.dtype, overflow: Overflow) -> Case:
    scales = torch.empty(channels)
    return f"{channel_text(channels)}, to {name_of(dtype)}, {overflow}", lambda: launch.sum_shared_scale(
        codes(4), scales, torch.empty(1), values(dtype)[0], overflow
    )


def scaled(channels: int, dtype: torch.dtype) -> Case:
    scales = torch.empty(channels)
    return f"{channel_text(channels)}, {name_of(dtype)}", lambda: launch.quantize_scaled(
        values(dtype)[0], scales, codes(1)[0]
    )


def requantized_sums(channels: int) -> Case:
    scales = torch.empty(channels)
    return channel_text(channels), lambda: launch.requantize_sum(codes(4), scales, codes(1)[0])


def channel_text(channels: int) -> str:
    return "one scale" if channels == 1 else f"{channels} channels"


def every_case() -> Iterator[Case]:
    """All combinations of tile, dtype, overflow, average and error feedback."""
    for bits in (8, 4):
        for size in (*GROUPS[bits], *WIDTHS[bits], *PIECES[bits]):
            yield from (quantizations(bits, size, *rest) for rest in product(FLOATS, (False, True)))
            yield from (sums(bits, size, *rest) for rest in product(FLOATS, OVERFLOWS, (False, True)))
            yield from (requantizations(bits, size, *rest) for rest in product((False, True), (False, True)))
    for channels in (*CHANNELS, *(4, 8, 32, 64, 128)):
        yield from (shared_sums(channels, *rest) for rest in product(FLOATS, OVERFLOWS))
        yield from (scaled(channels, dtype) for dtype in FLOATS)
        yield requantized_sums(channels)


def few_cases() -> Iterator[Case]:
    """Every value of every constant at some tile."""
    for bits in (8, 4):
        for size in GROUPS[bits]:
            yield from (quantizations(bits, size, dtype, True) for dtype in FLOATS)
            yield quantizations(bits, size, torch.float32, False)
            for overflow, average in zip(OVERFLOWS, (True, False, True), strict=True):
                yield sums(bits, size, torch.bfloat16 if average else torch.float16, overflow, average)
            yield requantizations(bits, size, True, True)
            yield requantizations(bits, size, False, False)
    yield from (shared_sums(1, dtype, overflow) for dtype, overflow in zip(FLOATS, OVERFLOWS, strict=True))


def some_cases() -> Iterator[Case]:
    """Those, and every tile of groups, ends of the range of pieces and of channels, with what takes most room there."""
    yield from few_cases()
    for bits in (8, 4):
        for size in (*WIDTHS[bits], *SOME_PIECES):
            yield quantizations(bits, size, torch.float32, True)
            yield sums(bits, size, torch.float32, "raise", True)
            if size in WIDTHS[bits]:
                yield requantizations(bits, size, True, True)
    for channels in CHANNELS:
        yield from (shared_sums(channels, torch.float32, overflow) for overflow in OVERFLOWS)
        yield from (scaled(channels, dtype) for dtype in FLOATS)
        yield requantized_sums(channels)


def launches(cases: Iterator[Case]) -> dict[tuple[str, str], lowering.Launch]:
    """By kernel and case, each once."""
    found: dict[tuple[str, str], lowering.Launch] = {}
    for what, call in cases:
        with lowering.recorded() as noted:
            call()
        for one in noted:
            if one not in found.values():
                found[one.name, what] = one
    return found


LAUNCHES = launches(every_case() if os.environ.get("ALLTOALLV_ASCEND_ALL") else some_cases())
FEW = launches(few_cases())
#: Of every kernel one launch.
FIRST = {kernel: (kernel, what) for kernel, what in sorted(LAUNCHES, reverse=True)}.values()
_lowered: dict[tuple[str, str, str], lowering.Lowered] = {}


def lowerings() -> Iterator[object]:
    """On both targets one of each kernel; all others are slow, and on the other target left out but for the few."""
    for name in sorted(LAUNCHES):
        few = LAUNCHES[name] in FEW.values()
        for target in TARGETS:
            if target == TARGETS[0] or few or os.environ.get("ALLTOALLV_ASCEND_ALL"):
                yield pytest.param(*name, target, marks=() if name in FIRST else pytest.mark.slow)


@pytest.mark.parametrize(("kernel", "what", "target"), lowerings())
def test_lowers(kernel: str, what: str, target: str) -> None:
    lowered = lowering.lower(LAUNCHES[kernel, what], target)
    _lowered[kernel, what, target] = lowered
    assert not lowered.diagnostics, "\n".join(lowered.diagnostics)
    assert lowered.unified_buffer is not None
    assert 0 < lowered.unified_buffer <= lowering.UNIFIED_BUFFER


def test_every_kernel_is_among_them() -> None:
    from alltoallv_triton import dequantize, quantize, shared_scale

    entries = {"quantize_groups", "quantize_pieces", "dequantize_groups", "dequantize_pieces", "requantize_groups"}
    entries |= {"sum_shared_scale", "quantize_scaled", "requantize_sum"}
    assert {kernel for kernel, _ in LAUNCHES} == entries
    for module in (quantize, dequantize, shared_scale):
        for name, value in vars(module).items():
            if isinstance(value, triton.JITFunction) and name in entries:
                entries.remove(name)
    assert not entries


def test_table(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints unified-buffer use; with ``--ascend-table=FILE`` writes it."""
    rows = [f"| kernel | of | {' | '.join(TARGETS)} |", "|---|---|" + "---|" * len(TARGETS)]
    for kernel, what in sorted(LAUNCHES):
        found = [_lowered.get((kernel, what, target)) for target in TARGETS]
        cells = [f"{one.unified_buffer / 1024:.0f} KiB" if one and one.unified_buffer else "-" for one in found]
        tile = {name: value for name, value in LAUNCHES[kernel, what].constants if name in ("ROWS", "WIDTH")}
        shape = " × ".join(str(value) for value in tile.values())
        rows.append(f"| `{kernel}` | {what}; tile {shape} | {' | '.join(cells)} |")
    with capsys.disabled():
        print("", *rows, sep="\n")
    if path := request.config.getoption("--ascend-table"):
        text = Path(path).read_text() if Path(path).exists() else TABLE_MARK
        Path(path).write_text(text.split(TABLE_MARK)[0] + TABLE_MARK + "\n\n" + "\n".join(rows) + "\n")


TABLE_MARK = "<!-- table: nox -s triton_ascend -- --ascend-table=docs/notes/ascend-lowering.md -->"
