"""Every program of examples/ as a user starts it, on 2 and 4 ranks."""

from __future__ import annotations

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

import alltoallv_emulator

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(size: int, example: str, *arguments: str, status: int = 0) -> list[list[str]]:
    """Runs an example under our launcher; returns what each rank printed."""
    command = [sys.executable, "-m", "alltoallv", "run", "-n", str(size), str(EXAMPLES / example), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == status, result.stderr
    return split(result.stdout, size)


def split(output: str, size: int) -> list[list[str]]:
    ranks: list[list[str]] = [[] for _ in range(size)]
    for line in output.splitlines():
        rank, text = re.fullmatch(r"\[(\d+)\] (.*)", line).groups()
        ranks[int(rank)].append(text)
    return ranks


def hello_lines(size: int) -> list[list[str]]:
    received = [[i for i in range(size) for _ in range(i + r + 1)] for r in range(size)]
    return [[f"rank {r} of {size} received {received[r]}"] for r in range(size)]


def check_hello(size: int, tmp_path: Path) -> None:
    assert run(size, "hello.py") == hello_lines(size)


def check_digits_dispatch(size: int, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    first, *others = run(size, "digits_dispatch.py", "--output-dir", str(folder), "--repetitions", "3")
    assert first[-2:] == ["all 1797 tokens came back bit for bit", f"the traffic as a picture: {folder}/traffic.png"]
    assert (folder / "traffic.png").is_file()
    assert others == [[]] * (size - 1)


def check_sort_and_shuffle(size: int, tmp_path: Path) -> None:
    (head, *lines), *others = run(size, "sort_and_shuffle.py", "--records", "5000")
    assert head.startswith(f"{5000 * size} records sorted")
    keys = [[int(text) for text in line.split(": ")[1].split()] for line in lines]
    assert sum(n for n, _, _ in keys) == 5000 * size
    assert [line.split(":")[0] for line in lines] == [f"rank {r}" for r in range(size)]
    assert others == [[]] * (size - 1)


def check_recovery(size: int, tmp_path: Path) -> None:
    first, *others = run(size, "recovery.py", status=128 + signal.SIGKILL)
    assert re.match(r"step 60: rank 1 was lost: ", first[0])
    assert re.fullmatch(rf"step 60: {size - 1} ranks go on after \d+ ms", first[1])
    assert first[2] == "after 200 steps the weights are [1.0, -2.0, 0.5]"
    assert others == [[]] * (size - 1)


def check_moe_recovery(size: int, tmp_path: Path) -> None:
    first, *others = run(size, "moe_recovery.py", status=128 + signal.SIGKILL)
    assert re.match(r"step 7: rank 1 was lost: ", first[0])
    left = [0, 1, *range(4, 2 * size)]
    assert re.fullmatch(rf"step 7: {size - 1} ranks go on after \d+ ms with experts {re.escape(str(left))}", first[1])
    assert first[2] == "all 20 steps gave what one process with the same experts gives, bit for bit"
    assert others == [[]] * (size - 1)


def check_several_hosts(size: int, tmp_path: Path) -> None:
    """On one host; tests/hosts has two."""
    for rank, lines in enumerate(run(size, "several_hosts.py")):
        assert lines[0] == f"rank {rank} has the sum " + " ".join(hosts_sum(size))
        assert lines[-1].endswith(f": rank 0 has elements: 3, rank {size - 1} has elements: 4 [A2A-3009]")


def hosts_sum(size: int) -> list[str]:
    total = np.zeros(3)
    for rank in range(size):
        total += np.array([0.1, 0.2, 0.3]) * (rank + 1)
    return [number.hex() for number in total.tolist()]


def check_operator(size: int, tmp_path: Path) -> None:
    """Which chooses its ranks itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_operator.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert "4 passed" in result.stdout, result.stdout + result.stderr


CHECKS = {
    "hello.py": check_hello,
    "digits_dispatch.py": check_digits_dispatch,
    "sort_and_shuffle.py": check_sort_and_shuffle,
    "recovery.py": check_recovery,
    "moe_recovery.py": check_moe_recovery,
    "several_hosts.py": check_several_hosts,
    "test_operator.py": check_operator,
}
OF_FRAMEWORKS = {  # run where the framework is
    "moe_torch.py": "torch/test_torch_examples.py",
    "megatron_dispatcher.py": "torch/test_torch_examples.py",
    "npu_moe_transformer.py": "torch/test_torch_examples.py",
    "ddp_digits.py": "torch/test_torch_examples.py",
    "tensor_parallel_minilm.py": "torch/test_torch_examples.py",
    "mindspore_on_cpu.py": "mindspore/test_mindspore_jobs.py",
    "moe_mindspore.py": "mindspore/test_mindspore_jobs.py",
    "moe_cell_mindspore.py": "mindspore/test_mindspore_jobs.py",
    "transposition_mindspore.py": "mindspore/test_mindspore_jobs.py",
    "tensor_parallel_mindspore.py": "mindspore/test_mindspore_jobs.py",
    "moe_paddle.py": "paddle/test_paddle_jobs.py",
    "paddle_on_cpu.py": "paddle/test_paddle_install.py",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(CHECKS) | set(OF_FRAMEWORKS)
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert set(listed) == set(CHECKS) | set(OF_FRAMEWORKS)
    for example, test in OF_FRAMEWORKS.items():
        assert example in (EXAMPLES.parent / "tests" / test).read_text()


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    one = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return one | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def package(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("example", OF_FRAMEWORKS)
def test_a_missing_package_is_one_sentence(example, monkeypatch):
    """The others that the program imports are there in name only."""
    program = ast.parse((EXAMPLES / example).read_text())
    (block,) = (node for node in program.body if isinstance(node, ast.Try))
    needed = {name.removeprefix("alltoallv.") for name in imported(block.body)}
    of_options = {"matplotlib", "megatron", "torch_npu"}  # options are refused where these are missing
    others = {package(name) for name in imported(list(ast.walk(program))) - imported(block.body)}
    assert others <= sys.stdlib_module_names | {"alltoallv", "numpy"} | of_options
    for missing in {package(name) for name in needed}:
        with monkeypatch.context() as patch:
            for name in needed | {missing}:
                if package(name) != missing or name == missing:
                    patch.setitem(sys.modules, name, None if name == missing else MagicMock())
            with pytest.raises(SystemExit, match=rf" needs {missing}[\w.]*: pip install ") as ended:
                runpy.run_path(str(EXAMPLES / example))
        assert "\n" not in str(ended.value)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("example", CHECKS)
def test_example(example, size, tmp_path):
    CHECKS[example](size, tmp_path)


def test_examples_run_alone():
    env = {name: value for name, value in os.environ.items() if not name.startswith("ALLTOALLV_")}
    command = [sys.executable, str(EXAMPLES / "hello.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert result.stdout.splitlines() == hello_lines(1)[0]


def test_aclnn_example(tmp_path):
    """A program of aclnn in C++, compiled as its first lines say, on four emulated NPUs."""
    source, libraries = EXAMPLES / "aclnn_all_to_all_v.cpp", str(alltoallv_emulator.library_folder())
    assert source.name in (EXAMPLES / "README.md").read_text()
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", f"-I{EXAMPLES.parent / 'op_host'}", "-Wl,--allow-shlib-undefined"]
    names = [f"-l{name}" for name in ("cust_opapi", "nnopbase", "hccl", "ascendcl")]
    command = [compiler, *flags, str(source), f"-L{libraries}", *names, "-o", str(tmp_path / "program")]
    subprocess.run(command, check=True)
    env = os.environ | {"LD_LIBRARY_PATH": libraries}
    result = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [f"rank {r} of 4: {what}, right" for r in range(4) for what in ("10 rows", "sum of 128 elements")]
    assert sorted(result.stdout.splitlines()) == sorted(lines)
