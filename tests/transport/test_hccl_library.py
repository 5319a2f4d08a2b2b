"""libhccl and libascendcl: absent, incomplete, and never touched by those who do not ask for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SAY = """
from alltoallv import Communicator
from alltoallv.errors import BackendUnavailableError
try:
    Communicator.from_env(backend="hccl")
except BackendUnavailableError as error:
    print(error.code, error)
"""


def say(folder: Path) -> str:
    """What a program hears that asks for HCCL with ``folder`` on the loader's path."""
    environ = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", SAY], env=environ, check=True, capture_output=True, text=True)
    return done.stdout


def make_library(folder: Path, name: str, *functions: str) -> None:
    source = "".join(f'extern "C" int {function}() {{ return 0; }}\n' for function in functions)
    (folder / "library.cpp").write_text(source)
    compiler = os.environ.get("CXX", "c++")  # the one that has built the extension
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / name, folder / "library.cpp"], check=True)


def required(library: str) -> list[str]:
    header = Path(__file__).parents[2] / "op_host" / "runtime" / "hccl" / "library.h"
    text = header.read_text().partition("ALLTOALLV_CANN_OPTIONAL")[0]
    return [part.partition(")")[0] for part in text.split(f"X({library}, ")[1:]]


def test_without_cann_the_error_names_the_library_and_what_to_source(tmp_path: Path) -> None:
    heard = say(tmp_path)
    assert heard.startswith("28 ")
    for part in ("libascendcl.so", "set_env.sh", "LD_LIBRARY_PATH"):
        assert part in heard


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    make_library(tmp_path, "libascendcl.so", *required("ascendcl"))
    assert "libhccl.so" in say(tmp_path)
    make_library(tmp_path, "libhccl.so", *(f for f in required("hccl") if f != "HcclAlltoAllV"))
    assert "the function HcclAlltoAllV, which is not in libhccl.so;" in say(tmp_path)
    make_library(tmp_path, "libhcomm.so", "HcclGetRootInfo")
    heard = say(tmp_path)
    assert heard.startswith("28 ")
    assert "the function HcclAlltoAllV, which is not in libhccl.so nor in libhcomm.so;" in heard


def test_cann_9_has_some_of_hccls_functions_in_another_library(tmp_path: Path) -> None:
    elsewhere = ["HcclGetRootInfo", "HcclCommInitRootInfo"]
    make_library(tmp_path, "libascendcl.so", *required("ascendcl"))
    make_library(tmp_path, "libhccl.so", *(f for f in required("hccl") if f not in [*elsewhere, "HcclAllReduce"]))
    make_library(tmp_path, "libhcomm.so", *elsewhere)
    assert "the function HcclAllReduce, which is not in libhccl.so nor in libhcomm.so;" in say(tmp_path)


def test_nobody_else_opens_them() -> None:
    program = """
import alltoallv
(comm,) = alltoallv.Communicator.threads(1)
maps = open("/proc/self/maps").read()
assert "libhccl" not in maps and "libascendcl" not in maps
"""
    subprocess.run([sys.executable, "-c", program], check=True)
