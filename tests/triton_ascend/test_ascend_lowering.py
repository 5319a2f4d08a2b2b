"""Every launch of the Triton kernels, with the tiles for an NPU, goes through Ascend's compiler up to its assembler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import lowering
import pytest
import torch
import triton
import triton.language as tl

from alltoallv.quantization import Quantization
from alltoallv.triton_kernels import launch

#: Ascend 910B, and its successor, two of which make a 910C (A3).
TARGETS = ("Ascend910B1", "Ascend910_9391")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (32, 128, 512, 100, 7168)  # tiles of groups, then those that go piece by piece
COUNT = 1 << 17


def codes(rows: int) -> torch.Tensor:
    return torch.empty(rows, COUNT, dtype=torch.int8)


def values(dtype: torch.dtype = torch.float32, rows: int = 1) -> torch.Tensor:
    return torch.empty(rows, COUNT, dtype=dtype)


Case = tuple[str, Callable[[], object]]


def of_groups(bits: int, group_size: int) -> Iterator[Case]:
    how = Quantization(bits, group_size)
    what = f"int{bits}, groups of {group_size}"
    dtypes = FLOATS if group_size == 128 else FLOATS[:1]
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for error in (None, values()[0]):
            feedback = "" if error is None else ", error feedback"
            yield (
                f"{what}, {name}{feedback}",
                lambda dtype=dtype, error=error: launch.quantize(values(dtype)[0], how, codes(1), values(), error),
            )
        for overflow in ("saturate", "raise"):
            asked = Quantization(bits, group_size, overflow=overflow)
            yield (
                f"{what}, to {name}, {overflow}",
                lambda dtype=dtype, asked=asked: launch.dequantize_sum(
                    codes(4), values(rows=4), asked, values(dtype)[0], average=True
                ),
            )
    for error in (None, values()[0]):
        yield (
            f"{what}{'' if error is None else ', error feedback'}",
            lambda error=error: launch.requantize(
                codes(4), values(rows=4), how, COUNT, codes(1), values(), error=error
            ),
        )


def of_shared_scales() -> Iterator[Case]:
    for channels in (1, 16, 4096):
        scales = torch.empty(channels)
        what = "one scale" if channels == 1 else f"{channels} channels"
        for dtype in FLOATS:
            name = str(dtype).removeprefix("torch.")
            yield (
                f"{what}, to {name}, raise",
                lambda dtype=dtype, scales=scales: launch.sum_shared_scale(
                    codes(4), scales, torch.empty(1), values(dtype)[0], "raise"
                ),
            )
            yield (
                f"{what}, {name}",
                lambda dtype=dtype, scales=scales: launch.quantize_scaled(values(dtype)[0], scales, codes(1)[0]),
            )
        yield what, lambda scales=scales: launch.requantize_sum(codes(4), scales, codes(1)[0])


def launches() -> dict[tuple[str, str], lowering.Launch]:
    """By kernel and case, each once."""
    found: dict[tuple[str, str], lowering.Launch] = {}
    cases = [case for bits in (8, 4) for size in GROUPS for case in of_groups(bits, size)]
    for what, call in [*cases, *of_shared_scales()]:
        with lowering.recorded() as noted:
            call()
        for one in noted:
            if one not in found.values():
                found[one.name, what] = one
    return found


LAUNCHES = launches()
_lowered: dict[tuple[str, str, str], lowering.Lowered] = {}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("kernel", "what"), sorted(LAUNCHES))
def test_lowers(target: str, kernel: str, what: str) -> None:
    lowered = lowering.lower(LAUNCHES[kernel, what], target)
    _lowered[kernel, what, target] = lowered
    assert not lowered.diagnostics, "\n".join(lowered.diagnostics)
    assert lowered.unified_buffer is not None
    assert 0 < lowered.unified_buffer <= lowering.UNIFIED_BUFFER


def test_every_kernel_is_among_them() -> None:
    from alltoallv.triton_kernels import dequantize, quantize, shared_scale

    entries = {"quantize_groups", "quantize_pieces", "dequantize_groups", "dequantize_pieces", "requantize_groups"}
    entries |= {"sum_shared_scale", "quantize_scaled", "requantize_sum"}
    assert {kernel for kernel, _ in LAUNCHES} == entries
    for module in (quantize, dequantize, shared_scale):
        for name, value in vars(module).items():
            if isinstance(value, triton.JITFunction) and name in entries:
                entries.remove(name)
    assert not entries


@triton.jit
def merging_mask(x, out, left, GROUP: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(out + at, tl.load(x + at, mask=at < left, other=0), mask=at * GROUP < left)


@triton.jit
def too_much(x, out, left, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < left, other=0) + 1, mask=at < left)


@pytest.mark.parametrize(
    ("kernel", "constants", "message"),
    [(merging_mask, {"GROUP": 32}, "out is read back"), (too_much, {"SIZE": 1 << 17}, "ub overflow")],
)
def test_what_is_wrong_is_found(kernel: triton.JITFunction, constants: dict[str, int], message: str) -> None:
    signature = (("x", "*fp32"), ("out", "*fp32"), ("left", "i32"))
    lowered = lowering.lower(lowering.Launch(kernel, signature, tuple(constants.items())), TARGETS[0])
    assert any(message in text for text in lowered.diagnostics), lowered


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


TABLE_MARK = "<!-- table: nox -s triton_ascend -- --ascend-table=docs/ascend-lowering.md -->"
