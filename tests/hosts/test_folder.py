"""A communicator whose data go between hosts through files of a folder that they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

import alltoallv.numpy as av
from alltoallv import Communicator
from alltoallv.launch.folder import Engine, Piece
from alltoallv.testing import reference
from alltoallv.testing.hosts import Host, HostRanks

SIZE, ROWS, CALLS = 3, 100_000, 3
PLACES = [0, 1, 0]  # the host of every rank


def main(folder: Path, rank: int) -> None:
    """On each rank: exchanges and a reduction, of far more than what travels with a call's row."""
    sent: list[int] = []  # bytes
    begin = Engine.begin

    def counted(engine: Engine, out: Sequence[Piece], into: Sequence[Piece]) -> None:
        sent.append(sum(count for _, _, count in out))
        begin(engine, out, into)

    Engine.begin = counted  # type: ignore[method-assign]
    inputs = [np.random.default_rng(j).standard_normal((SIZE * ROWS, 2)).astype("float32") for j in range(SIZE)]
    with Communicator.from_folder(folder, rank, SIZE, timeout=60) as comm:
        assert comm.backend == "folder"
        for _ in range(CALLS):
            out = np.empty_like(inputs[rank])
            av.all_to_all_single(out, inputs[rank], group=comm)
            assert out.tobytes() == reference.all_to_all_single(inputs)[rank].tobytes()
        elsewhere = sum(place != PLACES[rank] for place in PLACES)
        assert sum(sent) == CALLS * elsewhere * inputs[rank].nbytes // SIZE
        total = av.all_reduce(inputs[rank], group=comm)
        assert total.tobytes() == reference.all_reduce(inputs)[rank].tobytes()
        av.barrier(group=comm)
    print("right")


def test_files_carry_what_goes_between_hosts(
    two_hosts: Callable[..., AbstractContextManager[list[Host]]], tmp_path: Path
) -> None:
    with two_hosts() as hosts:
        programs = [HostRanks(__file__, [hosts[place]], str(tmp_path), str(j)) for j, place in enumerate(PLACES)]
        assert [text for one in programs for text in one.outputs()] == ["right\n"] * SIZE
    assert list(tmp_path.iterdir()) == []  # every file has been read


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
