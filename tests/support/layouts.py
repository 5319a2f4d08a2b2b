"""Random layouts, and a tensor's parts in them, written from the definition by slices of the whole."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import alltoallv.numpy as av
from alltoallv import _core
from alltoallv._calls import resharding
from alltoallv.testing import quantized_formats
from alltoallv.testing.quantized_formats import FORMATS as FORMAT_ROWS

Array = npt.NDArray[Any]
Pair = tuple[Any, tuple[Any, ...]]
OPS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def random_layout(rng: np.random.Generator, size: int, ndim: int, terms: str = "") -> Pair:
    """Some of the ranks, in any order, in 1 to 3 dimensions; ``terms``: the reduction that one of them may have."""
    dims = [int(rng.integers(1, 4)) for _ in range(rng.integers(1, 4))]
    while math.prod(dims) > size:
        dims.pop()
    mesh = rng.permutation(size)[: math.prod(dims)].reshape(dims or [1])
    placements: list[Any] = [None if rng.random() < 0.3 else int(rng.integers(-ndim, ndim)) for _ in range(mesh.ndim)]
    strides = [int(rng.integers(2, 5)) if rng.random() < 0.25 else 0 for _ in placements]
    placements = [(each, n) if n and each is not None else each for each, n in zip(placements, strides, strict=True)]
    if terms and rng.random() < 0.5:
        placements[rng.integers(len(placements))] = terms
    return mesh.tolist(), tuple(placements)


def part(layout: Pair, rank: int, whole: Array) -> tuple[Array, tuple[int, ...]] | None:
    """A rank's part of the whole, and its coordinates along the dimensions that have terms; None if it has none."""
    mesh, placements = np.asarray(layout[0]), layout[1]
    found = np.argwhere(mesh == rank)
    if not len(found):
        return None
    terms = []
    for along, number, placement in zip(found[0], mesh.shape, placements, strict=True):
        if isinstance(placement, str):
            terms.append(int(along))
        elif placement is not None:
            dim, pieces = placement if isinstance(placement, tuple) else (placement, 1)
            rows = np.arange(whole.shape[dim])
            own = [_nth(piece, number, int(along)) for piece in (_nth(rows, pieces, i) for i in range(pieces))]
            whole = np.take(whole, np.concatenate(own), dim)
    return whole, tuple(terms)


