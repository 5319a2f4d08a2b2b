"""vLLM with vllm-ascend on emulated NPUs gives the tokens of transformers on CPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from started import RUN
from tiny_model import SHARES, Reference

PROGRAM = str(Path(__file__).with_name("tiny_model.py"))
EAGER = {"enforce_eager": True}
TWO = {"tensor_parallel_size": 2}
EXPERTS = TWO | {"enable_expert_parallel": True}  # prompts by All2AllV, steps by MC2
FOUR = EXPERTS | {"tensor_parallel_size": 4}


def _run(*arguments: str, ranks: int = 1, **settings: str) -> list[str]:
    """Runs the program on emulated NPUs as a user does; returns the lines that it prints."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"} | settings
    command = [*RUN, "--emulate-npu", "--no-prefix", "-n", str(ranks), PROGRAM, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def made(kind: str) -> Path:
        _run("make", str(folder / kind), kind)
        return folder / kind

    return made


def _check(folder: Path, dtype: str, options: dict[str, Any], ranks: int = 1, **settings: str) -> None:
    """In float32, which rounds nothing over: all tokens. In bfloat16: those before the first close choice.

    MLA of prompts vllm-ascend computes in bfloat16 in any case.
    """
    if dtype == "float32":
        settings["ALLTOALLV_NPU_LIMITS"] = "relax"
    printed = _run("serve", str(folder), json.dumps(options | {"dtype": dtype}), ranks=ranks, **settings)
    served = [json.loads(line.removeprefix("SERVED ")) for line in printed if line.startswith("SERVED ")]
    asked = [share for calls in SHARES[ranks] for call in calls for share in call.items()]
    assert sorted((number, len(tokens)) for number, tokens, _ in served) == sorted(asked)
    references = [Reference(*each) for each in json.loads((folder / "reference.json").read_text())]
    for number, tokens, logprobs in served:
        wanted = references[number]
        whole = 0.02 if folder.name == "deepseek_v2" else 1e-3
        compared, tolerance = (len(tokens), whole) if dtype == "float32" else (min(len(tokens), wanted.clear), 0.25)
        assert tokens[:compared] == wanted.tokens[:compared]
        assert logprobs[:compared] == pytest.approx(wanted.logprobs[:compared], abs=tolerance)


def _name(value: str | dict[str, Any]) -> str:
    if isinstance(value, str):
        return value
    return "-".join(f"{name}={number}" for name, number in value.items()) or "alone"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", EAGER),
        ("qwen3", EAGER | TWO),
        ("qwen3", {}),  # vLLM's default: graphs, of whole decoding steps too
        ("qwen3", TWO),
        ("qwen3_moe", EAGER),
        ("qwen3_moe", EAGER | TWO),
        ("qwen3_moe", TWO),
        ("qwen3_moe", EAGER | EXPERTS),
        ("qwen3_moe", EAGER | FOUR),
        ("qwen3_moe", EXPERTS),
        ("deepseek_v2", EAGER),
        ("deepseek_v2", EAGER | EXPERTS),
    ],
    ids=_name,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens(model: Callable[[str], Path], kind: str, options: dict[str, Any], dtype: str) -> None:
    _check(model(kind), dtype, options)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_data_parallel(model: Callable[[str], Path], dtype: str) -> None:
    """With uneven prompts, and ranks that end before the other."""
    _check(model("qwen3_moe"), dtype, EAGER | {"enable_expert_parallel": True}, ranks=2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3-w8a8", {}), ("qwen3_moe-w8a8", {}), ("qwen3_moe-w8a8", EXPERTS), ("qwen3_moe-w4a8", EXPERTS)],
    ids=_name,
)
def test_quantized_layers(model: Callable[[str], Path], kind: str, options: dict[str, Any]) -> None:
    """With rows of int8 and weights of int8 or four bits, which vLLM has in bfloat16 only."""
    _check(model(kind), "bfloat16", EAGER | options | {"quantization": "ascend"})


@pytest.mark.timeout(900)
def test_layers_with_a_state(model: Callable[[str], Path]) -> None:
    """With the gated delta rule, which vllm-ascend has in bfloat16 only."""
    _check(model("qwen3_next"), "bfloat16", EAGER)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("operator", ["dispatch_ffn_combine", "dispatch_gmm_combine_decode"])
def test_experts_in_one_operator(model: Callable[[str], Path], operator: str) -> None:
    """With FusedMC2: in every step, or where the configuration names the experts' quantization and tokens are few."""
    options = EAGER | EXPERTS | {"quantization": "ascend", "hf_overrides": {"moe_quantize": "w8a8_dynamic"}}
    mode = "1" if operator == "dispatch_ffn_combine" else "2"
    _check(model("qwen3_moe-w8a8"), "bfloat16", options, VLLM_ASCEND_ENABLE_FUSED_MC2=mode)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [[[7, 2, 0, 5], [1, 3, 6, 4]], [[7, 2, 0, 5, 1], [1, 3, 6, 4, 7]]])
def test_expert_maps(model: Callable[[str], Path], devices: list[list[int]], tmp_path: Path) -> None:
    """A file says which NPU has which experts in each layer: in any order, some on both."""
    layer = {"device_list": [{"device_expert": experts} for experts in devices]}
    file = tmp_path / "experts.json"
    file.write_text(json.dumps({"moe_layer_count": 2, "layer_list": [layer, layer]}))
    options = EAGER | EXPERTS | {"additional_config": {"eplb_config": {"expert_map_path": str(file)}}}
    _check(model("qwen3_moe"), "float32", options)
