"""torch's own analysis of a trace that is exported as dumps of its flight recorder."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from torch.distributed.flight_recorder.components import builder, loader

import alltoallv
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v, barrier, broadcast
from alltoallv_tools.trace import torch_flight
from alltoallv_tools.trace.records import read


@pytest.fixture
def analysed(tmp_path, monkeypatch):
    """``analysed(folder)``: torch's database of a trace."""
    monkeypatch.setattr(builder, "tabulate", lambda data, headers=None: str(data), raising=False)

    def analyse(folder):
        torch_flight.write(read(folder), tmp_path / "dumps")
        arguments = argparse.Namespace(
            trace_dir=str(tmp_path / "dumps"),
            prefix="rank_",
            just_print_entries=False,
            allow_incomplete_ranks=False,
            mismatch_cap=10,
            verbose=False,
        )
        details, version = loader.read_dir(arguments)
        return builder.build_db(details, arguments, version)

    return analyse


def test_a_job_that_ended_well(ranks, tmp_path, analysed):
    def work(comm, folder):
        with alltoallv.trace(folder):
            all_to_all_v(np.ones(5 + comm.rank), [1, 2 + comm.rank, 2], group=comm)
            all_reduce(np.ones(7, np.float32), group=comm)
            broadcast(np.ones(3), 1, group=comm)
            all_gather(np.ones(3), group=comm)
            barrier(group=comm)

    ranks(3)(work, str(tmp_path / "trace"))
    found = analysed(tmp_path / "trace").collectives
    assert [one.collective_name.removeprefix("gloo:") for one in found] == [
        "all_to_all",
        "all_reduce",
        "broadcast",
        "all_gather",
        "barrier",
    ]
    assert all(one.pass_check for one in found)


def test_a_rank_that_calls_another_operator(ranks, tmp_path, analysed):
    def work(comm, folder):
        with alltoallv.trace(folder):
            barrier(group=comm)
            with pytest.raises(alltoallv.errors.PeerMismatchError):
                all_reduce(np.ones(4), group=comm) if comm.rank else barrier(group=comm)

    ranks(2)(work, str(tmp_path / "trace"))
    found = analysed(tmp_path / "trace").collectives
    assert [one.pass_check for one in found] == [True, False]
    (other,) = found[1].mismatch_collectives.values()
    assert other.type_of_mismatch.state.name == "COLLECTIVE_TYPE_MISMATCH"
