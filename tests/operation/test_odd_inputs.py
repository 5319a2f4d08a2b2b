"""Whatever a user or a launcher writes, the answer is a value or an error of the family, in one sentence."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_tables import device, table

from alltoallv import AllToAllVOperation, AllToAllVParam, Communicator, QuantAllReduceOperation, QuantAllReduceParam
from alltoallv.errors import AllToAllVError, BackendUnavailableError, InvalidParamError
from alltoallv.launch.detect import detect
from alltoallv.launch.job import Launch
from alltoallv.launch.rank_table import RankTable
from alltoallv.launch.variables import port
from alltoallv.npu_ops import limits

OWN = {"ALLTOALLV_RANK": "0", "ALLTOALLV_WORLD_SIZE": "1", "ALLTOALLV_JOB_ID": "odd"}
RANKS = '{"rank": 0, "rankSize": 1, '
DEEP = 100_000
numbers = itertools.count()


def of_device(**fields: Any) -> Callable[[], object]:
    return parse(table([device(0, 0, **fields)]))


def of_pods(members: Any) -> Callable[[], object]:
    pods = [{"super_pod_id": "p", "server_list": members}]
    return parse(table(1, pods=1) | {"super_pod_list": pods})


def parse(made: Any) -> Callable[[], object]:
    content = made if isinstance(made, bytes) else json.dumps(made).encode()
    return lambda: RankTable.parse(content)


def of_rank(**fields: Any) -> Callable[[], object]:
    return lambda: AllToAllVParam(**{"rank": 0, "rank_size": 1} | fields)


CASES: dict[str, Callable[[], object]] = {
    "a lone surrogate in JSON": lambda: AllToAllVParam.from_json(RANKS + '"commDomain": "\\ud800"}'),
    "a lone surrogate in quantized JSON": lambda: QuantAllReduceParam.from_json(RANKS + '"backend": "\\ud800"}'),
    "counts of 65 bits": of_rank(send_counts=[2**64]),
    "counts below 64 bits": of_rank(send_counts=[-(2**70)]),
    "a rank of 41 bits": of_rank(rank=2**40),
    "a domain with a surrogate": of_rank(comm_domain="\ud800"),
    "an assigned count": lambda: setattr(AllToAllVParam(), "recv_counts", [2**63]),
    "a quantized type of 51 bits": lambda: QuantAllReduceParam(rank_size=1, quant_type=2**50).core(),
    "no rank of a quantized sum": lambda: QuantAllReduceOperation(
        QuantAllReduceParam(rank_size=0, rank_table_file="/etc/hostname", quant_type=16)
    )(np.ones(256, "float32")),
    "a group size of 71 bits": lambda: QuantAllReduceParam(rank_size=1, group_size=2**70).core(),
    "a table's list for an id": of_device(rank_id=[1]),
    "a table's list for an address": of_device(device_ip=[1]),
    "a table's number for an address": of_device(device_ip=17),
    "a table's long number": of_device(rank_id="9" * 5000),
    "a table's surrogate": parse(table(server_list=[{"server_id": "\ud800", "device": [{}]}], server_count="1")),
    "a table's pod of lists": of_pods(["a"]),
    "a table's pod of lists of ids": of_pods([{"server_id": ["a"]}]),
    "a table's version": parse(table(1, version=["1.0"])),
    "a deep table": parse(b"[" * DEEP),
    "a table in another encoding": parse(b"\xff\xfe\x00"),
    "a table's path with a zero byte": lambda: RankTable.load("a\0b"),
    "a folder for a table": lambda: RankTable.load("/"),
    "a job that is no UTF-8": lambda: detect(OWN | {"ALLTOALLV_JOB_ID": "\udcff"}),
    "torchrun's job that is no UTF-8": lambda: detect(
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "\udcff"}
    ),
    "a host that is no UTF-8": lambda: detect(OWN | {"MASTER_ADDR": "\udcff"}),
    "a long rank": lambda: detect(OWN | {"ALLTOALLV_RANK": "9" * 5000}),
    "a world size of 100 bits": lambda: detect(OWN | {"ALLTOALLV_WORLD_SIZE": "9" * 30}),
    "a domain that is no text": lambda: Communicator.threads(1, 5),  # type: ignore[arg-type]
    "too many threads": lambda: Communicator.threads(2**70),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(InvalidParamError) as caught:
        CASES[name]()
    text = str(caught.value)
    text.encode()  # may be printed anywhere
    assert "\n" not in text.strip()
    assert len(text) < 800


VARIABLES = {
    "ALLTOALLV_WARN_AFTER": ("abc", "-1", "nan", "0", "\udcff"),
    "ALLTOALLV_COPY_THREADS": ("abc", "-1", "9" * 30, "1.5"),
    "ALLTOALLV_POOL": ("abc", "2"),
    "ALLTOALLV_ALLOW_PTRACE": ("yes",),
    "ALLTOALLV_PATH": ("abc", "\udcff"),
    "ALLTOALLV_FLIGHT_DIR": ("/nonexistent", "/etc/passwd"),
    "ALLTOALLV_JOB_SECRET": ("\udcff",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VARIABLES.items() for value in values])
def test_variables_with_nonsense(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known, text in (OWN | {name: value}).items():
        monkeypatch.setenv(known, text)
    with pytest.raises(InvalidParamError, match=name):
        Communicator.from_env(f"odd-{next(numbers)}", timeout=3)


@pytest.mark.parametrize("value", ["abc", "0", "65536", "9" * 5000])
def test_ports_with_nonsense(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLTOALLV_ROOT_PORT", value)
    with pytest.raises(InvalidParamError, match="ALLTOALLV_ROOT_PORT is"):
        port("ALLTOALLV_ROOT_PORT", 1)


@pytest.mark.parametrize("name", ["ALLTOALLV_NPU_LIMITS", "ALLTOALLV_NPU_PRODUCT", "HCCL_BUFFSIZE"])
def test_devices_with_nonsense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "abc")
    with pytest.raises(InvalidParamError, match=f"{name} is 'abc'"):
        limits.buffer_mb() if name == "HCCL_BUFFSIZE" else limits.check(lambda product: [])


def test_a_traced_folder_that_cannot_be_made() -> None:
    """Tracing is no reason to stop a job: it warns."""
    program = "import numpy as np\nfrom alltoallv.numpy import all_reduce\nprint(all_reduce(np.ones(1)))\n"
    env = os.environ | OWN | {"ALLTOALLV_TRACE": "/proc/nonexistent/folder"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "nothing is traced" in ended.stderr


def run_operation(**fields: Any) -> None:
    whole = {"send_counts": [1, 1], "sdispls": [0, 1], "recv_counts": [1, 1], "rdispls": [0, 1]}
    AllToAllVOperation(AllToAllVParam(**{"rank_size": 2, "backend": "shm"} | whole | fields))(np.ones(2, np.float32))


def test_threads_in_a_job_of_processes(ranks: Any) -> None:
    """They would wait in vain for each other."""

    def work(rank: int, size: int) -> str:
        try:
            run_operation(rank=rank, comm_mode=1)
        except InvalidParamError as error:
            return str(error)
        return "none"

    for text in ranks(2, communicator=False)(work):
        assert "comm_mode is MULTI_THREAD" in text
        assert "expected MULTI_PROCESS" in text


@pytest.mark.parametrize(
    ("servers", "error", "text"),
    [
        ([2], None, ""),
        ([3], InvalidParamError, "lists 3 ranks, expected 2"),
        ([1, 1], BackendUnavailableError, "has 1 of 2 ranks on the server of rank 0"),
        (None, InvalidParamError, "names a path that does not exist"),
    ],
)
def test_a_rank_table_is_read_on_cpu(servers: Any, error: Any, text: str, ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    if servers is not None:
        path.write_text(json.dumps(table(*servers)))

    def work(rank: int, size: int) -> str:
        try:
            run_operation(rank=rank, rank_table_file=str(path), comm_domain=f"table-{path.parent.name}")
        except AllToAllVError as caught:
            return f"{type(caught).__name__}: {caught}"
        return ""

    found = ranks(2, communicator=False)(work)[0]
    assert found.startswith(error.__name__ if error else "")
    assert text in found if error else found == ""


def test_job_ids_are_shown_as_ascii() -> None:
    with pytest.raises(InvalidParamError, match=r"job id .* is '\\udcff', expected text in UTF-8.*A2A-1301"):
        Launch("torchrun", 0, 1, 0, "\udcff")
