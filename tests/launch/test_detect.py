"""Which launcher started us, by recorded environments."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from environments import INTEL, MPICH, MSRUN, OPENMPI, OWN, PADDLE, SLURM, TORCHRUN, clean_environment

from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch.ancestry import ranks_here
from alltoallv.launch.detect import detect
from alltoallv.launch.job import Launch


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
    assert found == Launch(
        "torchrun", 5, 8, 1, "torchrun:none@10.0.0.1:29500", 2, 4, "10.0.0.1", 29500, name="none", by_address=True
    )
    assert detect(TORCHRUN | {"MASTER_PORT": "29501"}).job_id != found.job_id
    assert detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}).job_id != found.job_id
    assert detect(TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}).job_id == found.job_id


def test_msrun():
    found = detect(MSRUN)
    assert found == Launch(
        "msrun", 1, 2, 1, "msrun:127.0.0.1:8118", master_addr="127.0.0.1", master_port=8118, by_address=True
    )
    del (without := dict(MSRUN))["RANK_SIZE"]
    assert detect(without) == found
    assert detect({"RANK_ID": "0", "RANK_SIZE": "2"}).launcher == "msrun"


def test_paddle():
    found = detect(PADDLE)
    assert found == Launch("paddle", 1, 2, 1, "paddle:10.0.0.1:37000", 0, 2, "10.0.0.1", 37000, by_address=True)
    del (without := dict(PADDLE))["PADDLE_MASTER"]
    assert detect(without).job_id == "paddle:10.0.0.1:37001"


def test_openmpi():
    found = detect(OPENMPI)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("openmpi", 1, 2, 1, 2)
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
    assert found == Launch("slurm", 3, 4, 1, "slurm:77.0", master_addr="10.0.0.9", name="77.0")
    batch_script = {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_NTASKS": "4"}
    assert detect(batch_script).launcher == "single"


def test_lone_process():
    found = detect({})
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == ("single", 0, 1, 0, 1)
    command = [sys.executable, "-c", "from alltoallv.launch.detect import detect; print(detect({}).job_id)"]
    others = {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    assert len(others | {found.job_id}) == 3


def test_environ_is_the_default(monkeypatch):
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(OWN)


def test_first_launcher_in_the_order_wins():
    own = {"ALLTOALLV_WORLD_SIZE": "2"}
    everything = (
        OWN
        | own
        | TORCHRUN
        | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        | MSRUN
        | PADDLE
        | OPENMPI
        | MPICH
        | SLURM
    )
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
        (OWN | {"ALLTOALLV_RANK": "4"}, "ALLTOALLV_RANK is '4', expected less than ALLTOALLV_WORLD_SIZE, which is 4"),
        (OWN | {"ALLTOALLV_RANK": "-1"}, "ALLTOALLV_RANK is '-1', expected an integer of at least 0"),
        (OWN | {"ALLTOALLV_WORLD_SIZE": "0"}, "ALLTOALLV_WORLD_SIZE is 0, expected at least 1"),
        (OWN | {"ALLTOALLV_LOCAL_RANK": "a"}, "ALLTOALLV_LOCAL_RANK is 'a'"),
        (OWN | {"ALLTOALLV_LOCAL_WORLD_SIZE": "5"}, "give 5 ranks on this host, expected 1 to 4"),
        (OWN | {"ALLTOALLV_RESTART_COUNT": "1.5"}, "ALLTOALLV_RESTART_COUNT is '1.5'"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2' but RANK is not set"),
        (TORCHRUN | {"RANK": "8"}, "RANK is '8', expected less than WORLD_SIZE, which is 8"),
        (MSRUN | {"RANK_ID": "2"}, "RANK_ID is '2', expected less than RANK_SIZE, which is 2"),
        (
            MSRUN | {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK is '0' but RANK_ID is '1': the variables of torchrun and msrun contra",
        ),
        (OWN | {"RANK": "1", "WORLD_SIZE": "2"}, "ALLTOALLV_WORLD_SIZE is '4' but WORLD_SIZE is '2': the variables of"),
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
    with pytest.raises(InvalidParamError, match=re.escape(message)) as error:
        detect(env)
    assert error.value.code == 1


def test_world_size_alone_is_left_to_the_launcher_that_knows_the_rank():
    assert detect(SLURM | {"WORLD_SIZE": "4"}).launcher == "slurm"
    assert detect({"WORLD_SIZE": "1"}).size == 1


def test_own_variables_that_are_empty(monkeypatch):
    """They mean what unset ones do."""
    names = (
        *OWN, "ALLTOALLV_LOCAL_RANK", "ALLTOALLV_LOCAL_WORLD_SIZE", "ALLTOALLV_RESTART_COUNT", "ALLTOALLV_PATH",
        "ALLTOALLV_COPY_THREADS", "ALLTOALLV_WARN_AFTER", "ALLTOALLV_POOL", "ALLTOALLV_ALLOW_PTRACE",
        "ALLTOALLV_FLIGHT_DIR", "ALLTOALLV_TRACE", "ALLTOALLV_JOB_SECRET", "ALLTOALLV_ROOT_PORT",
        "ALLTOALLV_NPU_LIMITS", "ALLTOALLV_NPU_PRODUCT", "ALLTOALLV_TORCH_BACKEND", "ALLTOALLV_TEST_WITHOUT",
        "ALLTOALLV_BENCH_CACHE", "ALLTOALLV_EMULATOR_NPUS", "ALLTOALLV_ORDER",
    )  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "")
    assert detect().launcher == "single"
    assert detect(dict(os.environ) | {"RANK": "1", "WORLD_SIZE": "2"}).launcher == "torchrun"
    with Communicator.from_env("empty") as comm:
        assert comm.size == 1
