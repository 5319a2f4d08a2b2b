"""Random exchanges of one dimension for another, and checks of them that are the same in every front end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import reference

Array = npt.NDArray[Any]


class Case(NamedTuple):
    """All ranks' inputs, and how they are called."""

    inputs: list[Array]
    scatter: int
    gather: int
    scatter_sizes: list[int] | None
    gather_sizes: list[int] | None

    def wanted(self) -> list[Array]:
        return reference.all_to_all_nd(self.inputs, self.scatter, self.gather, self.scatter_sizes)

    def sizes(self) -> dict[str, Any]:
        return {"scatter_sizes": self.scatter_sizes, "gather_sizes": self.gather_sizes}


def random_case(rng: np.random.Generator, size: int, dtype: Any = "float32", longest: int = 6) -> Case:
    dims = int(rng.integers(2, 5))
    scatter, gather = (int(each) for each in rng.permutation(dims)[:2])
    shape = [int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, longest, dims)]
    uneven = rng.random() < 0.5
    gathered = [int(n) for n in rng.integers(0, longest, size)] if uneven else [shape[gather]] * size
    divided = [int(n) for n in rng.multinomial(shape[scatter], np.ones(size) / size)] if rng.random() < 0.5 else None
    inputs = []
    for rank in range(size):
        shape[gather] = gathered[rank]
        inputs.append((rng.integers(0, 100, shape) + rank).astype(dtype))
    signs = [int(sign) for sign in rng.integers(0, 2, 2)]
    return Case(inputs, scatter - dims * signs[0], gather - dims * signs[1], divided, gathered if uneven else None)


def check_swaps(
    front_end: Any,
    tensor: Callable[[Array], Any],
    gradient: Callable[[Callable[[Any], Any], Any], Any] | None,
    comm: Communicator,
    group: Any,
    *,
    cases: int = 20,
    dtypes: Sequence[Any] = ("float32", "int8", "float16"),
    refuses: bool = True,
) -> None:
    """Values by the definition, sync and async, and back; gradients by ``gradient(loss, tensor)``; errors.

    ``refuses``: whether the group goes on after an error, as it does in host memory.
    """
    rng = np.random.default_rng(11)
    for number in range(cases):
        case = random_case(rng, comm.size, dtypes[number % len(dtypes)])
        about = f"case {number}: {[x.shape for x in case.inputs]} {case[1:]}"
        x, wanted = tensor(case.inputs[comm.rank]), case.wanted()[comm.rank]
        found = front_end.all_to_all_nd(x, case.scatter, case.gather, group, **case.sizes())
        assert tuple(found.shape) == wanted.shape, about
        np.testing.assert_array_equal(array_of(found), wanted, about)
        later, work = front_end.all_to_all_nd(x, case.scatter, case.gather, group, **case.sizes(), async_op=True)
        work.wait()
        np.testing.assert_array_equal(array_of(later), wanted, about)
        out = tensor(np.zeros_like(wanted))
        for options in ({}, {"async_op": True}):
            begun = front_end.all_to_all_nd(x, case.scatter, case.gather, group, **case.sizes(), out=out, **options)
            if options:
                begun[1].wait()
            assert (begun[0] if options else begun) is out
            np.testing.assert_array_equal(array_of(out), wanted, about)
            out = tensor(np.zeros_like(wanted))
        sizes = {
            "scatter_sizes": [y.shape[case.gather] for y in case.inputs],
            "gather_sizes": [y.shape[case.scatter] for y in case.wanted()],
        }
        back = front_end.all_to_all_nd(found, case.gather, case.scatter, group, **sizes)
        np.testing.assert_array_equal(array_of(back), case.inputs[comm.rank], about)

    heads, length = comm.size + 1, comm.size  # uneven heads
    parts = [(np.arange(2 * length * heads * 3) + 1000 * j).reshape(2, length, heads, 3) for j in range(comm.size)]
    own = tensor(parts[comm.rank].astype("float32"))
    of_heads = front_end.sequence_to_heads(own, group, heads=heads)
    np.testing.assert_array_equal(array_of(of_heads), reference.all_to_all_nd(parts, 2, 1)[comm.rank])
    back = front_end.heads_to_sequence(of_heads, group, heads=heads)
    np.testing.assert_array_equal(array_of(back), parts[comm.rank])

    if gradient is not None:
        shape = tuple(of_heads.shape)
        slopes = (np.arange(np.prod(shape)) + comm.rank).astype("float32").reshape(shape)

        def loss(x: Any) -> Any:
            return (front_end.sequence_to_heads(x * x, group, heads=heads) * tensor(slopes)).sum()

        back = front_end.heads_to_sequence(tensor(slopes), group, heads=heads)
        expected = 2 * parts[comm.rank] * array_of(back)
        np.testing.assert_array_equal(np.asarray(gradient(loss, own)), expected.astype("float32"))

    if refuses:
        check_refusals(front_end, tensor, comm, group)


def check_refusals(front_end: Any, tensor: Callable[[Array], Any], comm: Communicator, group: Any) -> None:
    """The same error on every rank, and the next call is served."""
    n = comm.size
    x = tensor(np.ones((n, 2, 3), "float32"))
    mine = comm.rank == n - 1
    call = front_end.all_to_all_nd
    for arguments, sizes, error, text in (
        ((tensor(np.ones(4, "float32")), 0, 1), {}, InvalidTensorError, "expected at least 2 dimensions"),
        ((x, 3, 1), {}, InvalidParamError, "scatter_dim is 3, expected a dimension of 3"),
        ((x, 0, True), {}, InvalidParamError, "gather_dim is True, expected a dimension of 3"),
        ((x, 1, -2), {}, InvalidParamError, "scatter_dim and gather_dim are both 1, expected two dimensions"),
        ((x, 0, 1), {"scatter_sizes": [1] * (n + 1)}, InvalidParamError, r"scatter_sizes is \[1, .*expected \d"),
        ((x, 0, 1), {"scatter_sizes": [n + 1] + [0] * (n - 1)}, InvalidParamError, f"a sum of {n}, dimension 0"),
        ((x, 0, 1), {"out": tensor(np.ones((1, 2), "float32"))}, InvalidTensorError, r"out has shape \(1, 2\)"),
        ((x, 0, 1), {"gather_sizes": [3] * n}, InvalidParamError, "expected 2 for rank .*, dimension 1 of input"),
    ):
        with pytest.raises(error, match=text):
            call(*(arguments if mine else (x, 0, 1)), group, **(sizes if mine else {}))
    other = tensor(np.ones((n, 2, 3), "int8"))
    for arguments, sizes, text in (
        ((x, 1, 0), {}, f"rank 0 .*scatters dimension 0 and gathers dimension 1, rank {n - 1} scatters dimension 1"),
        ((other, 0, 1), {}, "dtype"),
        ((tensor(np.ones((n, 2, 4), "float32")), 0, 1), {}, "differ in dimensions that are neither scattered"),
        ((tensor(np.ones((n, 5, 3), "float32")), 0, 1), {"gather_sizes": [2] * (n - 1) + [5]}, "sends|expect"),
    ):
        with pytest.raises(PeerMismatchError, match=text):
            call(*(arguments if mine else (x, 0, 1)), group, **(sizes if mine else {}))
    assert array_of(call(x, 0, 1, group)).sum() == 6 * n


def array_of(x: Any) -> Array:
    if hasattr(x, "asnumpy"):
        return np.asarray(x.asnumpy())
    return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)
