"""No element is further from the exact result than `bound=True` tells, on every path; `max_error` chooses a format."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import mostly_slow, on_both
from quantized_cases import DTYPES, F32, Array, normal
from trouble import join

from alltoallv import Communicator, _core
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.quantization.spec import Quantization, worst_error
from alltoallv.testing import Ranks, run_ranks
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal
from alltoallv.testing.quantized import code_errors, scale_errors, turned_errors
from alltoallv.testing.quantized_formats import FORMATS
from alltoallv_tools.ports import free_port

# The table of formats is one for all ways, and its kernels are tested each: between ranks one of a kind is enough.
BETWEEN_RANKS = mostly_slow(
    FORMATS,
    ("int8", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "int4_rotated", "int4_spikes", "int5_rotated_spikes", "mxfp6_e2m3"),
)
ROTATED = {name for name, form in FORMATS.items() if form.rotated}
UNSHAPED = [name for name, form in FORMATS.items() if not form.shaped]
KINDS = [(gather, op) for gather in ("full", "quantized") for op in ("sum", "avg")]


def any_values(rng: np.random.Generator, count: int) -> Array:
    """Numbers of all magnitudes, ties, zeros, subnormals; now and then inf and NaN."""
    x = (rng.normal(size=count) * np.exp(2 * rng.normal(size=count))).astype(F32)
    x[::7] = rng.integers(-64, 64, x[::7].size) / F32(32)
    x[3::31] = rng.integers(0, 1 << 32, x[3::31].size, np.uint32).view(F32)
    x[5:40] = 0
    x[40:80] *= F32(1e-38)
    with np.errstate(over="ignore"):
        x[80:120] *= F32(1e37)
    return x


def error_of(result: Array, exact: Array) -> Array:
    """What the bound is of: 0 where both are the same inf or NaN."""
    with np.errstate(invalid="ignore"):
        error = np.abs(result.astype(np.float64) - exact)
    same = (np.isnan(result) & np.isnan(exact)) | (result.astype(np.float64) == exact)
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


def by_group(error: Array, group_size: int) -> Array:
    """The largest error of every group."""
    flat = error.reshape(-1)
    return np.maximum.reduceat(flat, np.arange(0, flat.size, min(group_size, flat.size)))


def exact_sum(inputs: list[Array], op: str) -> Array:
    with np.errstate(invalid="ignore"):
        total = np.sum([x.astype(np.float64) for x in inputs], axis=0)
    return total / len(inputs) if op == "avg" else total


@pytest.mark.parametrize("name", FORMATS)
def test_one_table(name: str) -> None:
    for ranks in (1, 2, 8, 1000):
        assert_bits_equal(np.array(_core.code_errors(name, ranks), F32), code_errors(name, ranks), name)
        if FORMATS[name].is_integer:
            assert_bits_equal(np.array(_core.turned_errors(name, ranks), F32), turned_errors(name, ranks), name)
    bytes_known = FORMATS[name].scale != "float32"
    assert_bits_equal(np.array(_core.scale_errors(name), F32), scale_errors(name) if bytes_known else np.empty(0, F32))


class Sum(NamedTuple):
    """A quantized all-reduce of these inputs, what it gives each rank by the reference, and the exact result."""

    at: str
    inputs: list[Array]
    terms: dict[str, Any]
    out_dtype: str
    wanted: list[Array]
    bounds: list[Array]
    exact: Array


def sums(size: int, name: str) -> list[Sum]:
    """Of all kinds; made once for all ranks: the reference takes its time."""
    rng, made = np.random.default_rng(3), []
    group = FORMATS[name].group_size or 96
    for n, out_dtype in ((0, "float32"), (1, "float16"), (701, "bfloat16"), (5000, "float16"), (60_001, "float32")):
        inputs = [any_values(rng, n) for _ in range(size)]
        # What a long one adds, lying in the arena, two of the kinds show.
        kinds = list(itertools.product(KINDS, ("saturate", "infinity")))[:: 7 if n > 5000 else 1]
        for (gather, op), overflow in kinds:
            terms = {"format": name, "group_size": group, "gather": gather, "op": op, "overflow": overflow}
            found: list[Array] = []
            wanted = reference.quantized_all_reduce(inputs, dtype=DTYPES[out_dtype], bounds=found, **terms)
            at = f"{n} elements, {out_dtype}, {gather}, {op}, {overflow}"
            made.append(Sum(at, inputs, terms, out_dtype, [*wanted], found, exact_sum(inputs, op)))
    return made


def all_reduces(communicator: Communicator, name: str, made: list[Sum]) -> None:
    r = communicator.rank
    for at, inputs, terms, out_dtype, wanted, bounds, exact in made:
        output, bound, taken = av.quantized_all_reduce(
            inputs[r], bound=True, out_dtype=out_dtype, group=communicator, **terms
        )
        assert_bits_equal(output, wanted[r], at)
        assert_bits_equal(bound, bounds[r], at)
        assert taken == name
        if exact.size:
            exceeded = by_group(error_of(output, exact), terms["group_size"]) > bound
            assert not exceeded.any(), f"{at}: {np.flatnonzero(exceeded)}"


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_all_reduce(ranks: Ranks, name: str) -> None:
    """Small, from the mailboxes, and in two shots; on threads also long results that lie in the arena."""
    for size in (1, 3):
        made = sums(size, name)
        for threads in (False, True):
            ranks(size, threads=threads)(all_reduces, name, made)


@pytest.mark.parametrize("size", [2, 3])
def test_between_hosts(size: int) -> None:
    """In one shot and in two, where a part travels in several pieces."""
    port, made = free_port(), sums(size, "mxfp4")

    def check(communicator: Communicator) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with join(communicator.rank, size, backend="tcp") as apart:
            all_reduces(apart, "mxfp4", made)
            rng = np.random.default_rng(9)
            inputs = [rng.normal(size=size * (1 << 18) + 77).astype(F32) for _ in range(size)]
            for name, more in (("int8", {"gather": "quantized"}), ("fp8_e5m2", {"out_dtype": "float16"})):
                x, how = inputs[apart.rank], {"format": name, "bound": True, **more}
                near, far = (av.quantized_all_reduce(x, group=at, **how) for at in (communicator, apart))
                assert_bits_equal(far.bound, near.bound, f"{name} {more}")
                assert (by_group(error_of(far.output, exact_sum(inputs, "sum")), 128) <= far.bound).all()
                counts = [x.size - 5 * (size - 1), *[5] * (size - 1)]
                how = {"format": name, "bound": True}
                near, far = (av.quantized_reduce_scatter(x, counts, group=at, **how) for at in (communicator, apart))
                assert_bits_equal(far.bound, near.bound, f"a part, {name}")

    run_ranks(size, check)


def test_groups_that_are_cut() -> None:
    """Longer than a piece, and one that is everything; with feedback of both quantizations."""

    def check(communicator: Communicator) -> None:
        r, size = communicator.rank, communicator.size
        for n, group_size, name in (
            (400_001, 200_000, "int8"),
            (300_000, 1 << 40, "fp8_e4m3"),
            (70_000, 16385, "int4"),
        ):
            inputs = normal(np.random.default_rng(n), size, n)
            for gather in ("full", "quantized"):
                errors = [np.zeros(n, F32) for _ in inputs]
                gather_error = np.zeros(n, F32) if gather == "quantized" else None
                state = av.ErrorFeedback()
                how: dict[str, Any] = {"format": name, "group_size": min(group_size, n), "gather": gather}
                for _ in range(2):
                    exact = np.sum([x.astype(np.float64) + e for x, e in zip(inputs, errors, strict=True)], axis=0)
                    if gather_error is not None:
                        exact += gather_error
                    found: list[Array] = []
                    reference.quantized_all_reduce(
                        inputs, errors=errors, gather_error=gather_error, bounds=found, **how
                    )
                    told = av.quantized_all_reduce(
                        inputs[r],
                        bound=True,
                        error_feedback=state,
                        group=communicator,
                        **how | {"group_size": group_size},
                    )
                    assert_bits_equal(told.bound, found[r], f"{n} {name} {gather}")
                    assert (by_group(error_of(told.output, exact), group_size) <= told.bound).all()

    run_ranks(3, check, threads=True)


class Parts(NamedTuple):
    """What ranks give to a reduce-scatter or an all-to-all, in what counts, and what the reference gives each."""

    inputs: list[Array]
    counts: Any
    wanted: list[Array]
    bounds: list[Array]


def parts_and_rows(size: int, name: str) -> tuple[list[Parts], Parts]:
    """Made once for all ranks."""
    rng, parts = np.random.default_rng(7), []
    group = FORMATS[name].group_size or 48
    for rows in (40, 5000):
        inputs = [any_values(rng, 50 * rows * size).reshape(-1, 50) for _ in range(size)]
        counts = [rows * size - 3 * (size - 1), *[3] * (size - 1)]
        found: list[Array] = []
        wanted = reference.quantized_reduce_scatter(inputs, counts, format=name, group_size=group, bounds=found)
        parts.append(Parts(inputs, counts, [*wanted], found))
    sends = rng.integers(0, 9, (size, size))
    tables = [x[: sum(sends[j])] for j, x in enumerate(inputs)]
    found = []
    arrived = reference.quantized_all_to_all(tables, sends.tolist(), format=name, dtype="float16", bounds=found)
    return parts, Parts(tables, sends, [*arrived], found)


def scattered_and_rows(communicator: Communicator, name: str, parts: list[Parts], rows: Parts) -> None:
    r, group = communicator.rank, FORMATS[name].group_size or 48
    for inputs, counts, wanted, bounds in parts:
        part = av.quantized_reduce_scatter(
            inputs[r], counts, format=name, group_size=group, bound=True, group=communicator
        )
        assert_bits_equal(part.output, wanted[r], name)
        assert_bits_equal(part.bound, bounds[r], name)
    tables, sends, arrived, bounds = rows
    how: dict[str, Any] = {"format": name, "out_dtype": "float16", "group": communicator, "bound": r != 1}
    for recvs in (None, sends[:, r]):
        for async_op in (False, True):
            told: Any = av.quantized_all_to_all(tables[r], sends[r], recvs, async_op=async_op, **how)
            told = told[1].result() if async_op else told
            assert_bits_equal(told.output if r != 1 else told, arrived[r], name)
            if r != 1:  # a rank asks for itself
                assert_bits_equal(told.bound, bounds[r], name)


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_scatter_and_rows(ranks: Ranks, name: str) -> None:
    parts, rows = parts_and_rows(3, name)
    for threads in (False, True):
        ranks(3, threads=threads)(scattered_and_rows, name, parts, rows)


@on_both(2)
def test_with_a_handle_and_an_output(communicator: Communicator) -> None:
    x = np.arange(1000, dtype=F32)
    out = np.empty_like(x)
    told, work = av.quantized_all_reduce(x, out=out, bound=True, async_op=True, group=communicator)
    work.wait()
    assert told.output is out
    assert_bits_equal(told.bound, av.quantized_all_reduce(x, bound=True, group=communicator).bound)
    assert work.result() is told or work.result().bound is told.bound


@on_both(2)
def test_ranks_that_differ(communicator: Communicator) -> None:
    x, bound = np.ones(300, F32), communicator.rank == 1
    with pytest.raises(
        PeerMismatchError, match=r"rank 0 has no bound, rank 1 has a bound|rank 1 has a bound, rank 0.*A2A-3009"
    ):
        av.quantized_all_reduce(x, bound=bound, group=communicator, timeout=30)
    with pytest.raises(PeerMismatchError, match=r"rank 0 has max_error 0.5, rank 1 has max_error 0.25.*A2A-3020"):
        av.quantized_all_reduce(x, max_error=0.25 if bound else 0.5, group=communicator)
    assert av.quantized_all_reduce(x, bound=True, group=communicator).bound.shape == (3,)


def test_refusals() -> None:
    def check(communicator: Communicator) -> None:
        def refused(text: str, **how: Any) -> None:
            with pytest.raises(InvalidParamError, match=text):
                av.quantized_all_reduce(np.ones(5, how.pop("dtype", F32)), group=communicator, **how)

        refused("bound is given with a shared scale, expected the dynamic", scale=0.5, dtype=np.int8, bound=True)
        refused("bound is given with a shared", comm_quant_scale_1=0.5, comm_quant_scale_2=0.5, bound=True)
        feedback: Any = {"error_feedback": av.ErrorFeedback(), "gather": "quantized", "format": "nvfp4"}
        refused("bound is given with error feedback of the second quantization in format nvfp4", bound=True, **feedback)
        refused("max_error is given with error_feedback", max_error=1.0, error_feedback=av.ErrorFeedback())
        refused("max_error is given and format is 'mxfp8', expected one", max_error=1.0, format="mxfp8")
        refused("max_error is given and bits is 4, expected one", max_error=1.0, bits=4)
        refused("max_error is given with a shared scale", max_error=1.0, scale=0.5, dtype=np.int8)
        for wrong in (0.0, -1.0, float("nan"), float("inf"), "1", True):
            refused("max_error is .*, expected a number", max_error=wrong)

    run_ranks(2, check, threads=True)


def test_max_error() -> None:
    """Of ever smaller errors: ever more bytes, each bound kept; then the best there is, in the error."""

    def check(communicator: Communicator) -> None:
        r, size = communicator.rank, communicator.size
        inputs = normal(np.random.default_rng(5), size, 4000)
        for how in ({}, {"gather": "quantized"}, {"op": "avg", "out_dtype": "float16"}, {"group_size": 32}):
            found: dict[str, float] = {}
            for max_error in 2.0 ** np.arange(8.0, -20.0, -0.25):
                try:
                    told = av.quantized_all_reduce(inputs[r], max_error=max_error, group=communicator, **how)
                except InvalidParamError as error:
                    assert "but the best bound of a format is" in str(error)  # noqa: PT017
                    break
                assert told.bound.max() <= max_error
                found.setdefault(told.format, max_error)
                same = av.quantized_all_reduce(inputs[r], format=told.format, bound=True, group=communicator, **how)
                assert_bits_equal(told.output, same.output)
            else:
                pytest.fail("every error was kept")
            width = [Quantization.checked(name, how.get("group_size")).code_bytes(4000) for name in found]
            assert width == sorted(width)
            assert len(set(width)) > 4
        scattered = av.quantized_reduce_scatter(inputs[r], max_error=0.5, group=communicator)
        assert scattered.bound.max() <= 0.5
        rows = inputs[r].reshape(40, 100)
        told = av.quantized_all_to_all(rows, [40 // size] * size, max_error=0.5, group=communicator)
        assert told.bound.max() <= 0.5
        assert told.bound.shape[0] == 40
        inputs[1][7] = np.nan
        with pytest.raises(InvalidParamError, match=r"the input of rank 1 holds inf or NaN.*A2A-1176"):
            av.quantized_all_reduce(inputs[r], max_error=10.0, group=communicator)

    run_ranks(2, check, threads=True)


@settings(max_examples=80)
@given(
    name=st.sampled_from(UNSHAPED),
    size=st.integers(1, 8),
    kind=st.sampled_from(KINDS),
    out_dtype=st.sampled_from(sorted(DTYPES)),
    power=st.integers(-126, 120),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_bound_is_above_the_worst(
    name: str, size: int, kind: tuple[Any, Any], out_dtype: str, power: int, seed: int
) -> None:
    """What a format is chosen by, before anything is encoded."""
    rng = np.random.default_rng(seed)
    group = FORMATS[name].group_size or 40
    inputs = [np.ldexp(rng.uniform(-1, 1, 320) * 4.0 ** -rng.integers(0, 9), power).astype(F32) for _ in range(size)]
    found: list[Array] = []
    gather, op = kind
    reference.quantized_all_reduce(
        inputs, format=name, group_size=group, gather=gather, op=op, dtype=DTYPES[out_dtype], bounds=found
    )
    how = Quantization.checked(name, group, gather, op)
    assert found[0].max() <= worst_error(how, [float(np.abs(x).max()) for x in inputs], out_dtype)


def vectors(rng: np.random.Generator, count: int, length: int) -> Iterator[tuple[str, Array]]:
    """Of several distributions, ``[count, length]``."""
    x = rng.normal(size=(count, length)).astype(F32)
    yield "normal", x
    spread = rng.integers(-90, 90, (count, 1)) + rng.integers(-20, 20, (count, length))
    yield "of all sizes", np.ldexp(x, spread.astype(np.int32))
    yield "of all bits", rng.integers(0, 1 << 32, (count, length), np.uint32).view(F32)
    yield "ties", np.ldexp(rng.integers(-255, 256, (count, length)).astype(F32), rng.integers(-3, 3, (count, 1)))


def check_vectors(communicator: Communicator, total: int, at_once: int) -> None:
    r, size = communicator.rank, communicator.size
    length, seen, largest, told = 32, 0, dict.fromkeys(FORMATS, 0.0), dict.fromkeys(FORMATS, 0.0)
    rng, step = np.random.default_rng(size), 0
    while seen < total:
        made = [list(vectors(rng, at_once, length)) for _ in range(size)]
        for i, (kind, _) in enumerate(made[0]):
            inputs = [one[i][1] for one in made]
            if kind == "ties":
                inputs[-1] = -inputs[0]  # the sum of these two is 0
            name, (gather, op) = list(FORMATS)[step % len(FORMATS)], KINDS[step // len(FORMATS) % len(KINDS)]
            step += 1
            group = FORMATS[name].group_size or length
            result = av.quantized_all_reduce(
                inputs[r], format=name, group_size=group, gather=gather, op=op, bound=True, group=communicator
            )
            exact = exact_sum(inputs, op)
            error = by_group(error_of(result.output, exact), group)
            assert (error <= result.bound).all(), f"{kind}, {name}, {gather}, {op}"
            if kind == "normal" and gather == "full" and op == "sum":
                largest[name] = max(largest[name], error.max())
                told[name] = max(told[name], result.bound.max())
            seen += at_once
    for name, error in largest.items():  # a rotated group's bound is of its worst codes, which are rare
        limit = 4 if name not in ROTATED else 4 * length**0.5
        assert told[name] <= limit * error or not error, f"{name}: a bound of {told[name]}, errors up to {error}"


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_vectors(size: int) -> None:
    run_ranks(size, check_vectors, 256 * 4 * len(FORMATS) * len(KINDS), 256, threads=True)


@pytest.mark.slow
def test_a_million_vectors() -> None:
    run_ranks(4, check_vectors, 1_000_000, 2048, threads=True)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ROTATED])
def test_bounds_are_near(name: str, size: int) -> None:
    """At most 4 times the largest error of N(0, 1), also after the second quantization."""
    rng = np.random.default_rng(size)
    inputs = [rng.normal(size=1 << 14).astype(F32) for _ in range(size)]
    for gather, op in KINDS:
        found: list[Array] = []
        result = reference.quantized_all_reduce(inputs, format=name, gather=gather, op=op, bounds=found)[0]
        largest = error_of(result, exact_sum(inputs, op)).max()
        assert largest <= found[0].max()
        if size > 1 or gather == "full":  # one rank's codes stay as they are when they become codes again
            assert found[0].max() <= 4 * largest, f"{gather} {op}"