def _nth(rows: Array, number: int, i: int) -> Array:
    """The i-th of ``number`` parts, the last of them smaller or empty."""
    each = -(-len(rows) // number)
    return rows[each * i : each * (i + 1)]


def lacking(source: Pair, target: Pair, rank: int, shape: tuple[int, ...]) -> int:
    """How many elements of its part of the target a rank does not have in its part of the source."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted, has = part(target, rank, numbers), part(source, rank, numbers)
    if wanted is None or any(wanted[1]):
        return 0
    return len(np.setdiff1d(wanted[0], [] if has is None else has[0]))


def has_terms(layout: Pair) -> bool:
    return any(isinstance(each, str) for each in layout[1])


def reduced(source: Pair, whole: Array, op: str) -> Array:
    """The reduction, in the order of the mesh, of terms that are the whole and the rank's coordinates along them."""
    numbers = [n for n, placement in zip(np.shape(source[0]), source[1], strict=True) if isinstance(placement, str)]
    if not numbers:
        return whole
    wide = np.dtype("float32") if whole.dtype == np.float16 else whole.dtype
    terms = [(whole + sum(place)).astype(whole.dtype).astype(wide) for place in np.ndindex(*numbers)]
    total = functools.reduce(OPS[op], terms)
    return (total / wide.type(len(terms)) if op == "avg" else total).astype(whole.dtype)


def check_layouts(
    front_end: Any,
    tensor: Any,
    numpy: Any,
    comm: Any,
    group: Any,
    cases: int,
    worded: Callable[[Pair, int], Any] = lambda layout, ndim: layout,
) -> None:
    """Random pairs of layouts have the slices of the whole, bit for bit, and move no byte more than ranks lack.

    With a plan and without, at once and with handles. ``worded`` says a layout, on a tensor of so many dimensions, in a
    framework's own words.
    """
    rng = np.random.default_rng(5)
    told, counted = [], np.zeros(2, np.int64)
    for case in range(cases):
        op = str(rng.choice(list(OPS))) if case % 3 == 2 else ""
        shape = tuple(int(n) for n in rng.integers(1 if op else 0, 9, rng.integers(1, 4)))
        dtype = np.dtype(
            rng.choice(["float16", "float32", "float64"] if op else ["float32", "int8", "float16", "bool"])
        )
        whole = (rng.normal(size=shape) if op else rng.integers(0, 100, shape)).astype(dtype)
        source, target = (random_layout(rng, comm.size, len(shape), terms) for terms in (op, op and "sum"))
        about = f"case {case}: {op} of {shape} {dtype} from {source} to {target}"
        x, wanted = part(source, comm.rank, whole), part(target, comm.rank, reduced(source, whole, op))
        given = None if x is None else tensor(np.ascontiguousarray((x[0] + sum(x[1])).astype(dtype)))
        layouts = [worded(each, len(shape)) for each in (source, target)]
        plan = front_end.ReshardPlan(shape, tensor(whole[:0]).dtype, *layouts, group=group)
        before = _moved_bytes(comm)
        if case % 4 < 2:
            found = plan(given)
        elif case % 4 == 2:
            found = front_end.reshard(given, *layouts, shape=shape if op else None, group=group, async_op=case % 8 == 2)
            found = found.result() if case % 8 == 2 else found
        else:
            begun = [plan(given, async_op=True) for _ in range(2)]
            assert begun[1].wait() in (True, None)
            found = begun[0].result()
            assert (begun[1].result() is None) == (found is None), about
            assert found is None or (numpy(begun[1].result()) == numpy(found)).all(), about
        told.append((plan.elements_sent, plan.elements_received))
        if case % 4 < 2:
            counted += np.array([_moved_bytes(comm) - before, plan.elements_sent * dtype.itemsize])
        else:
            out = None if found is None else tensor(np.ones(tuple(found.shape), dtype))
            again = plan(given, out)
            assert again is out, about
            assert found is None or (numpy(again) == numpy(found)).all(), about
        if not has_terms(source):
            assert plan.elements_received == lacking(source, target, comm.rank, shape), about
        elif _plain(source, len(shape)) == _plain(target, len(shape)):
            continue  # every rank keeps its term
        assert (found is None) == (wanted is None), about
        if found is not None and wanted is not None:
            assert numpy(found).dtype == dtype, about
            assert tuple(found.shape) == wanted[0].shape == plan.target_shape, about
            np.testing.assert_array_equal(
                numpy(found), np.zeros_like(wanted[0]) if any(wanted[1]) else wanted[0], about
            )
    totals = av.all_reduce(np.array(told), group=comm)
    np.testing.assert_array_equal(totals[:, 0], totals[:, 1])
    bytes_moved, bytes_planned = av.all_reduce(counted, group=comm)
    assert bytes_moved == bytes_planned or comm.backend != "shm"  # a connection's are not counted


def _moved_bytes(comm: Any) -> int:
    """What this rank has copied for others, or from them."""
    return sum(n for name, n in comm.stats().items() if name.startswith("bytes_") and name != "bytes_self")


def _plain(layout: Pair, ndim: int) -> Any:
    """The layout with dimensions from 0 on."""

    def named(placement: Any) -> Any:
        if isinstance(placement, tuple):
            return placement[0] % ndim, placement[1]
        return placement % ndim if isinstance(placement, int) else placement

    return layout[0], [named(each) for each in layout[1]]


def check_states(front_end: Any, tensor: Any, numpy: Any, comm: Any, group: Any) -> None:
    """A whole state with a handle, one of its tensors of terms; and a number, as optimizers have."""
    everybody = list(range(comm.size))
    for options in ({}, {"format": "int8"}):
        step = tensor(np.array(7, "float32")) if comm.rank == 1 else None
        steps = front_end.reshard(step, ([1], [None]), (everybody, [None]), group=group, **options)
        assert tuple(steps.shape) == ()
        assert float(numpy(steps)) == 7
    terms = {"w": tensor(np.full((5, 2), comm.rank + 1, "float32")), "b": tensor(np.arange(3.0))}
    sources = {"w": (everybody, ["sum"]), "b": (everybody, [None])}
    total = front_end.reshard_state(terms, sources, (everybody, [0]), group=group, async_op=True).result()
    assert set(numpy(total["w"]).reshape(-1)) <= {sum(everybody) + comm.size}
    np.testing.assert_array_equal(numpy(total["b"]), part((everybody, (0,)), comm.rank, np.arange(3.0))[0])  # type: ignore[index]


def check_pieces(
    front_end: Any, tools: Any, tensor: Any, numpy: Any, comm: Any, group: Any, formats: Any, **options: Any
) -> None:
    """A large tensor moves in pieces: what is packed at a time is one piece on each side, and the bits are the same.

    ``tools``: the class that makes what is packed.
    """
    most, live, peaks, unpatched = 4096, [0], [0], tools.buffer

    def buffer(self: Any, count: int, dtype: str) -> Any:
        made = unpatched(self, count, dtype)
        live[0] += made.nbytes
        peaks[0] = max(peaks[0], live[0])
        weakref.finalize(made, lambda nbytes=made.nbytes: live.__setitem__(0, live[0] - nbytes))
        return made

    everybody, half = list(range(comm.size)), comm.size // 2
    grid = np.arange(comm.size).reshape(2, half).tolist()
    layouts: list[tuple[Pair, Pair]] = [
        ((everybody, (0,)), (everybody, (1,))),
        ((grid, ((1, 4), 0)), (grid, (None, (0, 3)))),
        ((everybody, ("sum",)), (everybody, (0,))),
        ((grid, ((0, 2), "sum")), (everybody, (1,))),
    ]
    rng = np.random.default_rng(9)
    whole = rng.normal(size=(448, 64)).astype("float32")  # 112 KiB; groups of elements cross its rows
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, resharding, "TOGETHER", resharding.TOGETHER)
        stack.callback(setattr, tools, "buffer", unpatched)
        tools.buffer = buffer
        for (source, target), format in itertools.product(layouts, formats):
            if format and has_terms(source):
                continue
            x = part(source, comm.rank, whole)
            assert x is not None
            given, found = tensor(np.ascontiguousarray(x[0] * (sum(x[1]) + 1))), []
            for limit in (1 << 30, most):
                resharding.TOGETHER = limit
                peaks[0] = 0
                plan = front_end.ReshardPlan(
                    whole.shape, given.dtype, source, target, format=format, group=group, **options
                )
                found += [plan(given), plan(given), plan(given, async_op=True).result()]
            for each in found:
                assert numpy(each).tobytes() == numpy(found[0]).tobytes(), f"{format} from {source} to {target}"
            peaks[0] = 0
            plan(given)
            assert peaks[0] <= 2.2 * most, f"{peaks[0]} bytes for {format} from {source} to {target}"


