"""quantized_all_reduce on MindSpore tensors: the reference's bits, gradients, handles."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from quantized_front_ends import COUNTS, check_linear_gradients, check_quantized, slopes_and_gradient

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.mindspore.front_end import ADAPTER
from alltoallv.testing import quantized as reference


def check_quantized_as_numpy(comm: Communicator) -> None:
    check_quantized(am, ADAPTER, ms, comm)


def vectors(comm: Communicator, n: int) -> list[Any]:
    rng = np.random.default_rng(n)
    return [rng.normal(size=n).astype(np.float32) for _ in range(comm.size)]


def check_quantized_gradient(comm: Communicator) -> None:
    """Straight through: as that of a sum."""
    weights = Tensor(np.arange(6, dtype=np.float32) + comm.rank)
    for op in ("sum", "avg"):

        def loss(x: Tensor, op: Any = op) -> Tensor:
            return (am.quantized_all_reduce(x, op=op, group=comm) * weights).sum()

        grad = ms.grad(loss)(Tensor(np.ones(6, np.float32)))
        total = np.sum([np.arange(6, dtype=np.float32) + r for r in range(comm.size)], axis=0)
        np.testing.assert_allclose(grad.asnumpy(), total / (comm.size if op == "avg" else 1))


def check_quantized_gradient_of_a_view(comm: Communicator) -> None:
    """Of a tensor that is not contiguous: the copy that is read lives as long as it is read."""
    xs = [x.reshape(200, 400) for x in vectors(comm, 80_000)]
    wanted = reference.quantized_all_reduce([np.ascontiguousarray(x.T) for x in xs])[0]
    given = Tensor(xs[comm.rank])
    found: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        found.append(am.quantized_all_reduce(x.T, group=comm))
        return (found[-1] * 2).sum()

    for _ in range(3):
        grad = ms.grad(loss)(given)
        np.testing.assert_array_equal(found[-1].asnumpy(), wanted)
        np.testing.assert_array_equal(grad.asnumpy(), np.full((200, 400), 2 * comm.size, np.float32))


def check_quantized_gradients_of_parts_and_rows(comm: Communicator) -> None:
    """Gradients of parts are gathered, gradients of rows go back where the rows came from."""
    x, size = Tensor(np.full((4, 2), comm.rank + 1, np.float32)), comm.size
    for counts in (None, [1, 3], [4, 0]):
        for op in ("sum", "avg"):

            def squares(x: Tensor, counts: Any = counts, op: Any = op) -> Tensor:
                return (am.quantized_reduce_scatter(x, counts, op=op, group=comm) ** 2).sum()

            share = 1 if op == "sum" else 1 / size
            total = share * sum(range(1, size + 1))
            grad = ms.grad(squares)(x)
            np.testing.assert_allclose(grad.asnumpy(), np.full((4, 2), 2 * total * share), rtol=1e-2)
            curve = ms.grad(lambda x, squares=squares: ms.grad(squares)(x).sum())(x)
            np.testing.assert_allclose(curve.asnumpy(), np.full((4, 2), 2 * size * share * share), rtol=1e-2)
    for recvs in (None, [1, 1] if comm.rank == 0 else [3, 3]):

        def weighed(x: Tensor, recvs: Any = recvs) -> Tensor:
            return (am.quantized_all_to_all(x, [1, 3], recvs, group=comm) * (comm.rank + 1)).sum()

        np.testing.assert_array_equal(ms.grad(weighed)(x).asnumpy(), [[1, 1], [2, 2], [2, 2], [2, 2]])
    slopes, wanted = slopes_and_gradient(comm, (2,), "float32", bits=4)

    def sloped(x: Tensor) -> Tensor:
        rows = am.quantized_all_to_all(x, COUNTS[comm.rank], bits=4, quantize_gradient=True, group=comm)
        return (rows * Tensor(slopes)).sum()

    np.testing.assert_array_equal(ms.grad(sloped)(x).asnumpy(), wanted)


def check_quantized_gradients_of_a_linear_layer(comm: Communicator) -> None:
    def gradients(loss: Any, tensors: Any, wanted: Any) -> Any:
        found = ms.grad(loss, tuple(j for j, wants in enumerate(wanted) if wants))(*tensors)
        return [gradient.asnumpy() for gradient in (found if isinstance(found, tuple) else [found])]

    check_linear_gradients(am.quantized_linear_all_reduce, Tensor, gradients, comm)
