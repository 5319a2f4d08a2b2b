"""Whole jobs: under paddle.distributed.launch and under our launcher, groups and failures; and the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from started import check_grown_groups

JOBS = Path(__file__).parent / "jobs"
MOE = Path(__file__).resolve().parents[2] / "examples" / "moe_paddle.py"


def launch(launcher: str, folder: Path, *program: str, ranks: int = 2) -> tuple[int, list[str]]:
    """The exit status of a job, and what each of its ranks printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ALLTOALLV_", "PADDLE_"))}
    if launcher == "paddle":
        command = ["-m", "paddle.distributed.launch", f"--nproc_per_node={ranks}", f"--log_dir={folder / 'log'}"]
    else:
        command = ["-m", "alltoallv", "run", "-n", str(ranks)]
    done = subprocess.run(
        [sys.executable, *command, *program],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    if launcher == "paddle":
        return done.returncode, [(folder / "log" / f"workerlog.{r}").read_text() for r in range(ranks)]
    said = [re.findall(rf"^\[{r}\] (.*)$", done.stdout, re.MULTILINE) for r in range(ranks)]
    return done.returncode, ["\n".join(lines) for lines in said]


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [("paddle", ["init"]), ("alltoallv", []), pytest.param("paddle", [], marks=pytest.mark.slow)],
)
def test_groups(tmp_path: Path, launcher: str, arguments: list[str]) -> None:
    code, said = launch(launcher, tmp_path, str(JOBS / "program.py"), *arguments)
    for rank, text in enumerate(said):
        assert f"rank {rank} done" in text, "\n".join(said)
    assert code == 0


@pytest.mark.parametrize(
    ("how", "error", "launcher"),
    [
        ("killed", "PeerLostError", "paddle"),
        ("disagrees", "PeerMismatchError", "alltoallv"),
        pytest.param("killed", "PeerLostError", "alltoallv", marks=pytest.mark.slow),
        pytest.param("disagrees", "PeerMismatchError", "paddle", marks=pytest.mark.slow),
    ],
)
def test_a_failing_job_says_why_in_seconds(tmp_path: Path, launcher: str, how: str, error: str) -> None:
    code, said = launch(launcher, tmp_path, str(JOBS / "failures.py"), how)
    assert code != 0
    for text in said if how == "disagrees" else said[:1]:
        assert re.search(rf"alltoallv\.errors\.{error}: .*rank 1", text), "\n".join(said)
        seconds, values = re.search(r"ended after (\S+) s, (.*)", text).groups()
        assert float(seconds) < 30
        assert "a call has not failed" not in text
        assert values == "[-1.0, -1.0, -1.0, -1.0]"


def test_groups_beside_a_communicator_that_has_grown() -> None:
    check_grown_groups("paddle")


@pytest.mark.slow  # test_experts has the experts of four ranks on every change
def test_mixture_of_experts(tmp_path: Path) -> None:
    code, said = launch("paddle", tmp_path, str(MOE), "--steps", "4", ranks=4)
    assert code == 0, "\n".join(said)
    lines = [line for line in said[0].splitlines() if line.startswith(("step", "largest", "same"))]
    losses = [float(line.split()[-1]) for line in lines[:8]]
    assert lines[:4] == lines[4:8]  # 4 ranks, and one process
    assert losses[3] < 0.9 * losses[0]
    assert lines[-1] == "same losses"
