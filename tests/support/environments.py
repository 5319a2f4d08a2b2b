"""Variables that launchers gave their ranks, recorded, and an environment without any."""

from __future__ import annotations

import os

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
