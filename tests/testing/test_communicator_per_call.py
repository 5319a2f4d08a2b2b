"""The fixture ``ranks`` with its communicators: golden cases through the operator, ranks that die in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from alltoallv.errors import PeerLostError
from alltoallv.testing import RankExit, RankFailures, RankTimeout, golden


def exchange(communicator, cases):
    """Every case's output on this rank."""
    from alltoallv.numpy import all_to_all_v

    rank = communicator.rank
    results = []
    for case in cases:
        out = case.outputs[rank].copy()
        found = all_to_all_v(
            case.inputs[rank],
            case.send_counts[rank],
            case.recv_counts[rank],
            sdispls=case.sdispls[rank],
            rdispls=case.rdispls[rank],
            out=out,
            group=communicator,
        )
        assert found is out
        results.append(out)
    return results


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_golden_cases(ranks, size, threads):
    rng = np.random.default_rng(size)
    cases = [
        golden.random_case(rng, size, dtype, overlapping_sends=bool(k % 2)) for k, dtype in enumerate(golden.DTYPES)
    ]
    for rank, results in enumerate(ranks(size, threads=threads)(exchange, cases)):
        for case, found in zip(cases, results, strict=True):
            golden.assert_bits_equal(found, case.expected[rank], f"rank {rank}, {case!r}")


def test_every_call_has_its_own_communicator(ranks):
    def look(communicator):
        return communicator.rank, communicator.size, communicator.domain, os.getpid()

    for threads in (False, True):
        run = ranks(2, threads=threads)
        first, second, other = run(look), run(look), ranks(2, threads=threads)(look)
        assert [r[:2] for r in first] == [(0, 2), (1, 2)]
        assert [r[3] for r in first] == [r[3] for r in second] == [r[3] for r in other]
        assert first[0][2] == first[1][2] != other[0][2]
        assert ranks(2, threads=threads, domain="mine")(look)[0][2] == "mine"


def test_communicator_is_destroyed_afterwards(ranks):
    kept = []
    ranks(2, threads=True)(kept.append)
    assert [communicator.usable for communicator in kept] == [False, False]

    def fail(communicator):
        kept.append(communicator)
        raise ValueError

    with pytest.raises(RankFailures):
        ranks(2, threads=True)(fail)
    assert not any(communicator.usable for communicator in kept)


def test_options_reach_the_communicator(ranks):
    for options, message in (
        ({"check": "sometimes"}, "check is 'sometimes'"),
        ({"backend": "none"}, "backend is 'none'"),
        ({"path": "nonsense"}, "nonsense"),
        ({"comm_timeout": -1}, "timeout is -1"),
    ):
        with pytest.raises(RankFailures, match=message):
            ranks(1, **options)(lambda communicator: None)


@pytest.mark.parametrize("fresh", [False, True])
def test_killed_rank_is_lost_to_its_peers(ranks, fresh):
    def work(communicator):
        from alltoallv.numpy import barrier

        barrier(group=communicator)
        if communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(group=communicator)

    found = ranks(3, fresh=fresh, outcomes=True)(work)
    assert [type(o.error) for o in found] == [PeerLostError, RankExit, PeerLostError]
    assert found[1].exit_code == -signal.SIGKILL
    assert "1" in str(found[0].error)
    # The survivors' processes, too, can go on with new communicators.
    assert len(ranks(3)(lambda communicator: communicator.rank)) == 3


def test_failing_function_does_not_leave_its_peers_waiting(ranks):
    def work(communicator):
        from alltoallv.numpy import barrier

        if communicator.rank == 0:
            raise ValueError("no barrier for me")
        barrier(group=communicator)

    for threads in (False, True):
        began = time.monotonic()
        found = ranks(2, threads=threads, outcomes=True)(work)
        assert time.monotonic() - began < 10
        assert [type(o.error) for o in found] == [ValueError, PeerLostError]


def test_threads_that_hang_in_a_call_are_aborted(ranks):
    def work(communicator):
        from alltoallv.numpy import barrier

        if communicator.rank == 0:
            time.sleep(2.5)
        barrier(group=communicator)

    found = ranks(2, threads=True, timeout=1, outcomes=True)(work)
    assert type(found[1].error) is RankTimeout
    assert "barrier" in found[1].output or "barrier" in found[0].output


def test_the_launcher_with_a_communicator(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        """
import numpy as np
from alltoallv.numpy import all_to_all_single
import alltoallv
communicator = alltoallv.Communicator.from_env()
x = np.arange(4) + 4 * communicator.rank
out = np.empty_like(x)
all_to_all_single(out, x, group=communicator)
print(out.tolist())
"""
    )
    command = [sys.executable, "-m", "alltoallv", "run", "-n", "4", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert sorted(result.stdout.splitlines()) == [f"[{r}] [{r}, {4 + r}, {8 + r}, {12 + r}]" for r in range(4)]
    assert (result.stderr, result.returncode) == ("", 0)