FORMATS = "int8", "int4", "fp8_e4m3", "mxfp8", "nvfp4"


def check_formats(front_end: Any, tensor: Any, numpy: Any, comm: Any, group: Any, cases: int) -> None:
    """Pieces travel as the reference's codes, and the bytes are theirs; every copy of an element is the same."""
    rng = np.random.default_rng(8)
    counted = np.zeros(2, np.int64)
    for case in range(cases):
        name, dtype = str(rng.choice(FORMATS)), np.dtype(rng.choice(["float32", "float16"]))
        group_size = None if FORMAT_ROWS[name].group_size or case % 2 else 16
        shape = tuple(int(n) for n in rng.integers(1, 20, rng.integers(1, 4)))
        whole = rng.normal(size=shape).astype(dtype)
        drawn = [random_layout(rng, comm.size, len(shape)) for _ in range(2)]
        source, target = ((mesh, [n[0] if isinstance(n, tuple) else n for n in placed]) for mesh, placed in drawn)
        about = f"case {case}: {name} {group_size} of {shape} {dtype} from {source} to {target}"
        values, records = rounded(source, target, comm.size, whole, name, group_size)
        record_bytes = sum(_core.quantized_row_bytes(*record) for lacks, *record in records if comm.rank in lacks)
        x, wanted = part(source, comm.rank, whole), part(target, comm.rank, values)
        given = None if x is None else tensor(np.ascontiguousarray(x[0]))
        form = {"format": name, "group_size": group_size, "group": group}
        plan = front_end.ReshardPlan(shape, tensor(whole[:0]).dtype, source, target, **form)
        before = _moved_bytes(comm)
        found = plan(given)
        counted += np.array([_moved_bytes(comm) - before, plan.bytes_sent])
        assert plan.bytes_received == record_bytes, about
        if case % 2:
            found = front_end.reshard(given, source, target, async_op=True, **form).result()
        assert (found is None) == (wanted is None), about
        if found is not None and wanted is not None:
            np.testing.assert_array_equal(numpy(found), wanted[0], about)
            if name == "int8":
                exact = part(target, comm.rank, whole)
                assert exact is not None
                assert abs(numpy(found) - exact[0]).max(initial=0) <= abs(whole).max() * (1 / 254 + 2**-10), about
    moved, planned = av.all_reduce(counted, group=comm)
    assert moved == planned


