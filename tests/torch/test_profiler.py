"""Named ranges in torch.profiler, and none where nobody looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from on_ranks import on_ranks
from torch.profiler import profile

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.testing import Ranks
from alltoallv.torch.eager.observers import span


def _ranges(profiler: Any) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for event in profiler.events():
        if event.name.startswith("alltoallv."):
            found.setdefault(event.name.removeprefix("alltoallv."), []).append(event.kwinputs)
    return found


def test_every_collective_is_a_range(ranks: Ranks, tmp_path: Path) -> None:
    def check(comm: Communicator, folder: str) -> None:
        rank = comm.rank
        x = torch.arange(6.0)
        with profile(record_shapes=True) as profiler:
            at.all_to_all_v(x, [2, 4], [2 + 2 * rank] * 2, group=comm)
            at.all_to_all_v(x[:1].half(), [1, 0], group=comm)
            at.all_to_all_single(torch.empty(6), x, group=comm)
            at.all_to_all([torch.empty(3), torch.empty(3)], list(x.split(3)), group=comm)
            at.all_gather_into_tensor(torch.empty(12), x, group=comm)
            at.exchange_counts([1, 2], comm)
            at.functional.all_reduce(x, comm)
            at.functional.reduce_scatter(x, comm)
            at.functional.all_gather(x, comm)
        ranges = _ranges(profiler)
        known, learnt = ranges["all_to_all_v"]
        received = 2 + 2 * rank
        assert known == {
            "group": comm.domain,
            "rank": rank,
            "bytes_sent": 24,
            "send_counts": "[2, 4]",
            "bytes_received": 8 * received,
            "recv_counts": f"[{received}, {received}]",
        }
        assert learnt == {"group": comm.domain, "rank": rank, "bytes_sent": 2, "send_counts": "[1, 0]"}
        numbers = {name: len(calls) for name, calls in ranges.items()}
        assert numbers == {
            "all_to_all_v": 2,
            "all_to_all_single": 1,
            "all_to_all": 1,
            "all_gather_into_tensor": 2,
            "exchange_counts": 1,
            "all_reduce": 1,
            "reduce_scatter": 1,
        }
        assert ranges["all_reduce"][0]["bytes_received"] == 24

        path = f"{folder}/{rank}.json"
        profiler.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
        traced = [event["args"] for event in events if event.get("name") == "alltoallv.all_to_all_v"]
        assert traced[0]["send_counts"] == "[2, 4]"

    ranks(2)(check, str(tmp_path))


@on_ranks(2)
def test_gradients_and_asynchronous_calls(comm: Communicator) -> None:
    x = torch.ones(4, requires_grad=True)
    with profile(record_shapes=True) as profiler:
        at.all_to_all_v(x, [1, 3], [1 + 2 * comm.rank] * 2, group=comm).sum().backward()
        _, work = at.all_to_all_v(x.detach(), [2, 2], [2, 2], group=comm, async_op=True)
        work.wait()
    ranges = _ranges(profiler)
    forward, backward, launch = ranges["all_to_all_v"]
    assert (forward["send_counts"], backward["recv_counts"]) == ("[1, 3]", "[1, 3]")
    assert launch["async"] == "True"
    assert len(ranges["wait"]) == 1


def test_ranges_add_up_by_name(ranks: Ranks) -> None:
    """The name carries no numbers, so that the profiler's table has one line per operator."""

    def check(comm: Communicator) -> int:
        with profile() as profiler:
            for n in range(5):
                at.all_to_all_v(torch.ones(2 * n), [n, n], group=comm)
        return {row.key: row.count for row in profiler.key_averages()}["alltoallv.all_to_all_v"]

    assert ranks(2)(check) == [5, 5]


def test_many_counts_are_cut() -> None:
    (comm,) = Communicator.threads(1)
    with profile(record_shapes=True) as profiler, span("all_to_all_v", comm, 1, [7] * 1000, [0] * 64):
        pass
    (values,) = _ranges(profiler)["all_to_all_v"]
    assert values["send_counts"] == "[" + "7, " * 64 + "...]"
    assert values["recv_counts"] == str([0] * 64)
    assert values["bytes_sent"] == 7000
