"""Every barrier, event, EnQue, DeQue and FreeTensor of the kernels is needed: without it a fault or a wrong result."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import kernels_on_twin as twin
import numpy as np
import pytest
from kernels_on_twin import DATA_PLACE, FLAGS, TYPES, Windows, on_ranks, struct
from mutants import Mutants

from alltoallv.testing import quantized as reference

Array = np.ndarray[Any, Any]
Scenario = Callable[[int], None]
# What depends on the order in which stores arrive is caught by some seeds; `nox -s ascendc` tries more.
SEEDS = int(os.environ.get("ALLTOALLV_ASCENDC_SEEDS", 4))


def quantizes(name: str, count: int, group: int, special: bool, bits: int = 8) -> Scenario:
    def run(seed: int) -> None:
        dtype, acl_type = TYPES[name]
        x = np.random.default_rng(seed).standard_normal(count).astype(dtype)
        if special:
            x[count // 2], x[count // 3], x[: group // 2] = np.inf, -np.inf, 1e-39
            x[-1] = np.nan
        codes = np.full(reference.code_bytes(count, group, bits), 0x9D, np.uint8)
        scales = np.full(-(-count // group), 7, np.float32)
        tiling = struct(("u8", [count, group]), ("u4", [acl_type, bits]))
        twin.run("alltoallv_quantize", 2, x, codes, scales, tiling, seed=seed)
        expected = reference.quantize(x, group, bits)
        assert (codes.tobytes(), scales.tobytes()) == (expected.codes.tobytes(), expected.scales.tobytes())

    return run


def sums(name: str, count: int, group: int, average: bool) -> Scenario:
    def run(seed: int) -> None:
        dtype, acl_type = TYPES[name]
        rng = np.random.default_rng(seed)
        sources = [reference.quantize(rng.standard_normal(count).astype(np.float32) * 1e5, group) for _ in range(3)]
        expected = reference.cast(reference.dequantize_sum(sources, average), dtype)
        codes, scales = (np.concatenate([getattr(s, part) for s in sources]) for part in ("codes", "scales"))
        y = np.full(count, 3, dtype)
        tiling = struct(("u8", [count, group]), ("u4", [3, acl_type, 1, average, 8, 0]))
        twin.run("alltoallv_dequantize_sum", 2, codes, scales, y, tiling, seed=seed)
        assert y.tobytes() == expected.tobytes()

    return run


def sums_with_one_scale(name: str, rows: int, channels: int, offset: float = 1.5) -> Scenario:
    def run(seed: int) -> None:
        dtype, acl_type = TYPES[name]
        rng = np.random.default_rng(seed)
        xs = [rng.integers(-128, 128, (rows, channels)).astype(np.int8) for _ in range(3)]
        scale = (rng.standard_normal(channels) * 1e3).astype(np.float32)
        offsets = np.array([offset], np.float32)
        expected = reference.shared_scale_all_reduce(xs, scale, offsets[0], dtype=name)[0]
        y = np.full(rows * channels, 3, dtype)
        tiling = struct(("u8", [y.size, channels]), ("u4", [3, acl_type, 0, 1]))
        x = np.concatenate([each.reshape(-1) for each in xs])
        twin.run("alltoallv_shared_scale_sum", 2, x, scale, offsets, y, tiling, seed=seed)
        assert y.tobytes() == expected.tobytes()

    return run


def moves_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, index = rng.integers(0, 255, (1300, 40)).astype(np.uint8), rng.permutation(1300).astype(np.int32)
    for name, expected in (("gather", x[index]), ("scatter", x[np.argsort(index)])):
        y = np.zeros_like(x)
        twin.run(f"alltoallv_{name}_rows", 1, x, index, y, struct(("u8", [1300, 40, 1300, 1300])), seed=seed)
        assert (y == expected).all()


def exchanges(sdispls: bool) -> Scenario:
    """Three calls of all_to_all_v of 2 ranks, the last of several rounds."""

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        windows = Windows(2, 1, DATA_PLACE + 4096, wait_us=3_000_000)
        for call in range(3):
            matrix = rng.integers(1, 9, (2, 2))
            xs = [rng.integers(0, 255, (20, [40, 8, 900][call])).astype(np.uint8) for _ in range(2)]
            ys = [np.zeros((20, xs[0].shape[1]), np.uint8) for _ in range(2)]
            counts, status = [np.zeros(2, np.int64) for _ in range(2)], np.full((2, 8), -1, np.int32)
            starts = np.array([[0, 9], [3, 1]], np.int64) if sdispls else None

            def one(r: int, call: Any = (call, matrix, xs, ys, counts, status, starts)) -> None:
                n, matrix, xs, ys, counts, status, starts = call
                own = struct(("u8", [xs[r].shape[1], 20, 20, starts is not None, 0]))
                given = None if starts is None else starts[r].copy()
                sends, tiling = matrix[r].astype(np.int64), np.concatenate([windows.tiling(r), own])
                arguments = xs[r], sends, given, ys[r], counts[r], status[r], tiling
                run_lane(windows, "alltoallv_all_to_all_v", *arguments, seed=seed * 7 + 3 * n + r, delay=(n + r) % 2)

            on_ranks([partial(one, r) for r in range(2)])
            assert (status[:, 0] == 0).all()
            for r in range(2):
                begins = [starts[j, r] if starts is not None else matrix[j, :r].sum() for j in range(2)]
                rows = [xs[j][begins[j] : begins[j] + matrix[j, r]] for j in range(2)]
                expected = np.concatenate(rows)
                assert (ys[r][: len(expected)] == expected).all()
                assert (counts[r] == matrix[:, r]).all()

    return run


def reduces(name: str | None) -> Scenario:
    """Two calls of the quantized all-reduce of 2 ranks, of several rounds."""

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        windows = Windows(2, 1, DATA_PLACE + (16 << 10), wait_us=3_000_000)
        for call in range(2):
            count, status = [700, 3000][call], np.full((2, 8), -1, np.int32)
            ys, scale, offset = [np.zeros(count, np.float32) for _ in range(2)], None, None
            if name is None:
                xs = [rng.integers(-128, 128, count).astype(np.int8) for _ in range(2)]
                scale, offset = np.array([0.37], np.float32), np.array([2.0], np.float32)
                result = reference.shared_scale_all_reduce(
                    [x.reshape(-1, 1) for x in xs], scale, offset[0], dtype="float32"
                )
                expected, fields = result[0].reshape(-1), [0, 0, 0, 1, 0, 8]
            else:
                xs = [rng.standard_normal(count).astype(TYPES[name][0]) for _ in range(2)]
                expected = reference.quantized_all_reduce(xs, group_size=100, dtype="float32")[0]
                fields = [TYPES[name][1], 0, 0, 1, 0, 8]
            own = struct(("u8", [count, 0 if name is None else 100, 1]), ("u4", fields))

            def one(r: int, call: Any = (call, xs, scale, offset, ys, status, own)) -> None:
                n, xs, scale, offset, ys, status, own = call
                arguments = xs[r], scale, offset, ys[r], status[r], np.concatenate([windows.tiling(r), own])
                run_lane(
                    windows, "alltoallv_quant_all_reduce", *arguments, seed=seed * 7 + 3 * n + r, delay=(n + r) % 2
                )

            on_ranks([partial(one, r) for r in range(2)])
            assert (status[:, 0] == 0).all()
            for y in ys:
                assert y.tobytes() == expected.tobytes()

    return run


def run_lane(windows: Windows, name: str, *arguments: Any, seed: int, delay: float) -> None:
    """Runs a rank's kernel; after a fault its peers are told, and need not wait for the end of their patience."""
    try:
        twin.run(name, 1, *arguments, seed=seed, mean_delay_us=delay)
    except twin.Fault:
        for window in windows.memory:
            window[FLAGS].view(np.int32)[1::8] = 1  # what a rank writes that has failed
        raise


