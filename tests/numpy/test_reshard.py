"""Arrays move between layouts: the result is the slice of the whole, and no byte more is sent than a rank lacks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from layouts import check_formats, check_layouts, check_pieces, check_states, part
from on_ranks import on_ranks
from trouble import join

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv._calls.resharding_on_host import _Tools
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.numpy import ReshardPlan, reshard, reshard_state
from alltoallv.testing import run_ranks
from alltoallv_tools.ports import free_port


@pytest.mark.parametrize("cases", [60, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
@on_ranks(5, timeout=2900)
def test_random_layouts(comm: Communicator, cases: int) -> None:
    check_layouts(an, lambda x: x, lambda x: x, comm, comm, cases)
    check_states(an, lambda x: x, lambda x: x, comm, comm)


def test_between_hosts() -> None:
    port = free_port()

    def check(comm: Communicator) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with join(comm.rank, comm.size, backend="tcp") as apart:
            check_layouts(an, lambda x: x, lambda x: x, apart, apart, 20)
            check_states(an, lambda x: x, lambda x: x, apart, apart)

    run_ranks(3, check)


@on_ranks(4)
def test_formats(comm: Communicator) -> None:
    check_formats(an, lambda x: x, lambda x: x, comm, comm, 30)
    weights = {"w": np.linspace(-1, 1, 700, dtype="float32"), "ids": np.arange(700), "far": np.full(700, 1e300)}
    source, target = ([0, 1], [None]), ([0, 1, 2], [None])
    given = {name: w if comm.rank < 2 else None for name, w in weights.items()}
    found = reshard_state(given, source, target, format="int8", group=comm)
    if comm.rank < 3:
        assert (found["ids"] == weights["ids"]).all()  # what no format is for
        assert (found["far"] == weights["far"]).all()
        lost = abs(found["w"] - weights["w"])
        assert 0 < lost.max() < 1 / 250
    outs = {name: None if x is None else np.ones_like(x) for name, x in found.items()}
    again = reshard_state(given, source, target, format="int8", out=outs, group=comm)
    for name, x in found.items():
        assert again[name] is outs[name]
        assert x is None or (x == again[name]).all()
    copies = an.all_gather_object(found["w"], group=comm)
    assert (copies[0] == copies[1]).all()
    assert (copies[0] == copies[2]).all()
    kept = reshard(given["w"], source, ([1], [None]), format="int8", group=comm)
    assert comm.rank != 1 or (kept == weights["w"]).all()  # nobody lacked it


@on_ranks(4)
def test_large_tensors_move_in_pieces(comm: Communicator) -> None:
    check_pieces(an, _Tools, lambda x: x, lambda x: x, comm, comm, (None, "int8", "int4", "mxfp8"))


@on_ranks(4)
def test_a_state(comm: Communicator) -> None:
    """Two dtypes, a layout each, one with terms: one exchange per dtype and step."""
    everybody = [0, 1, 2, 3]
    wholes = {"w": np.arange(35.0).reshape(7, 5), "b": np.arange(6.0), "ids": np.arange(12)}
    source = {"w": (everybody, [0]), "b": (everybody, ["sum"]), "ids": ([0, 1], [0])}
    target = {"w": ([[0, 1], [2, 3]], [1, 0]), "b": ([2, 3], [0]), "ids": (everybody, [None])}
    parts = {name: part(source[name], comm.rank, whole) for name, whole in wholes.items()}
    before = comm.stats()["operators"]
    found = reshard_state({k: x and x[0] for k, x in parts.items()}, source, target, group=comm)
    assert comm.stats()["operators"] - before == 1 + 3  # the comparison; float64 twice, int64 once
    wholes["b"] = wholes["b"] * comm.size
    for name, whole in wholes.items():
        wanted = part(target[name], comm.rank, whole)
        assert (found[name] is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_array_equal(np.asarray(found[name]), wanted[0], name)


@on_ranks(2)
def test_a_large_state_takes_more_exchanges(comm: Communicator) -> None:
    """So that what is packed for one of them stays small."""
    exchanges = []
    for rows in (2, 10 << 20):  # of both large tensors together 16 bytes, and 80 MiB
        wholes = {name: np.arange(n, dtype=np.float32) for name, n in (("a", rows), ("b", rows), ("bias", 2))}
        before = comm.stats()["operators"]
        parts = {name: np.split(whole, 2)[comm.rank] for name, whole in wholes.items()}
        found = reshard_state(parts, ([0, 1], [0]), ([0, 1], [None]), group=comm)
        exchanges.append(comm.stats()["operators"] - before)
        assert all(np.array_equal(found[name], whole) for name, whole in wholes.items())
    assert exchanges[1] == exchanges[0] + 1


@on_ranks(2)
def test_what_is_refused(comm: Communicator) -> None:
    """The same error on every rank, whoever is wrong; the communicator stays usable."""
    x, good = np.ones((2, 3)), ([0, 1], [0])
    own = 0 if comm.rank else 1
    trouble: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (x, 7, good, InvalidParamError, "source is 7, expected a pair of a mesh of ranks and placements"),
        (x, ([0, 2], [0]), good, InvalidParamError, "expected ranks 0 to 1, each at most once"),
        (x, ([0.5], [0]), good, InvalidParamError, "expected ranks in at least one dimension"),
        (x, ([0, 1], [0, 1]), good, InvalidParamError, "source has 2 placements, expected 1"),
        (x, ([0, 1], ["mean"]), good, InvalidParamError, "source has the placement 'mean', expected a dimension"),
        (x, good, ([0, 1], [2]), InvalidParamError, "target divides dimension 2, expected one of shape"),
        (x, good, ([0, 1], ["max"]), InvalidParamError, "expected no terms but a sum's"),
        (x, good, ([0, 1], [own]), PeerMismatchError, r"x: rank 0 has .*target.*\(1,\).*rank 1 has .*\(0,\)"),
        (x.astype(f"int{8 << comm.rank}"), good, good, PeerMismatchError, "rank 0 has dtype int8, rank 1 has int16"),
        (x.astype(int), ([0, 1], ["avg"]), good, InvalidParamError, "x has dtype int64, expected one of fractions"),
        (None if comm.rank else x, good, good, InvalidTensorError, "x: rank 1 gives no part, expected one"),
        (x, ([0], [0]), good, InvalidTensorError, "x: rank 1 gives a part, expected None"),
        (x[: comm.rank], good, good, InvalidTensorError, r"x of rank 0 has shape \[0, 3\], expected \[1, 3\]"),
    ]
    for given_x, source, target, error, text in trouble:
        with pytest.raises(error, match=text):
            reshard(given_x, source, target, group=comm)
    formats: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (good, {"format": "int9"}, InvalidParamError, "bits is 9, expected"),
        (good, {"group_size": 32}, InvalidParamError, "group_size is 32 without a format, expected None"),
        (([0, 1], ["sum"]), {"format": "int8"}, InvalidParamError, "x has terms in its source, which have no format"),
        (
            good,
            {"format": ("int8", None)[comm.rank]},
            PeerMismatchError,
            "rank 0 has the format .*int8.* 1 has none",
        ),
    ]
    for source, options, error, text in formats:
        with pytest.raises(error, match=text):
            reshard(x.astype("float32"), source, good, group=comm, **options)
    plan = ReshardPlan([4, 3], np.float64, good, ([0, 1], [1]), group=comm)
    with pytest.raises(InvalidTensorError, match=r"x has shape and dtype .*expected \(\(2, 3\), 'float64'\).*A2A-2051"):
        plan(np.ones((2, 3), np.float32))
    for out, error, text in (
        (np.ones((4, 2)), InvalidTensorError, r"out for x has shape and dtype \(\(4, 2\), 'float64'\), expected"),
        (np.ones((4, 2), "int8"), InvalidTensorError, "int8"),
        (np.ones((2, 4)).T, InvalidTensorError, "out is not contiguous and writable"),
    ):
        with pytest.raises(error, match=text):
            plan(x, out if comm.rank else None)
    whole = ([0, 1], [None])
    with pytest.raises(InvalidParamError, match=r"output and input overlap in memory.*A2A-1085"):
        reshard(x, whole, whole, out=x, group=comm)
    found = plan(x * comm.rank)
    assert found is not None
    assert found[:, 0].tolist() == [0, 0, 1, 1]
