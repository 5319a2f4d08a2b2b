"""The doctor on this machine, and on machines with something missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import alltoallv
import alltoallv_emulator
from alltoallv import _core
from alltoallv_tools.cli import main
from alltoallv_tools.doctor import Check, kernel_bits, kernels, machine, npu_selftest, selftest, software
from alltoallv_tools.doctor.tested import TESTED

CASES = {
    "inline", "push", "pull", "cma", "staged",
    "auto, small", "auto, operator's output", "auto, private arrays",
}  # fmt: skip


def doctor(*arguments: str, wrapper: tuple[str, ...] = (), **kwargs) -> subprocess.CompletedProcess:
    command = [*wrapper, sys.executable, "-m", "alltoallv", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **kwargs)


def examined(expect: int = 0, **kwargs) -> tuple[dict, dict[str, dict]]:
    """Runs ``doctor --json``; returns the document and its checks by name."""
    result = doctor("--json", **kwargs)
    assert result.returncode == expect, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert document["works"] is (expect == 0)
    return document, {check["name"]: check for check in document["checks"]}


@pytest.fixture(scope="module")
def found() -> tuple[dict, dict[str, dict]]:
    """What one doctor has found here."""
    return examined()


def test_json(found):
    document, checks = found
    assert document["alltoallv"] == alltoallv.__version__
    assert len(checks) == len(document["checks"])
    for check in document["checks"]:
        assert set(check) == {"section", "name", "status", "detail", "advice", "required"}
        assert check["status"] in ("ok", "no", "-")
        assert check["detail"]
    for name in ("python", "numpy", "kernel", "extension", "memfd", "pidfd", "abstract sockets"):
        assert checks[name]["status"] == "ok"
        assert checks[name]["required"]
    assert ".".join(map(str, sys.version_info[:3])) in checks["python"]["detail"]
    assert "tested" in checks["python"]["detail"]
    assert "tested" in checks["numpy"]["detail"]
    assert os.uname().release in checks["kernel"]["detail"]
    assert f"affinity mask {len(os.sched_getaffinity(0))}" in checks["processors"]["detail"]
    assert "_core" in checks["extension"]["detail"]
    assert checks["matplotlib"]["status"] == "ok"
    for name in ("torch", "mindspore", "CANN", "libhccl.so", "NPU", "GPU", "launcher", "open files"):
        assert name in checks


def test_versions_are_tested_or_not(monkeypatch):
    assert software._stated("torch", "2.14.1+cpu") == "2.14.1+cpu, tested"
    known = "2.10, 2.11, 2.12, 2.13, 2.14, 2.15"
    assert software._stated("torch", "2.9.1") == f"2.9.1, untested: the tests run on {known}"
    assert software._stated("mpi4py", "4.1.2") == "4.1.2"
    assert software._stated("torch", "") == ""
    monkeypatch.setattr(software, "version_of", lambda name: {"torch": "3.0", "mindspore": "2.10.0"}.get(name, ""))
    lines = {check.name: check.detail for check in software.frameworks()}
    assert lines["torch"] == f"3.0, untested: the tests run on {known}"
    assert (lines["mindspore"], lines["paddle"]) == ("2.10.0, tested", "not installed")


def test_mpi4py_without_an_mpi(monkeypatch, tmp_path):
    """Its wheel brings no library, and then says so when MPI is imported."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: initialize = True")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "version_of", lambda name: "4.1.2" if name == "mpi4py" else "")
    (found,) = (check for check in software.frameworks() if check.name == "mpi4py")
    assert found.status == "no"
    assert found.detail == "4.1.2, whose MPI does not load: RuntimeError: cannot load MPI library"
    assert "pip install mpich" in found.advice


def test_pyproject_asks_for_what_is_tested():
    """The ranges begin with the oldest version in the table, and end with the newest where they are closed."""
    text = (Path(alltoallv.__file__).parents[2] / "pyproject.toml").read_text()
    lines = re.findall(r'^(?:dependencies|torch|mindspore|paddle) = \["(.+?)"', text, re.MULTILINE)
    given = {each.name: each for each in map(Requirement, lines)}
    for name, asked in (("numpy", "numpy"), ("torch", "torch"), ("mindspore", "mindspore"), ("paddle", "paddlepaddle")):
        pairs = sorted([int(part) for part in each.split(".")] for each in TESTED[name])
        range_of = given[asked].specifier
        assert all(range_of.contains(f"{major}.{minor}.0") for major, minor in pairs), name
        assert not range_of.contains(f"{pairs[0][0]}.{pairs[0][1] - 1}.9"), name
        assert name == "numpy" or not range_of.contains(f"{pairs[-1][0]}.{pairs[-1][1] + 1}.0"), name


