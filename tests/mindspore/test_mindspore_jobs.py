"""Whole jobs of msrun: MindSpore's own collectives as oracle, failures, the example."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msrun_jobs import HERE, REPORT, msrun

JOBS = HERE / "jobs"
EXAMPLES = HERE.parent.parent / "examples"


@pytest.mark.slow  # tests/matrix has the values
def test_against_mindspores_own_collectives(tmp_path: Path) -> None:
    job = msrun(tmp_path, 2, JOBS / "oracle.py")
    assert job.code == 0, "\n".join(job.logs.values())[-5000:]
    medians = json.loads(re.search(r"MEDIANS (.*)", job.logs["worker_0.log"]).group(1))
    times = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in medians.items())
    REPORT.append(f"medians of one run, 1 MiB from each of 2 ranks: {times}")
    assert len(medians) == 4, medians


def test_a_program_for_npus_as_it_is(tmp_path: Path) -> None:
    """mint.distributed.init_process_group() comes up on CPU; nothing warns at each call."""
    job = msrun(tmp_path, 2, EXAMPLES / "mindspore_on_cpu.py", str(JOBS / "for_npus.py"))
    assert job.code == 0, "\n".join(job.logs.values())[-5000:]
    for rank in range(2):
        assert job.logs[f"worker_{rank}.log"] == "ran on CPU\n"


def test_the_example_of_mindspores_documentation(tmp_path: Path) -> None:
    job = msrun(tmp_path, 2, EXAMPLES / "mindspore_on_cpu.py", str(JOBS / "mint_example.py"))
    assert job.code == 0, "\n".join(job.logs.values())[-5000:]
    row = "1. 1. 1. 1. 1. 1. 1. 1."
    for rank in range(2):
        assert job.logs[f"worker_{rank}.log"].split() == f"[[{row}] [{row}] [{row}] [{row}]]".split()


@pytest.mark.parametrize(("how", "error"), [("killed", "PeerLostError"), ("disagrees", "PeerMismatchError")])
def test_a_failing_job_says_why_in_seconds(tmp_path: Path, how: str, error: str) -> None:
    """Every log but that of a killed worker names the rank and the error."""
    job = msrun(tmp_path, 3, JOBS / "failures.py", how)
    assert job.code != 0
    for worker in (0, 2) if how == "killed" else (0, 1, 2):
        text = job.logs[f"worker_{worker}.log"]
        assert re.search(rf"alltoallv\.errors\.{error}: .*rank 1", text), text
        assert float(re.search(r"ended after (\S+) s", text).group(1)) < 5


def test_subgroups(tmp_path: Path) -> None:
    job = msrun(tmp_path, 3, JOBS / "subgroups.py")
    assert job.code == 0, "\n".join(job.logs.values())[-5000:]
    for worker in range(3):
        assert "groups agree" in job.logs[f"worker_{worker}.log"]


@pytest.mark.slow
def test_mixture_of_experts(tmp_path: Path) -> None:
    job = msrun(tmp_path, 4, EXAMPLES / "moe_mindspore.py", "--epochs", "1", "--batch", "600", timeout=200)
    assert job.code == 0, "\n".join(job.logs.values())[-5000:]
    said = job.logs["worker_0.log"].splitlines()
    assert said[0] == "4 ranks, 8 experts, 1 epochs of 1,797 digits"
    assert said[-1] == "same losses"
    assert float(re.search(r"largest difference (\S+),", job.logs["worker_0.log"]).group(1)) <= 1e-9


@pytest.mark.parametrize(
    ("example", "ranks", "said"),
    [
        pytest.param("transposition_mindspore.py", 3, "same as one process", marks=pytest.mark.slow),
        pytest.param("tensor_parallel_mindspore.py", 2, "int8 changes the last loss by", marks=pytest.mark.slow),
        ("moe_cell_mindspore.py", 2, "the first epoch's loss in PyNative differs by"),
    ],
)
def test_trained_in_a_graph(example: str, ranks: int, said: str, tmp_path: Path) -> None:
    """Each says itself whether it has learnt, and what it should."""
    job = msrun(tmp_path, ranks, EXAMPLES / example, timeout=240)
    assert job.code == 0, "\n".join(job.logs.values())[-5000:]
    assert said in job.logs["worker_0.log"].splitlines()[-1]
