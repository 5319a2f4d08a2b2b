"""``python -m alltoallv run --emulate-npu``: programs for torch_npu, unchanged, and the ends that failures come to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from npu_starts import run_program

import alltoallv_emulator as emulator

PROGRAMS = Path(__file__).parent / "programs"


def test_a_program_for_torch_npu_runs() -> None:
    result = run_program(str(PROGRAMS / "plain_torch_npu.py"), "--flag", "x y")
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^\[(\d)\] arguments (.*) name (\w+) loss (\d\.\d{4})$", result.stdout, flags=re.MULTILINE)
    assert sorted(rank for rank, *_ in lines) == ["0", "1"]
    assert {rest for _, *rest in map(tuple, lines) for rest in [tuple(rest)]} == {
        ("['--flag', 'x y']", "__main__", lines[0][3])
    }


def test_memory_that_grows_in_place() -> None:
    result = run_program(
        str(PROGRAMS / "expandable_segments.py"), ranks=1, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"
    )
    assert result.returncode == 0, result.stderr
    assert "total 45000000 held 142 MiB back True" in result.stdout
    assert "alltoallv emulator" not in result.stderr


@pytest.mark.slow
def test_children_of_a_program_have_the_operators() -> None:
    """Spawned processes, workers of a DataLoader, and a Python of its own, which also finds its own sitecustomize."""
    own = PROGRAMS / "own_sitecustomize"
    result = run_program(
        str(PROGRAMS / "children.py"), ranks=1, PYTHONPATH=f"{own}{os.pathsep}{os.environ['PYTHONPATH']}"
    )
    assert result.returncode == 0, result.stderr
    assert "spawned [3.0, 6.0] loaded [0.0, 2.0, 4.0] started 8.0 True" in result.stdout


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", "the ranks disagree: count is 4 on rank 0 and 5 on rank 1"),
        pytest.param("HcclAllReduce@1=die", "the process dies because a fault was requested", marks=pytest.mark.slow),
        pytest.param(
            "HcclAllReduce=fail:4", "HcclAllReduce: fails because a fault was requested (4)", marks=pytest.mark.slow
        ),
        pytest.param(
            "HcclCommInitRootInfoConfig@1=die", "after 3.0 s rank 1 of 2 had not joined", marks=pytest.mark.slow
        ),
        pytest.param(
            "aclrtMalloc*=fail:207001",
            "aclrtMallocAlign32: fails because a fault was requested (207001)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failure_ends_the_program(fault: str, message: str) -> None:
    """No rank prints a sum, none hangs."""
    settings = {"connect_timeout": 3.0, "exec_timeout": 10.0, "faults": fault or None}
    variables = emulator.environment({}, **settings)  # type: ignore[arg-type]
    del variables["LD_LIBRARY_PATH"]
    result = run_program(str(PROGRAMS / "disagreement.py"), **variables)
    assert result.returncode not in (0, 124)
    assert "the sum is" not in result.stdout
    assert message in result.stderr + result.stdout


def test_a_cuda_build_of_torch_is_named_before_torch_npu_aborts(tmp_path: Path) -> None:
    """What is seen of a CUDA build is its library."""
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    for file in (Path("__init__.py"), Path("lib", "libtorch_cuda.so")):
        (tmp_path / "torch" / file).touch()
    (tmp_path / "program.py").write_text("import torch_npu")
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    result = run_program(str(tmp_path / "program.py"), ranks=1, PYTHONPATH=path)
    assert result.returncode == 1, result.stderr
    release = version("torch_npu")
    assert f"torch_npu {release} aborts beside a CUDA build of torch, expected the CPU build" in result.stderr
    assert f"pip install torch=={release.partition('.post')[0]} --index-url" in result.stderr


def test_the_program_needs_the_environment() -> None:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    command = [sys.executable, "-m", "alltoallv_emulator.program", str(PROGRAMS / "disagreement.py")]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "LD_LIBRARY_PATH lacks" in result.stderr


def call(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the emulator's libraries, without torch."""
    env = emulator.environment(**settings)  # type: ignore[arg-type]
    code = f"import ctypes; acl = ctypes.CDLL('libascendcl.so'); {code}"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("faults", "HcclAllReduce=explode", "'explode' is not an action"),
        ("order", "tree", "order is 'tree', expected rank, ring, halving or length"),
        ("cann_version", "8.5.RC1", "cann_version is '8.5.RC1', expected MAJOR.MINOR.RELEASE"),
    ],
)
def test_a_setting_that_is_none_ends_the_process(setting: str, value: str, message: str) -> None:
    result = call("acl.aclrtSynchronizeDevice()", **{setting: value})
    assert result.returncode == 2
    assert f"environment variable ALLTOALLV_EMULATOR_{setting.upper()}" in result.stderr
    assert message in result.stderr


def test_programs_are_told_the_version_of_cann_that_is_set() -> None:
    code = "text = ctypes.create_string_buffer(128); acl.aclsysGetVersionStr(b'CANN', text); print(text.value.decode())"
    assert call(code).stdout == "8.5.0\n"
    assert call(code, cann_version="9.0.1").stdout == "9.0.1\n"


def test_torch_npu_finds_the_aclnn_operators() -> None:
    result = run_program(str(PROGRAMS / "aclnn_caller.py"), ranks=1)
    assert result.returncode == 0, result.stderr
    assert "right" in result.stdout
