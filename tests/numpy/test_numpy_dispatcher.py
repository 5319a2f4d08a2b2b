"""Tokens to their experts and back, on any number of ranks as on one, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_pieces import pieces_of
from on_ranks import mostly_slow, on_both, on_ranks

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv._calls.experts import CODES
from alltoallv.errors import InvalidParamError, PeerLostError
from alltoallv.testing import Ranks
from alltoallv.testing.quantized_formats import FORMATS

EXPERTS, K, WIDTH, TOKENS = 8, 3, 5, 24
Array = np.ndarray[Any, Any]


def problem(dtype: Any = np.float32) -> tuple[Array, Array, Array, Array]:
    """Tokens, their choices and weights, and a factor for every expert."""
    rng = np.random.default_rng(3)
    tokens = rng.normal(size=(TOKENS, WIDTH)).astype(dtype)
    ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :K]
    return tokens, ids, rng.random((TOKENS, K)).astype(np.float32), rng.normal(size=(EXPERTS, WIDTH)).astype(dtype)


def layer(comm: Communicator, begin: int, end: int, dtype: Any, call: dict[str, Any], options: dict[str, Any]) -> Array:
    tokens, ids, weights, factors = problem(dtype)
    dispatcher = av.MoEDispatcher(EXPERTS, comm, **options)
    experts = [lambda rows, e=e: rows * factors[e] for e in dispatcher.local_experts]
    return dispatcher(tokens[begin:end], ids[begin:end], weights[begin:end], experts, **call)


def part(comm: Communicator, begins: list[int], ends: list[int], *about: Any) -> Array:
    return layer(comm, begins[comm.rank], ends[comm.rank], *about)


def of_one_process(experts: list[int], mine: slice) -> Array:
    """What these tokens get where there are these experts only."""
    tokens, ids, weights, factors = problem()
    alone = av.MoEDispatcher(EXPERTS, Communicator.threads(1)[0], placement=(tuple(experts),))
    calls = [lambda rows, e=e: rows * factors[e] for e in experts]
    return alone(tokens[mine], ids[mine], weights[mine], calls)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "chunks": ({"chunks": 3}, {}),
    "shared": ({"shared": lambda x: x * x, "chunks": 2}, {}),
    "alignment": ({}, {"alignment": 4}),
    "int8": ({}, {"payload": "int8"}),
    "int4 there, int8 back": ({"chunks": 2}, {"payload": "int4", "combine_payload": "int8"}),
    "fp8 there, MXFP8 back": ({"chunks": 2}, {"payload": "fp8_e4m3", "combine_payload": "mxfp8_e5m2"}),
    "NVFP4 there, MXFP4 back": ({}, {"payload": "nvfp4", "combine_payload": "mxfp4"}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_same_bits_for_any_split_and_any_ranks(ranks: Ranks, name: str, dtype: Any) -> None:
    call, options = OPTIONS[name]
    alone = layer(Communicator.threads(1)[0], 0, TOKENS, dtype, {**call, "chunks": 1}, options).tobytes()
    for size in (2, 4):
        for ends in ([TOKENS * (r + 1) // size for r in range(size)], [0] * (size - 1) + [TOKENS]):
            begins = [0, *ends]
            parts = ranks(size)(part, begins, ends, dtype, call, options)
            assert b"".join(part.tobytes() for part in parts) == alone


@pytest.mark.parametrize("call", [{}, {"chunks": 2}])
def test_rows_that_come_back_in_pieces(ranks: Ranks, call: dict[str, Any]) -> None:
    """Of about 3 tokens each, on ranks with other numbers of tokens."""

    def check(comm: Communicator, begins: list[int]) -> tuple[bytes, int]:
        with pieces_of(4 * WIDTH * K * 3):
            before = comm.stats()["operators"]
            y = layer(comm, *begins[comm.rank : comm.rank + 2], np.float32, call, {"payload": "int8", "alignment": 2})
            return y.tobytes(), comm.stats()["operators"] - before

    alone = layer(Communicator.threads(1)[0], 0, TOKENS, np.float32, {}, {"payload": "int8"}).tobytes()
    parts = ranks(3)(check, [0, 0, 7, TOKENS])
    assert b"".join(part for part, _ in parts) == alone
    assert [operators for _, operators in parts] == [
        7 if not call else 9
    ] * 3  # number of chunks, dispatches, pieces of 17 tokens


def test_the_plain_formula() -> None:
    tokens, ids, weights, factors = problem(np.float64)
    expected = sum((tokens * factors[ids[:, j]]) * weights[:, j : j + 1] for j in range(K))
    (comm,) = Communicator.threads(1)
    assert np.array_equal(layer(comm, 0, TOKENS, np.float64, {}, {}), expected)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 9), st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.sampled_from(["last", "lightest"])
)
def test_capacity_drops_what_it_says(experts: int, tokens: int, k: int, capacity: int, drop: Any) -> None:
    rng = np.random.default_rng(experts * tokens)
    ids, weights = rng.integers(0, experts, (tokens, k)), rng.integers(1, 4, (tokens, k)).astype(np.float32)
    dispatcher = av.MoEDispatcher(experts, Communicator.threads(1)[0], capacity=capacity, drop=drop, alignment=2)
    rows, counts, state = dispatcher.dispatch(np.ones((tokens, 2)), ids, weights)
    kept = np.zeros((tokens, k), bool)
    for expert in range(experts):
        pairs = np.argwhere(ids == expert).tolist()
        if drop == "lightest":
            pairs.sort(key=lambda pair: -weights[tuple(pair)])
        for pair in pairs[:capacity]:
            kept[tuple(pair)] = True
    assert state.received == [int((kept & (ids == e)).sum()) for e in range(experts)]
    assert counts == [n + n % 2 for n in state.received]
    assert np.array_equal(dispatcher.combine(rows, state)[:, 0] if tokens else [], (weights * kept).sum(1))
    assert dispatcher.load(state).chosen.tolist() == np.bincount(ids.ravel(), minlength=experts).tolist()
    assert dispatcher.load(state).kept.tolist() == state.received


@on_ranks(2)
def test_a_factor_as_capacity_and_the_load_of_all_ranks(comm: Communicator) -> None:
    dispatcher = av.MoEDispatcher(4, comm, capacity=1.5)
    _, counts, state = dispatcher.dispatch(np.ones((8, 1)), np.zeros(8, np.int64))
    assert counts == ([6, 0] if comm.rank == 0 else [0, 0])  # ceil(1.5 * 8 / 4) of each rank
    load = dispatcher.load(state)
    assert (load.chosen.tolist(), load.kept.tolist()) == ([16, 0, 0, 0], [6, 0, 0, 0])


def test_rows_state_and_their_ways(ranks: Ranks) -> None:
    """Two ranks, three experts: 0 and 1 on rank 0, 2 on rank 1; a second dispatch goes the way of the first."""

    def check(comm: Communicator) -> tuple[Any, ...]:
        tokens = np.arange(3.0)[:, None] + 10 * (comm.rank + 1)
        dispatcher = av.MoEDispatcher(3, comm, alignment=4)
        rows, counts, state = dispatcher.dispatch(tokens, np.array([[2, 0], [1, 0], [0, 2]], np.int32))
        again, _, other = dispatcher.dispatch(tokens, state, np.ones((3, 2)))
        assert np.array_equal(again, rows)
        assert np.array_equal(other.weights, (rows[:, 0] > 0).astype(float))
        assert np.array_equal(dispatcher.combine(again, other), 2 * tokens)
        return rows[:, 0].tolist(), counts, state.received, state.sources.tolist(), state.experts.tolist()

    first, second = ranks(2)(check)
    assert first[0] == [10, 11, 12, 20, 21, 22, 0, 0, 11, 21, 0, 0]
    assert first[1:3] == ([8, 4], [6, 2])
    assert first[3] == [0, 0, 0, 1, 1, 1, -1, -1, 0, 1, -1, -1]
    assert first[4] == [0] * 8 + [1] * 4
    assert second[0] == [10, 12, 20, 22]


@on_both(2)
def test_results_that_are_asked_for_later(comm: Communicator) -> None:
    """Ranks that are threads need Python while another waits."""
    tokens, ids, weights, _ = problem()
    dispatcher = av.MoEDispatcher(EXPERTS, comm)
    rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
    expected = dispatcher.combine(rows, state)
    for _ in range(20):
        later, numbers, other = dispatcher.dispatch(tokens, ids, weights, async_op=True).result()
        assert (later.tobytes(), numbers) == (rows.tobytes(), counts)
        assert np.array_equal(dispatcher.combine(later, other, async_op=True).result(), expected)


@pytest.mark.parametrize("payload", FORMATS)
def test_rows_have_the_values_of_their_codes(payload: str) -> None:
    """In every format, with a scale per row or per group, of which the last of a row is shorter."""
    (comm,) = Communicator.threads(1)
    tokens = np.random.default_rng(1).normal(size=(5, 70)).astype(np.float32)
    rows, _, state = av.MoEDispatcher(2, comm, payload=payload).dispatch(tokens, np.zeros((5, 1), int))
    size = FORMATS[payload].group_size or "token"
    each = [av.quantized_all_reduce(row, format=payload, group_size=size, group=comm) for row in tokens]
    assert rows.tobytes() == np.array(each).tobytes()
    back = av.MoEDispatcher(2, comm, combine_payload=payload)
    _, _, state = back.dispatch(tokens, np.zeros((5, 1), int))
    assert back.combine(tokens, state).tobytes() == rows.tobytes()


@pytest.mark.parametrize("payload", CODES)
@on_ranks(2)
def test_codes_and_scales(comm: Communicator, payload: str) -> None:
    tokens, ids, weights, _ = problem()
    codes, _, state = av.MoEDispatcher(EXPERTS, comm, payload=payload, codes=True).dispatch(tokens, ids, weights)
    rows, _, _ = av.MoEDispatcher(EXPERTS, comm, payload=payload).dispatch(tokens, ids, weights)
    assert codes.dtype.name == CODES[payload]
    assert np.array_equal(codes.astype(np.float32) * state.scales[:, None], rows)


@pytest.mark.parametrize(("dies", "victim"), [("before", 0), ("between", 2)])
def test_the_step_goes_on_without_a_rank(ranks: Ranks, dies: str, victim: int) -> None:
    """What is left computes what one process computes with the experts of those that live."""

    def program(comm: Communicator) -> None:
        tokens, ids, weights, factors = problem()
        mine = slice(8 * comm.rank, 8 * comm.rank + 8)
        active = np.ones(3, bool)
        dispatcher = av.MoEDispatcher(EXPERTS, comm, active_ranks=active)
        lost, rested = (dispatcher.routing.placed(3)[rank] for rank in (victim, 1))

        def step() -> None:
            if comm.rank == victim and dies == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            rows, _, state = dispatcher.dispatch(tokens[mine], ids[mine], weights[mine])
            if comm.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            dispatcher.combine(rows, state)

        with pytest.raises(PeerLostError):
            step()
        left = dispatcher.survivors()
        experts = [lambda rows, e=e: rows * factors[e] for e in left.local_experts]
        y = left(tokens[mine], ids[mine], weights[mine], experts)
        there = [e for e in range(EXPERTS) if e not in lost]
        assert np.array_equal(y, of_one_process(there, mine))
        assert active.tolist() == [rank != victim for rank in range(3)]
        active[1] = False  # of those who are left too, by the numbers of the first group
        y = left(tokens[mine], ids[mine], weights[mine], experts)
        assert np.array_equal(y, of_one_process([e for e in there if e not in rested], mine))

    for outcome in ranks(3, fresh=True, outcomes=True)(program):
        assert outcome.rank == victim or outcome.error is None, outcome.error


@on_both(3)
def test_active_ranks_are_read_at_each_call(comm: Communicator) -> None:
    """Tokens get what one process computes with the experts of the active ranks, also tokens of other ranks."""
    tokens, ids, weights, factors = problem()
    mine, active = slice(8 * comm.rank, 8 * comm.rank + 8), np.ones(3, bool)
    dispatcher = av.MoEDispatcher(EXPERTS, comm, alignment=4, active_ranks=active)
    placed = dispatcher.routing.placed(3)
    experts = [lambda rows, e=e: rows * factors[e] for e in dispatcher.local_experts]
    for inactive in ([], [1], [0, 2], [], [0, 1, 2]):
        active[:] = True
        active[inactive] = False
        there = [e for rank in range(3) if active[rank] for e in placed[rank]]
        y = dispatcher(tokens[mine], ids[mine], weights[mine], experts, chunks=2)
        assert np.array_equal(y, of_one_process(there, mine))
        rows, counts, state = dispatcher.dispatch(tokens[mine], ids[mine])
        assert len(counts) == len(experts)
        assert (len(rows) > 0) == active[comm.rank]
        assert dispatcher.load(state).kept.nonzero()[0].tolist() == there
    for wrong in (1, [True, False], [True, True, 2]):
        dispatcher.active_ranks = wrong if comm.rank == 1 else None
        with pytest.raises(
            InvalidParamError, match=f"{'' if comm.rank == 1 else 'failed on rank 1: .*'}active_ranks (is|has)"
        ):
            dispatcher.dispatch(tokens[mine], ids[mine])


def deaths(seed: int) -> dict[int, tuple[int, str]]:
    """Two of four ranks: in which step, or while the rest recover from the first (-2), and when in it."""
    rng = np.random.default_rng(seed)
    first, second = rng.permutation(4)[:2].tolist()
    moments = ["before", "between", "after", str(rng.random() / 200)]  # a number: seconds from the step's beginning
    later = (int(rng.integers(5, 8)), rng.choice(moments))
    if seed % 2:
        later = -2, rng.choice(["agreeing", str(rng.random() / 20)])
    return {first: (int(rng.integers(3)), rng.choice(moments)), second: later}


@pytest.mark.parametrize("seed", mostly_slow(range(60), range(4)))
def test_any_rank_dies_at_any_time(ranks: Ranks, seed: int) -> None:
    """Every step that a rank finishes has the result of one process with the experts that were there."""

    def program(comm: Communicator) -> int:
        tokens, ids, weights, factors = problem()
        me, dying = comm.rank, deaths(seed).get(comm.rank, (-1, ""))
        mine = slice(6 * me, 6 * me + 6)
        dispatcher, n, recovers = av.MoEDispatcher(EXPERTS, comm), 0, False

        def die(step: int, at: str) -> None:
            if dying == (step, at):
                os.kill(os.getpid(), signal.SIGKILL)

        def die_soon(step: int) -> None:
            if dying[0] == step and dying[1].startswith("0."):
                threading.Timer(float(dying[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()

        def recover() -> tuple[Any, int]:
            die_soon(-2)
            left = dispatcher.survivors()
            die(-2, "agreeing")
            # Some may have finished the step.
            return left, int(av.all_reduce(np.array(n), "min", group=left.group))

        def step() -> Array:
            die(n, "before")
            die_soon(n)
            rows, counts, state = dispatcher.dispatch(tokens[mine], ids[mine], weights[mine])
            die(n, "between")
            parts = np.split(rows, np.cumsum(counts)[:-1])
            made = [part * factors[e] for part, e in zip(parts, dispatcher.local_experts, strict=True)]
            y = dispatcher.combine(np.concatenate(made), state)
            die(n, "after")
            if dying[0] == n or (dying[0] == -2 and n == 5):
                threading.Event().wait()  # for the timer
            return y

        while n < 10:
            try:
                if recovers:
                    dispatcher, n = recover()
                    recovers = False
                y = step()
            except PeerLostError:
                recovers = True
                continue
            n += 1
            group: Any = dispatcher.group
            there = sorted(e for experts in dispatcher.routing.placed(group.size) for e in experts)
            assert np.array_equal(y, of_one_process(there, mine))
        return int(group.size)

    for outcome in ranks(4, fresh=True, outcomes=True)(program):
        assert outcome.rank in deaths(seed) or (outcome.error, outcome.result) == (None, 2), outcome.error
