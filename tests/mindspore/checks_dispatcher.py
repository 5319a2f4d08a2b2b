"""The dispatcher: NumPy's bits, and the gradients of one process."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

EXPERTS, K, WIDTH, TOKENS = 5, 2, 7, 12
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"chunks": 2}, {"capacity": 1.0, "alignment": 4}),
    ({"shared": lambda x: x * x}, {"payload": "int8", "combine_payload": "int8"}),
    ({}, {"payload": "fp8_e4m3", "combine_payload": "mxfp4", "active_ranks": [False, True]}),
    ({}, {"placement": ((4, 1), (0,)), "capacity": 3, "drop": "lightest"}),
]


def problem(rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng(rank)
    ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :K]
    return [rng.normal(size=(TOKENS, WIDTH)).astype(np.float32), ids, rng.random((TOKENS, K), dtype=np.float32)]


def experts_of(dispatcher: Any) -> list[Any]:
    return [lambda rows, e=e: rows * rows * (e + 0.5) for e in dispatcher.local_experts]


def check_dispatcher_has_the_bits_of_numpy(comm: Communicator) -> None:
    given = problem(comm.rank)
    for call, options in OPTIONS:
        ours, other = am.MoEDispatcher(EXPERTS, comm, **options), av.MoEDispatcher(EXPERTS, comm, **options)
        y = ours(*map(Tensor, given), experts_of(ours), **call)
        assert np.array_equal(y.asnumpy(), other(*given, experts_of(other), **call)), options
        rows, counts, state = ours.dispatch(*map(Tensor, given))
        again, _, _ = ours.dispatch(Tensor(given[0]), state)
        assert counts == other.dispatch(*given)[1]
        assert "payload" in options or np.array_equal(again.asnumpy(), rows.asnumpy())
        assert ours.load(state).chosen.sum() == comm.size * TOKENS * K


def check_other_tokens_by_the_way_of_a_dispatcher(comm: Communicator) -> None:
    """They are as many and of one dtype on all ranks, and have gradients."""
    x, ids, w = problem(comm.rank)
    dispatcher = am.MoEDispatcher(EXPERTS, comm)
    rows, _, state = dispatcher.dispatch(Tensor(x), Tensor(ids))
    with pytest.raises(InvalidTensorError, match=rf"tokens has shape \(1, {WIDTH}\), expected {TOKENS} rows"):
        dispatcher.dispatch(Tensor(x if comm.rank else x[:1]), state)
    with pytest.raises(PeerMismatchError, match=r"rank 0 moves .* of float32, rank 1 moves .* of float16"):
        dispatcher.dispatch(Tensor(x.astype(np.float16) if comm.rank == 1 else x), state)
    with pytest.raises(PeerMismatchError, match=r"rank 0 moves .* of float32, rank 1 moves .* of int32"):
        dispatcher.combine(rows.astype(ms.int32) if comm.rank == 1 else rows, state)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        rows, _, other = dispatcher.dispatch(x, state, w)
        return (rows * other.weights.reshape(-1, 1)).sum()

    by_x, by_w = ms.grad(loss, (0, 1))(Tensor(x), Tensor(w))
    np.testing.assert_allclose(by_x.asnumpy(), np.repeat(w.sum(1, keepdims=True), WIDTH, 1), rtol=1e-5)
    np.testing.assert_allclose(by_w.asnumpy(), np.repeat(x.sum(1, keepdims=True), K, 1), rtol=1e-4, atol=1e-5)


def check_codes_of_a_dispatcher(comm: Communicator) -> None:
    x, ids, _ = problem(comm.rank)
    codes, _, state = am.MoEDispatcher(EXPERTS, comm, payload="int8", codes=True).dispatch(Tensor(x), Tensor(ids))
    rows, _, _ = am.MoEDispatcher(EXPERTS, comm, payload="int8").dispatch(Tensor(x), Tensor(ids))
    assert np.array_equal(codes.asnumpy().astype(np.float32) * state.scales.asnumpy()[:, None], rows.asnumpy())
    with pytest.raises(InvalidParamError, match=r"payload 'fp8_e4m3', expected 'int8'"):
        am.MoEDispatcher(EXPERTS, comm, payload="fp8_e4m3", codes=True)


def check_gradients_of_a_dispatcher(comm: Communicator) -> None:
    """The gradient of ``sum over j of w_j (e_j + 0.5) x²`` times ``g``, by tokens and by weights."""
    x, ids, w = problem(comm.rank)
    g = np.arange(WIDTH, dtype=np.float32)
    for chunks in (1, 2):
        dispatcher = am.MoEDispatcher(EXPERTS, comm, alignment=2)

        def loss(x: Tensor, w: Tensor, chunks: int = chunks, dispatcher: Any = dispatcher) -> Tensor:
            return (dispatcher(x, Tensor(ids), w, experts_of(dispatcher), chunks=chunks) * Tensor(g)).sum()

        by_x, by_w = ms.grad(loss, (0, 1))(Tensor(x), Tensor(w))
        factor = ids + np.float32(0.5)
        np.testing.assert_allclose(by_x.asnumpy(), 2 * x * g * (w * factor).sum(1, keepdims=True), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(by_w.asnumpy(), factor * (x * x * g).sum(1, keepdims=True), rtol=1e-4)