def test_self_test(found):
    document, checks = found
    measured = document["self_test"]
    assert set(measured) == CASES
    for name, case in measured.items():
        assert case["correct"]
        assert case["seconds"] > 0
        assert sum(case["carried"].values()) == case["bytes"]
        assert name in checks
    for path in ("inline", "push", "pull", "staged"):
        assert list(measured[path]["carried"]) == [path]
        assert checks[path]["status"] == "ok"
    assert checks["cma"]["status"] == checks["process_vm_readv"]["status"]
    private = "cma" if checks["cma"]["status"] == "ok" else "staged"
    for case, path in (("small", "inline"), ("operator's output", "push"), ("private arrays", private)):
        assert list(measured[f"auto, {case}"]["carried"]) == [path]
        assert checks[f"auto, {case}"]["detail"].startswith(f"takes {path}: ")


def test_the_rule_of_the_kernels_and_what_it_gives_here(found):
    """One rule; on the emulator it gives the kernels, and here it describes what they lack."""
    _, checks = found
    assert checks["their rule"]["detail"] == _core.kernels_rule
    here = checks["kernels in Ascend C"]
    assert (here["status"], here["detail"]) == ("-", f"do not serve here: {_core.kernels_missing()}")
    assert "libascendcl.so" in here["detail"]
    _, checks = examined(env=alltoallv_emulator.environment())
    assert checks["kernels in Ascend C"]["status"] == "ok"


def test_lines():
    result = doctor()
    assert result.returncode == 0
    first, *lines, last = [line for line in result.stdout.splitlines() if line]
    assert first == f"alltoallv {alltoallv.__version__}"
    assert last == "The shm backend works here."
    checks = [line for line in lines if line.startswith(" ")]
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings == [
        "versions", "machine", "kernel", "limits", "environment", "frameworks", "devices", selftest.SECTION,
    ]  # fmt: skip
    for line in checks:
        assert re.fullmatch(r"  (ok|no|- )  \S.*  \S.*", line)
    assert len(checks) > 30


def test_without_extension(tmp_path):
    source = Path(alltoallv.__file__).parent
    shutil.copytree(source, tmp_path / "alltoallv", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # Empty, not absent: an editable installation would find the one that was built.
    (tmp_path / f"alltoallv/_core{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    document, checks = examined(expect=1, cwd=tmp_path)
    assert checks["extension"]["status"] == "no"
    assert "_core" in checks["extension"]["detail"]
    assert "pip install" in checks["extension"]["advice"]
    assert checks["numpy"]["status"] == "ok"
    assert checks["exchange"]["status"] == "no"
    assert document["self_test"] == {}
    text = doctor(cwd=tmp_path)
    assert text.returncode == 1
    assert text.stdout.splitlines()[-1] == "The shm backend does not work here."


def test_without_shared_outputs():
    """ALLTOALLV_POOL=0: push and pull cannot serve, the backend still works."""
    document, checks = examined(env=os.environ | {"ALLTOALLV_POOL": "0"})
    assert "ALLTOALLV_POOL=0" in checks["switches"]["detail"]
    for path in ("push", "pull"):
        assert checks[path]["status"] == "no"
        assert checks[path]["detail"].startswith("took staged instead")
        assert "ALLTOALLV_POOL" in checks[path]["advice"]
    assert "push" not in document["self_test"]["auto, operator's output"]["carried"]


def test_few_open_files():
    wrapper = ("sh", "-c", 'ulimit -n 256 && exec "$@"', "sh")
    _, checks = examined(wrapper=wrapper)
    assert checks["open files"]["status"] == "no"
    assert checks["open files"]["detail"].startswith("256 ")
    assert checks["open files"]["advice"] == "ulimit -n 1024"


def test_environment_is_read(monkeypatch, tmp_path):
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ALLTOALLV_RANK", "ALLTOALLV_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert software.environment()[0].detail == "torchrun: rank 2 of 4"
    monkeypatch.setenv("RANK", "9")
    launcher = software.environment()[0]
    assert launcher.status == "no"
    assert "9" in launcher.detail

    def cann() -> Check:
        return next(check for check in software.devices() if check.name == "CANN")

    assert "is not set" in cann().detail
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "nowhere"))
    assert cann().status == "no"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert cann().status == "ok"


def test_library_is_loaded_in_a_process_of_its_own():
    assert software._library("libc.so.6", True, "").status == "ok"
    wanted = software._library("libno-such-library.so", True, "install it")
    assert (wanted.status, wanted.advice) == ("no", "install it")
    assert "libno-such-library.so" in wanted.detail
    assert software._library("libno-such-library.so", False, "install it").status == "-"


def test_frameworks_are_not_imported():
    code = "import sys; from alltoallv_tools.doctor import software; software.frameworks(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert not loaded & {"torch", "torch_npu", "mindspore", "paddle", "mpi4py", "sklearn", "matplotlib", "numpy"}


