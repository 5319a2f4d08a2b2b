"""Random layouts, and a tensor's parts in them, written from the definition by slices of the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

import alltoallv.numpy as av

Array = npt.NDArray[Any]


def random_layout(rng: np.random.Generator, size: int, ndim: int, terms: str = "") -> tuple[Any, tuple[Any, ...]]:
    """Some of the ranks, in any order, in 1 to 3 dimensions; ``terms``: the reduction that one of them may have."""
    dims = [int(rng.integers(1, 4)) for _ in range(rng.integers(1, 4))]
    while math.prod(dims) > size:
        dims.pop()
    mesh = rng.permutation(size)[: math.prod(dims)].reshape(dims or [1])
    placements: list[Any] = [None if rng.random() < 0.3 else int(rng.integers(-ndim, ndim)) for _ in range(mesh.ndim)]
    if terms and rng.random() < 0.5:
        placements[rng.integers(len(placements))] = terms
    return mesh.tolist(), tuple(placements)


def part(layout: tuple[Any, Any], rank: int, whole: Array) -> tuple[Array, tuple[int, ...]] | None:
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
            length = whole.shape[placement]
            each = -(-length // number)
            begin, end = min(each * along, length), min(each * (along + 1), length)
            whole = np.take(whole, np.arange(begin, end), placement)
    return whole, tuple(terms)


def lacking(source: tuple[Any, Any], target: tuple[Any, Any], rank: int, shape: tuple[int, ...]) -> int:
    """How many elements of its part of the target a rank does not have in its part of the source."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted, has = part(target, rank, numbers), part(source, rank, numbers)
    if wanted is None or any(wanted[1]):
        return 0
    return len(np.setdiff1d(wanted[0], [] if has is None else has[0]))


def check_layouts(front_end: Any, tensor: Any, numpy: Any, comm: Any, group: Any, cases: int) -> None:
    """Random pairs of layouts give the slices of the whole; with a plan, in a state, and of the least bytes."""
    rng = np.random.default_rng(5)
    for case in range(cases):
        shape = tuple(int(n) for n in rng.integers(0, 9, rng.integers(1, 4)))
        whole = rng.integers(0, 100, shape).astype(("float32", "int8", "float16", "bool")[case % 4])
        source, target = (random_layout(rng, comm.size, len(shape)) for _ in range(2))
        x, wanted = (part(each, comm.rank, whole) for each in (source, target))
        given = None if x is None else tensor(np.ascontiguousarray(x[0]))
        about = f"case {case}: {shape} from {source} to {target}"
        if case % 2:
            found = front_end.reshard(given, source, target, group=group)
        elif case % 4:
            found = front_end.reshard(given, source, target, group=group, async_op=True).result()
        else:
            plan = front_end.ReshardPlan(shape, tensor(whole[:0]).dtype, source, target, group=group)
            begun = [plan(given, async_op=True) for _ in range(2)]
            found = plan(given)
            for each in begun:
                assert each.wait()
                assert (each.result() is None) == (found is None), about
                assert found is None or (numpy(each.result()) == numpy(found)).all(), about
            assert plan.elements_received == lacking(source, target, comm.rank, shape), about
        assert (found is None) == (wanted is None), about
        if found is not None and wanted is not None:
            assert numpy(found).dtype == whole.dtype
            np.testing.assert_array_equal(numpy(found), wanted[0], about)
    everybody = list(range(comm.size))
    terms = {"w": tensor(np.full((5, 2), comm.rank + 1, "float32")), "b": tensor(np.arange(3.0))}
    sources = {"w": (everybody, ["sum"]), "b": (everybody, [None])}
    total = front_end.reshard_state(terms, sources, (everybody, [0]), group=group, async_op=True).result()
    assert set(numpy(total["w"]).reshape(-1)) <= {sum(everybody) + comm.size}
    np.testing.assert_array_equal(numpy(total["b"]), part((everybody, (0,)), comm.rank, np.arange(3.0))[0])  # type: ignore[index]


def layout_of_all(rng: np.random.Generator, size: int, ndim: int, terms: str = "") -> tuple[Any, tuple[Any, ...]]:
    """A random layout of all ranks."""
    while math.prod(np.shape((layout := random_layout(rng, size, ndim, terms))[0])) != size:
        pass
    return layout


def check_gradients(
    front_end: Any, tensor: Any, numpy: Any, gradient: Any, twice: Any, comm: Any, group: Any, cases: int
) -> None:
    """Every resharding R is linear, and its gradient R': the sum of <w, R x> over all ranks is that of <R' w, x>.

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
