"""Options that one rank has otherwise than the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from alltoallv import Communicator
from alltoallv import numpy as av


@dataclass(frozen=True)
class Option:
    """A call with the option: ``act(communicator, is_odd, number)``; numbers differ from call to call.

    Attributes:
        errors: Of which class the error may be.
    """

    act: Callable[[Communicator, bool, int], None]
    errors: tuple[str, ...] = ("PeerMismatchError",)


def _moe(usual: dict[str, Any], other: dict[str, Any]) -> Option:
    def act(comm: Communicator, is_odd: bool, number: int) -> None:
        options = {"num_experts": 2 * comm.size, **usual, **(other if is_odd else {})}
        if options.get("placement") == "turned":
            options["placement"] = tuple((2 * r, 2 * r + 1) for r in [*range(1, comm.size), 0])
        rng = np.random.default_rng([abs(number), comm.rank])
        dispatcher = av.MoEDispatcher(group=comm, **options)
        tokens, weights = rng.normal(size=(6, 8)).astype("f4"), rng.random((6, 2)).astype("f4")
        ids = np.argsort(rng.random((6, 2 * comm.size)))[:, :2]
        rows, _, state = dispatcher.dispatch(tokens, ids, weights)
        got = dispatcher.combine(rows.astype("f4"), state)
        if not {"capacity", "payload", "combine_payload"} & set(options):
            np.testing.assert_allclose(got, tokens * weights.sum(1, keepdims=True), rtol=1e-5)

    return Option(act)


def _quantized(usual: dict[str, Any], other: dict[str, Any]) -> Option:
    def act(comm: Communicator, is_odd: bool, number: int) -> None:
        x = np.random.default_rng(abs(number)).normal(size=300).astype("f4")
        got = av.quantized_all_reduce(x, group=comm, **{**usual, **(other if is_odd else {})})
        scale = 1 if usual.get("op") == "avg" else comm.size
        np.testing.assert_allclose(got.astype("f4"), x * scale, atol=0.2 * comm.size)

    return Option(act)


def _reduction(comm: Communicator, is_odd: bool, number: int) -> None:
    got = av.all_reduce(np.full(5, number), "max" if is_odd else "sum", group=comm)
    assert got.tolist() == [number * comm.size] * 5


def _root(comm: Communicator, is_odd: bool, number: int) -> None:
    x = np.full(5, number + comm.rank)
    av.broadcast(x, int(is_odd), group=comm)
    assert x.tolist() == [number] * 5


def _joining(**other: Any) -> Option:
    def act(comm: Communicator, is_odd: bool, number: int) -> None:
        domain = f"{next(iter(other))}-{comm.domain}-{number}"
        with Communicator.from_env(domain, timeout=30.0, **(other if is_odd else {})) as made:
            av.barrier(group=made)

    return Option(act, ("InvalidParamError", "PeerMismatchError"))


OPTIONS: dict[str, Option] = {
    "op": Option(_reduction),
    "root": Option(_root),
    "check": _joining(check="off"),
    "bits": _quantized({}, {"bits": 4}),
    "group_size": _quantized({}, {"group_size": 64}),
    "gather": _quantized({}, {"gather": "quantized"}),
    "quantized op": _quantized({"op": "avg"}, {"op": "sum"}),
    "format": _quantized({"format": "fp8_e4m3"}, {"format": "fp8_e5m2"}),
    "num_experts": _moe({}, {"num_experts": 16}),
    "alignment": _moe({}, {"alignment": 4}),
    "payload": _moe({}, {"payload": "int8"}),
    "combine_payload": _moe({}, {"combine_payload": "int8"}),
    "placement": _moe({}, {"placement": "turned"}),
    "capacity": _moe({"capacity": 2}, {"capacity": 1}),
    "capacity or none": _moe({}, {"capacity": 2}),
    "drop": _moe({"capacity": 2, "drop": "last"}, {"drop": "lightest"}),
    "codes": _moe({"payload": "int8"}, {"codes": True}),
}