ALONE: list[Scenario] = [
    *(quantizes(*each) for each in [
        ("float32", 1000, 100, False), ("float16", 600, 70, True), ("bfloat16", 200, 128, False),
        ("float32", 8000, 4000, False), ("float16", 8001, 3500, True), ("float32", 999, 77, False, 4),
    ]),
    *(sums(name, count, group, average) for name, count, group, average in [
        ("float32", 1000, 100, False), ("float16", 1000, 70, True), ("bfloat16", 8000, 4000, False),
    ]),
    sums_with_one_scale("float16", 100, 40), sums_with_one_scale("float32", 7000, 1),
    sums_with_one_scale("bfloat16", 3, 5000), sums_with_one_scale("float16", 100, 40, np.inf),
    moves_rows,
]  # fmt: skip
TOGETHER: list[Scenario] = [exchanges(False), exchanges(True), reduces("float32"), reduces(None)]


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    return Mutants(tmp_path_factory.mktemp("mutants"))


def caught(run: Scenario, seed: int) -> bool:
    try:
        run(seed)
    except (twin.Fault, AssertionError):
        return True
    return False


@pytest.mark.timeout(900)  # compiles all kernels
@pytest.mark.slow
def test_nothing_can_be_removed(mutants: Mutants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "LIBRARY", twin.declared(mutants.library))
    reached: list[set[int]] = []
    for run in (*ALONE, *TOGETHER):
        mutants.reached()
        run(0)
        reached.append(mutants.reached())
    never = set(range(len(mutants.sites))) - set().union(*reached)
    kept = []
    tried = [i for i, site in enumerate(mutants.sites) if i not in never]
    for i in tried:
        alone = [run for run, sites in zip(ALONE, reached, strict=False) if i in sites]
        together = [run for run, sites in zip(TOGETHER, reached[len(ALONE) :], strict=True) if i in sites]
        mutants.remove(i)
        seeds = range(1) if alone else range(SEEDS)
        if not any(caught(run, seed) for seed in seeds for run in alone or together):
            kept.append(str(mutants.sites[i]))
        mutants.remove(None)
    print(f"{len(tried)} of {len(mutants.sites)} statements removed in turn, {len(tried) - len(kept)} removals caught")
    assert not never, "\n".join(str(mutants.sites[i]) for i in sorted(never))
    assert not kept, "nobody misses\n" + "\n".join(kept)