def test_old_kernel_and_limits(monkeypatch):
    for release, status in (("5.4.0-150-generic", "no"), ("5.6.0", "ok"), ("6.18.44", "ok"), ("4.19.90-vhulk", "no")):
        monkeypatch.setattr(machine.platform, "release", lambda release=release: release)
        assert machine.kernel().status == status
    files = {"/sys/fs/cgroup/cpu.max": "150000 100000"}
    monkeypatch.setattr(machine, "read_text", lambda path: files.get(path, ""))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert machine.processors().detail.startswith("2 usable")
    assert "quota 1.5" in machine.processors().detail
    files = {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert "quota 1.5" in machine.processors().detail
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1"
    assert "no quota" in machine.processors().detail
    files["/sys/kernel/mm/transparent_hugepage/shmem_enabled"] = "always within_size [advise] never deny force"
    assert machine.huge_pages().status == "ok"
    files["/proc/meminfo"] = "MemTotal: 900000 kB\nMemAvailable:  102400 kB"
    assert machine.memory().status == "no"
    assert machine.memory().detail.startswith("0.1 GiB")


def test_checks_leave_nothing_behind():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(2):
        machine.checks()
    assert descriptors() <= before  # what other tests have left may go meanwhile
    assert f"alltoallv-doctor-{os.getpid()}-" not in Path("/proc/net/unix").read_text()


def test_a_report_that_cannot_be_written_is_told_before_the_test(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / npu_selftest.REPORT).mkdir()
    assert main(["doctor", "--selftest"]) == 2
    assert capsys.readouterr() == (
        "",
        f"doctor: --selftest is '{npu_selftest.REPORT}', expected a file in a folder that exists and can be written\n",
    )


def test_self_test_reports_why_ranks_failed(monkeypatch):
    monkeypatch.setenv("ALLTOALLV_WARN_AFTER", "soon")
    checks, measured = selftest.run()
    assert measured == {}
    assert [check.status for check in checks] == ["no"]
    assert "soon" in checks[0].detail
    assert checks[0].required


def test_kernels():
    """Every kernel for Ascend that has an aclnn interface, on the emulator: the bits of the reference."""
    result = doctor("--kernels", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert document["kernels"]["where"] == "the emulator"
    compared = document["kernels"]["compared"]
    for case in ("division", "ties", "subnormals", "zeros", "nan", "infinity", "minus infinity", "largest"):
        for bits in (8, 4):
            assert compared[f"quantize, int{bits}, float16, {case}: codes"]["elements"] == 80 * bits
            assert compared[f"dequantize and sum, int{bits}, float32, {case}"]["elements"] == 640
            between = f"quantized all-reduce of 4 ranks by one kernel, int{bits}, float16, {case}"
            assert compared[between]["elements"] == 4 * 640
    for case in ("one scale", "channels", "nan and infinity"):
        assert f"shared scale, float16, {case}" in compared
        assert f"quantized all-reduce of 4 ranks by one kernel, shared scale, float32, {case}" in compared
    assert {"all-to-all-v of 4 ranks by one kernel, counts 2: rows", "gather rows, 7000 bytes each"} <= compared.keys()
    assert not any(case["different"] for case in compared.values())


def test_kernels_say_which_bits_differ():
    case = kernel_bits.differences(np.array([1, 2, 4], np.float32), np.array([1, 2, 3], np.float32))
    assert case == {
        "elements": 3, "different": 1, "first": {"index": 2, "got": "40800000", "expected": "40400000"}
    }  # fmt: skip
    same = {"elements": 3, "different": 0}
    summary, line = kernels.kernel_checks({"a kernel, x": same, "a kernel, y": case, "a kernel, z": same}, "a device")
    assert (summary.name, summary.status) == ("a kernel", "ok")
    assert summary.detail == "6 of 6 elements equal in 2 cases, on a device"
    assert (line.name, line.status) == ("a kernel, y", "no")
    assert line.detail == "1 of 3 differ, on a device: element 2 is 40800000, expected 40400000"


def test_a_bit_that_differs_fails_the_command(monkeypatch, capsys):
    case = {"elements": 3, "different": 1, "first": {"index": 2, "got": "40800000", "expected": "40400000"}}
    monkeypatch.setattr(kernels, "run", lambda: (kernels.kernel_checks({"quantize, nan": case}, "a device"), {}))
    assert main(["doctor", "--kernels"]) == 1
    assert "element 2 is 40800000, expected 40400000" in capsys.readouterr().out


def test_kernels_without_libraries(monkeypatch):
    def absent():
        raise FileNotFoundError("libcust_opapi.so is missing")

    monkeypatch.setattr(kernels, "loads", lambda: False)
    monkeypatch.setattr(kernels.alltoallv_emulator, "environment", absent)
    (line,), document = kernels.run()
    assert line.status == "no"
    assert "libcust_opapi.so is missing" in line.detail
    assert document == {}
