"""Coverage-guided fuzzing (atheris) of what reads text: ``python tests/fuzz/parsers.py -runs=1000000 FOLDER``.

Rank tables, the JSON of operators' params, domain names and launchers' variables: whatever they hold, the answer is a
value or an error of the family. Arguments are libFuzzer's, last the folder for
inputs that reach something new. ``nox -s fuzz`` runs this, and the bootstrap's messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["alltoallv.launch", "alltoallv.atb", "alltoallv.communicator", "json"]):
    from alltoallv import AllToAllVParam, QuantAllReduceParam
    from alltoallv.errors import AllToAllVError
    from alltoallv.launch.detect import detect
    from alltoallv.launch.options import make_options
    from alltoallv.launch.rank_table import RankTable

NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ALLTOALLV_RANK", "ALLTOALLV_WORLD_SIZE",
    "ALLTOALLV_JOB_ID", "ALLTOALLV_LOCAL_RANK", "ALLTOALLV_LOCAL_WORLD_SIZE", "ALLTOALLV_RESTART_COUNT",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "MS_WORKER_NUM", "MS_NODE_ID", "MS_ROLE", "PMI_RANK",
    "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "RANK_ID", "RANK_SIZE",
)  # fmt: skip
FILE = f"/dev/shm/alltoallv-fuzz-{os.getpid()}"


def read_table(data: bytes) -> None:
    with open(FILE, "wb") as file:
        file.write(data)
    RankTable.load(FILE)


def read_param(data: bytes) -> None:
    AllToAllVParam.from_json(data)


def read_quantized(data: bytes) -> None:
    QuantAllReduceParam.from_json(data)


def read_domain(data: bytes) -> None:
    make_options(data.decode("utf-8", "surrogateescape"))


def read_launcher(data: bytes) -> None:
    given = atheris.FuzzedDataProvider(data)
    detect({name: given.ConsumeUnicode(12) for name in NAMES if given.ConsumeBool()})


READERS = read_table, read_param, read_quantized, read_domain, read_launcher


def one_input(data: bytes) -> None:
    if data:
        with contextlib.suppress(AllToAllVError):
            READERS[data[0] % len(READERS)](data[1:])


def seeds() -> list[bytes]:
    """Inputs that are right, for the fuzzer to change."""
    devices = [{"device_id": "0", "device_ip": "10.0.0.1", "rank_id": "0"}]
    server = {"server_id": "node-0", "host_ip": "10.0.0.2", "device": devices}
    table = {"status": "completed", "version": "1.0", "server_count": "1", "server_list": [server]}
    pods = [{"super_pod_id": "pod-0", "server_list": [{"server_id": "node-0"}]}]
    super_table = {**table, "version": "1.2", "super_pod_list": pods}
    param = AllToAllVParam(rank=0, rank_size=1, send_counts=[1], sdispls=[0], recv_counts=[1], rdispls=[0]).to_json()
    quantized = QuantAllReduceParam(rank=0, rank_size=2).to_json()
    texts = [json.dumps(table), json.dumps(super_table), param, quantized, "name:200"]
    return [bytes([reader]) + text.encode() for reader, text in zip((0, 0, 1, 2, 3), texts, strict=True)]


if __name__ == "__main__":
    for number, seed in enumerate(seeds()):
        (Path(sys.argv[-1]) / f"seed-{number}").write_bytes(seed)
    try:
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
    finally:
        if os.path.exists(FILE):
            os.unlink(FILE)