def rounded(
    source: Pair, target: Pair, size: int, whole: Array, name: str, group_size: int | None
) -> tuple[Array, list[tuple[Any, ...]]]:
    """The values after pieces have traveled, and for each its receivers, length, format and group size."""
    values, records = whole.copy(), []
    for each, lacks in pieces(source, target, size, whole.shape):
        if lacks:
            codes = quantized_formats.quantize(whole.flat[each], group_size, format=name)
            values.flat[each] = quantized_formats.dequantize(codes, whole.dtype)
            records.append((lacks, len(each), name, codes.group_size))
    return values, records


def pieces(source: Pair, target: Pair, size: int, shape: tuple[int, ...]) -> list[tuple[Array, list[int]]]:
    """What of a tensor is in one part of the source and one of the target, and the ranks that lack it."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts: list[dict[bytes, tuple[Array, list[int]]]] = [{}, {}]
    for layout, found in zip((source, target), parts, strict=True):
        for rank in range(size):
            own = part(layout, rank, numbers)
            if own is not None:
                found.setdefault(own[0].tobytes(), (own[0], []))[1].append(rank)
    return [
        (both, [rank for rank in wanting if rank not in holding])
        for has, holding in parts[0].values()
        for wants, wanting in parts[1].values()
        if len(both := np.intersect1d(has, wants))
    ]


def layout_of_all(rng: np.random.Generator, size: int, ndim: int, terms: str = "") -> tuple[Any, tuple[Any, ...]]:
    """A random layout of all ranks."""
    while math.prod(np.shape((layout := random_layout(rng, size, ndim, terms))[0])) != size:
        pass
    return layout


def check_gradients(
    front_end: Any,
    tensor: Any,
    numpy: Any,
    gradient: Any,
    twice: Any,
    comm: Any,
    group: Any,
    cases: int,
    least: int = 0,
) -> None:
    """Every resharding R is linear, and its gradient R': the sum of <w, R x> over all ranks is that of <R' w, x>.

    Parts have at least ``least`` elements.
    ``gradient(loss, x)`` and ``twice(loss, x, v)``, the gradient of <gradient(loss, x), v>, return arrays.
    """
    rng = np.random.default_rng(7)
    for case in range(cases):
        shape = tuple(int(n) for n in rng.integers(1, 7, rng.integers(1, 4)))
        op = ("", "sum", "avg")[case % 3]
        source, target = layout_of_all(rng, comm.size, len(shape), op), layout_of_all(rng, comm.size, len(shape))
        about = f"case {case}: {shape} from {source} to {target}"
        whole = np.zeros(shape, "float32")
        x_of, y_of = ([part(each, r, whole)[0].shape for r in range(comm.size)] for each in (source, target))  # type: ignore[index]
        if min(map(math.prod, [*x_of, *y_of])) < least:
            continue
        # Copies differ, so that the gradient goes to the one that is read. Every number is exact.
        draws = [[rng.integers(-4, 5, each).astype("float32") * 60 for each in x_of] for _ in range(3)]
        x, other, v = (each[comm.rank] for each in draws)
        w = [rng.integers(-4, 5, each).astype("float32") for each in y_of][comm.rank]

        def move(z: Any, source: Any = source, target: Any = target) -> Any:
            return front_end.reshard(z, source, target, group=group)

        y, at_other, at_v = (numpy(move(tensor(each))) for each in (x, other, v))
        slopes = tensor(w)
        first = gradient(lambda z, slopes=slopes, move=move: (move(z) * slopes).sum(), tensor(x))
        second = twice(lambda z, move=move: (move(z) * move(z)).sum() * 0.5, tensor(x), tensor(v))
        sums = [(w * y, first * x), (w * at_other, first * other), (at_v * at_other, second * other)]
        mine = np.array([[each.sum(dtype="float64") for each in pair] for pair in sums])
        total = np.sum(av.all_gather_object(mine, group=comm), axis=0)
        np.testing.assert_array_equal(total[:, 0], total[:, 1], about)
