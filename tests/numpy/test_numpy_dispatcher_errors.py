"""Wrong arguments of the dispatcher, and ranks that disagree: errors on every rank."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv._calls.experts import Routing
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import Ranks

BAD: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "no such expert": ({"expert_ids": np.full((2, 1), 9)}, InvalidParamError),
    "an id beyond int64": ({"expert_ids": np.full((2, 1), 2**63, np.uint64)}, InvalidParamError),
    "ids of floats": ({"expert_ids": np.zeros((2, 1))}, InvalidTensorError),
    "another number of ids": ({"expert_ids": np.zeros((3, 1), int)}, InvalidTensorError),
    "other weights": ({"gate_weights": np.ones((2, 2))}, InvalidTensorError),
    "integer weights": ({"gate_weights": np.ones((2, 1), int)}, InvalidTensorError),
}


@on_ranks(2)
def test_a_bad_argument_of_one_rank_fails_on_all(comm: Communicator) -> None:
    good = {"tokens": np.ones((2, 3)), "expert_ids": np.zeros((2, 1), int), "gate_weights": np.ones((2, 1))}
    dispatcher = av.MoEDispatcher(4, comm)
    for name, (arguments, kind) in BAD.items():
        with pytest.raises((kind, InvalidParamError, InvalidTensorError), match=None if comm.rank == 0 else "rank 0"):
            dispatcher.dispatch(**(good if comm.rank else {**good, **arguments}))
        rows, _, _ = dispatcher.dispatch(**good)
        assert len(rows) == (0 if comm.rank else 4), name


@on_ranks(2)
def test_a_state_that_is_none_fails_on_all(comm: Communicator) -> None:
    dispatcher = copy.deepcopy(av.MoEDispatcher(4, comm))  # of the same ranks
    for _ in range(2):
        rows, _, state = dispatcher.dispatch(np.ones((2, 3)), np.zeros((2, 1), int))
        with pytest.raises(InvalidParamError, match=r"state is of type NoneType, expected .* dispatch .*A2A-1490"):
            dispatcher.combine(rows, state if comm.rank else None)


def test_an_argument_of_another_library_is_named() -> None:
    (comm,) = Communicator.threads(1)
    with pytest.raises(TypeError, match=r"^MoEDispatcher\(\) has no argument 'top_k', expected some of active_ranks, "):
        av.MoEDispatcher(4, comm, top_k=2)  # type: ignore[call-arg]


WRONG_AGAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "fewer tokens": ((np.ones((1, 5)),), r"tokens has shape \(1, 5\), expected 4 rows"),
    "no tokens": ((np.ones(()),), r"tokens has shape \(\), expected 4 rows"),
    "fewer weights": ((np.ones((4, 5)), np.ones((4, 1))), r"gate_weights has shape \(4, 1\), expected \(4, 2\)"),
    "integer weights": ((np.ones((4, 5)), np.ones((4, 2), int)), "gate_weights has dtype int64"),
}


@on_ranks(2)
def test_other_tokens_by_the_same_way_are_as_many(comm: Communicator) -> None:
    dispatcher, good = av.MoEDispatcher(4, comm), (np.ones((4, 5)), np.ones((4, 2)))
    rows, _, state = dispatcher.dispatch(good[0], np.arange(8).reshape(4, 2) % 4, good[1])
    for name, (arguments, message) in WRONG_AGAIN.items():
        given = good if comm.rank else arguments
        with pytest.raises(InvalidTensorError, match=("failed on rank 0: .*" if comm.rank else "") + message):
            dispatcher.dispatch(given[0], state, *given[1:])
        assert np.array_equal(dispatcher.dispatch(good[0], state)[0], rows), name


@pytest.mark.parametrize("ids", [np.arange(4) % 2, np.zeros(4, int)], ids=["each has rows", "rank 1 has none"])
def test_ranks_that_move_other_rows(ranks: Ranks, ids: Any) -> None:
    """Back, and by a known way, also where the bytes of a row are as many."""
    float32 = "rank 0 moves tokens of 8 elements of float32, rank 1 moves tokens of "
    texts = {"int32": float32 + "8 elements of int32", "float64": float32 + "4 elements of float64"}
    texts["shape"] = float32 + "7 elements of float32"
    texts["records"] = float32 + "1 elements of unknown"

    def check(comm: Communicator) -> None:
        dispatcher, x = av.MoEDispatcher(2, comm), np.ones((4, 8), np.float32)
        rows, _, state = dispatcher.dispatch(x, ids)
        for name, text in texts.items():
            one, all = rows, x
            if comm.rank:
                dtype = np.dtype({"records": "V32", "shape": "f4"}.get(name, name))
                one, all = (np.ascontiguousarray(y).view(dtype) for y in (rows, x))
                one, all = (one[:, :7], all[:, :7]) if name == "shape" else (one, all)
            for call in (lambda: dispatcher.combine(one, state), lambda: dispatcher.dispatch(all, state)):  # noqa: B023
                with pytest.raises(PeerMismatchError, match=text):
                    call()
        weights = np.ones((4, 1)) if comm.rank else None
        with pytest.raises(PeerMismatchError, match=r"rank 0 and rank 1 move .* but differ in their weights"):
            dispatcher.dispatch(x, state, weights)
        assert np.array_equal(dispatcher.combine(rows, state), x)

    ranks(2)(check)


DIFFERENT: dict[str, Any] = {
    "num_experts": 6,
    "capacity": 2,
    "drop": "lightest",
    "alignment": 2,
    "payload": "int8",
    "combine_payload": "int8",
    "placement": ((0,), (), (1,)),
    "codes": True,
    "active_ranks": (True, False, True),
}


@on_ranks(3)
def test_every_option_is_compared(comm: Communicator) -> None:
    """Whatever two ranks have different is named on all, and the next call works."""
    tokens, ids, odd = np.ones((4, 8), np.float32), np.array([0, 0, 1, 1]), comm.rank == 1
    assert set(DIFFERENT) == {field.name for field in dataclasses.fields(Routing)}
    for name, value in DIFFERENT.items():
        options = {"num_experts": 2, "payload": "int8"} if name == "codes" else {"num_experts": 2}
        dispatcher = av.MoEDispatcher(group=comm, **(options | {name: value} if odd else options))
        with pytest.raises(PeerMismatchError) as caught:
            dispatcher.dispatch(tokens, ids)
        text = f"rank 0 has {name} {getattr(Routing(**options), name)!r}, rank 1 has {name} {value!r}"
        assert str(caught.value).endswith(f"{text} [A2A-3028]")
        assert len(av.MoEDispatcher(2, comm).dispatch(tokens, ids)[0]) == 6 * (comm.rank < 2)
    for capacity in (1, 1.0):  # rows, a factor
        if odd == isinstance(capacity, int):
            with pytest.raises(PeerMismatchError, match=r"capacity 1\.0, rank 1 has capacity 1 \[A2A-3028\]$"):
                av.MoEDispatcher(2, comm, capacity=capacity).dispatch(tokens, ids)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", True), ("capacity", 0), ("drop", "all"), ("alignment", 0), ("payload", "int7"),
        ("combine_payload", "int7"), ("placement", ((0, 0),)), ("codes", True), ("num_experts", True),
        ("num_experts", 2**31), ("alignment", 2**31),
    ],
)  # fmt: skip
def test_bad_options(name: str, value: Any) -> None:
    with pytest.raises(InvalidParamError, match=name):
        av.MoEDispatcher(**{"num_experts": 4, name: value})
