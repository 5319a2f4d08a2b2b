"""vLLM with vllm-ascend on emulated NPUs gives the tokens of transformers on CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from started import RUN
from tiny_model import KINDS, Reference

PROGRAM = str(Path(__file__).with_name("tiny_model.py"))
EAGER = {"enforce_eager": True}
TWO = {"tensor_parallel_size": 2}
EXPERTS = TWO | {"enable_expert_parallel": True}


def _run(*arguments: str, **settings: str) -> list[str]:
    """Runs the program on emulated NPUs as a user does; returns the lines that it prints."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"} | settings
    command = [*RUN, "--emulate-npu", "--no-prefix", "-n", "1", PROGRAM, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        _run("make", str(folder / kind), kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", EAGER),
        ("qwen3", EAGER | TWO),
        ("qwen3", {}),  # vLLM's default: graphs, of whole decoding steps too
        ("qwen3_moe", EAGER),
        ("qwen3_moe", EAGER | TWO),
        ("qwen3_moe", EAGER | EXPERTS),
        ("qwen3_moe", EXPERTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "graphs",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens(models: dict[str, Path], kind: str, options: dict[str, Any], dtype: str) -> None:
    """In float32, which rounds nothing over: all tokens. In bfloat16: those before the first close choice."""
    limits = {"ALLTOALLV_NPU_LIMITS": "relax"} if dtype == "float32" else {}
    printed = _run("serve", str(models[kind]), json.dumps(options | {"dtype": dtype}), **limits)
    served = [json.loads(line.removeprefix("SERVED ")) for line in printed if line.startswith("SERVED ")]
    references = [Reference(*each) for each in json.loads((models[kind] / "reference.json").read_text())]
    for (tokens, logprobs), wanted in zip(served, references, strict=True):
        if dtype == "float32":
            assert tokens == wanted.tokens
            assert logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
        else:
            assert tokens[: wanted.clear] == wanted.tokens[: wanted.clear]
