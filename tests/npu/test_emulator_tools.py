"""What programs ask a machine with NPUs for beside torch_npu: the product, npu-smi and pyACL."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import alltoallv_emulator as emulator

NAMES = {"": "Ascend910_9391", "A2": "Ascend910B1", "950": "Ascend950DT_9591"}


def run(*command: str, product: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in the emulator's environment."""
    env = emulator.environment(**options) | ({"ALLTOALLV_NPU_PRODUCT": product} if product else {})  # type: ignore[arg-type]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)


def smi(*arguments: str, product: str = "") -> str:
    result = run("npu-smi", "info", *arguments, product=product, devices=4, memory_mb=512)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("product", ["A2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", "950"))])
def test_the_product_is_the_same_everywhere(product: str) -> None:
    """torch_npu's names, pyACL's, npu-smi's, and the limits that operators check."""
    program = (
        "import torch, torch_npu, acl\n"
        "from alltoallv.npu_ops import limits\n"
        "print(torch.npu.get_device_name(), torch_npu.npu.get_soc_version(), limits.product(), acl.get_soc_name())\n"
    )
    result = run(sys.executable, "-c", program, product=product)
    assert result.returncode == 0, result.stderr
    name, version, limits, of_acl = result.stdout.split()[-4:]
    assert name == of_acl == NAMES[product]
    # As vllm-ascend tells the products apart.
    versions = {"A2": range(220, 226), "A3": range(250, 256), "950": range(260, 261)}
    assert int(version) in versions[limits]
    board = dict(re.findall(r"^\s*(.+?)\s*: (.+)$", smi("-t", "board", "-i", "0", product=product), re.MULTILINE))
    if limits == "A2":
        assert board["Chip Type"] + board["Chip Name"] == name
    else:
        assert f"{board['Chip Name']}_{board['NPU Name']}" == name


def test_npu_smi_shows_the_devices() -> None:
    """In the table, the lists and the values that programs parse."""
    table = smi(product="A2")
    assert re.findall(r"^\|\s*(\d+)\s+910", table, re.MULTILINE) == ["0", "1", "2", "3"]
    memory = re.findall(r"\|\s*\d+\s+\|\s+[\w:.]+\s+\|\s+\d+\s+\d+\s*/\s*\d+\s+(\d+)\s*/\s*(\d+)", table)
    assert memory == [("0", "512")] * 4
    assert [line.split() for line in smi("-m", product="A2").splitlines()[1:]] == [
        [str(i), "0", str(i), "Ascend", "910B1"] for i in range(4)
    ]
    assert [line.split() for line in smi("-m", product="A3").splitlines()[1:]] == [
        [str(i // 2), str(i % 2), str(i), str(i), "Ascend910"] for i in range(4)
    ]
    assert re.findall(r"NPU ID\s+: (\d+)", smi("-l", product="A3")) == ["0", "1"]
    assert re.search(r"HBM Capacity\(MB\)\s+: 512", smi("-t", "usages", "-i", "1", "-c", "1", product="A3"))
    wrong = run("npu-smi", "info", "-t", "board", "-i", "9")
    assert wrong.returncode == 1
    assert "there is no chip 0 of NPU 9" in wrong.stderr
    assert run("npu-smi", "set", "-t", "reset").returncode == 2


PYACL = """
import acl, numpy as np, torch, torch_npu
from acl.rt import memcpy
acl.init()  # torch_npu may have done so
assert acl.rt.get_device_count() == (8, 0)
assert acl.rt.set_device(1) == 0 and acl.rt.get_device() == (1, 0)
free, total, ret = acl.rt.get_mem_info(1)
assert ret == 0 and 0 < free <= total
stream, ret = acl.rt.create_stream()
memory, ret = acl.rt.malloc(64, 0)
numbers, back = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
assert memcpy(memory, 64, acl.util.numpy_to_ptr(numbers), 64, 1) == 0
assert acl.rt.memcpy_async(acl.util.numpy_to_ptr(back), 64, memory, 64, 2, stream) == 0
assert acl.rt.synchronize_stream(stream) == 0
assert (back == numbers).all()
assert acl.util.ptr_to_bytes(acl.util.numpy_to_ptr(back), 8) == numbers[:2].tobytes()
seen = acl.util.ptr_to_numpy(acl.util.numpy_to_ptr(back), (4, 4), np.dtype(np.float32).num)
assert (seen == numbers.reshape(4, 4)).all()
assert acl.rt.memcpy(memory, 8, acl.util.numpy_to_ptr(numbers), 64, 1) != 0 and "64" in acl.get_recent_err_msg()
assert acl.rt.free(memory) == acl.rt.destroy_stream(stream) == 0
x = torch.arange(4.0, device="npu:1")  # memory of torch_npu's
torch.npu.synchronize()
assert memcpy(acl.util.numpy_to_ptr(back), 16, x.data_ptr(), 16, 2) == 0 and (back[:4] == [0, 1, 2, 3]).all()
for call in (lambda: acl.mdl, lambda: acl.rt.no_such, lambda: memcpy(1)):
    try:
        call()
    except (AttributeError, TypeError) as error:
        print(error)
"""


def test_a_program_calls_pyacl() -> None:
    result = run(sys.executable, "-c", PYACL)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-3:] == [
        "acl.mdl is not among what the emulator has of pyACL: see docs/emulator.md",
        "acl.rt.no_such is not among what the emulator has of pyACL: see docs/emulator.md",
        "aclrtMemcpy of pyACL takes 5 arguments, and 1 are given",
    ]
