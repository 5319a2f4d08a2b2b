"""Whole jobs: groups, MindSpore's own collectives between ours, failures, examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msrun_jobs import HERE, msrun, outputs
from started import alltoallv, check_grown_groups

JOBS = HERE / "jobs"
EXAMPLES = HERE.parent.parent / "examples"


def test_a_program_for_npus_as_it_is(tmp_path: Path) -> None:
    """mint.distributed.init_process_group() comes up on CPU; nothing warns at each call.

    Here, as in every job, msrun's scheduler also runs the program, and has to leave it.
    """
    program = str(JOBS / "for_npus.py")
    assert outputs(tmp_path, 2, EXAMPLES / "mindspore_on_cpu.py", program) == ["ran on CPU\n"] * 2


def test_a_failing_job_says_why_in_seconds(tmp_path: Path) -> None:
    """The log of every other worker names the rank that was killed; rank and size stay what they were."""
    job = msrun(tmp_path, 3, JOBS / "failures.py")
    assert job.code != 0
    for worker in (0, 2):
        text = job.logs[f"worker_{worker}.log"]
        assert re.search(r"alltoallv\.errors\.PeerLostError: .*rank 1", text), text
        assert float(re.search(r"ended after (\S+) s", text).group(1)) < 30
        assert "a call has not failed" not in text
        assert f"is {worker} of 3, True" in text


def test_a_rank_that_dies_in_a_graph_is_named(tmp_path: Path) -> None:
    """At once: msrun kills the others before MindSpore has passed the error on."""
    job = msrun(tmp_path, 2, JOBS / "graph_failure.py")
    assert job.code != 0
    (said,) = [line for line in job.logs["worker_0.log"].splitlines() if line.startswith("alltoallv: ")]
    assert re.search(r"domain '.*': rank 1 was lost: .*rank 1 \(pid \d+, gone", said), said


def test_subgroups_beside_mindspores_own_collectives(tmp_path: Path) -> None:
    for said in outputs(tmp_path, 3, JOBS / "subgroups.py"):
        assert "groups agree" in said


def test_groups_beside_a_communicator_that_has_grown() -> None:
    check_grown_groups("mindspore")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "ranks", "said"),
    [
        ("moe_mindspore.py --epochs 1 --batch 600", 4, "same losses"),
        ("transposition_mindspore.py", 3, "same as one process"),
        ("tensor_parallel_mindspore.py", 2, "int8 changes the last loss by"),
        ("moe_cell_mindspore.py", 2, "the first epoch's loss in PyNative differs by"),
    ],
)
def test_examples_that_train(example: str, ranks: int, said: str) -> None:
    """Each says itself whether it has learnt, and what it should.

    Without msrun, which imports MindSpore for itself and for its scheduler; the other jobs have it.
    """
    program, *arguments = example.split()
    done = alltoallv("run", "-n", str(ranks), "--no-prefix", str(EXAMPLES / program), *arguments, limit=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert said in done.stdout.splitlines()[-1]
