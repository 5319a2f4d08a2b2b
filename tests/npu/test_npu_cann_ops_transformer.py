"""CANN's package of operators for transformers, where `--with cann_ops_transformer` asks for it, on emulated NPUs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from npu_ranks import caught, group
from on_ranks import on_ranks
from torch import Tensor

import alltoallv_emulator as emulator
from alltoallv_tools.cli import main

WITH = {"ALLTOALLV_EMULATOR_WITH": "cann_ops_transformer", "ALLTOALLV_NPU_LIMITS": "relax"}
TOKENS, HIDDEN, INNER, EXPERTS, K = 5, 16, 8, 4, 2


def _tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, the experts of each, and their weights."""
    made = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:K] for _ in range(TOKENS)]).int()
    return torch.randn(TOKENS, HIDDEN, generator=made).bfloat16(), ids, torch.rand(TOKENS, K, generator=made)


@on_ranks(2, communicator=False, env=WITH)
def test_tokens_go_to_their_experts_and_back(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        module: Any = importlib.import_module("cann_ops_transformer.ops")
        buffer = module.MoeDistributeBuffer(world)
        assert (buffer.rank_id, buffer.world_size) == (rank, size)
        x, ids, weights = _tokens(rank)
        given = [each.to(device) for each in (x, ids, weights)]
        rows, _, assist, numbers, ends, _ = buffer.low_latency_dispatch(*given[:2], EXPERTS)
        mine = [2 * rank, 2 * rank + 1]
        chosen = [(other, expert) for other in range(size) for expert in _tokens(other)[1].flatten().tolist()]
        assert numbers.tolist() == [sum(expert == one for _, expert in chosen) for one in mine]
        assert ends[-1] == numbers.sum()
        y = buffer.low_latency_combine(rows, given[1], given[2], assist, ends, num_experts=EXPERTS)
        wanted = x.double() * weights.double().sum(1, keepdim=True)
        torch.testing.assert_close(y.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
        error = caught(lambda: buffer.low_latency_combine(rows, given[1], given[2], None, ends, num_experts=EXPERTS))
        assert "assist_info_for_combine is None" in str(error)


@on_ranks(2, communicator=False, env=WITH)
def test_all_of_a_layer_in_one_call(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        buffer = package.get_symm_buffer_for_mega_moe(world, EXPERTS, TOKENS, K, HIDDEN, INNER)
        made = torch.Generator().manual_seed(9)
        first = torch.randn(EXPERTS, HIDDEN, 2 * INNER, generator=made).bfloat16() / 4
        second = torch.randn(EXPERTS, INNER, HIDDEN, generator=made).bfloat16() / 4
        x, ids, weights = _tokens(rank)
        mask = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int8)
        wanted = torch.zeros(TOKENS, HIDDEN).double()
        for token in range(TOKENS - 1):
            for place, expert in enumerate(ids[token].tolist()):
                gate, up = (x[token].double() @ first[expert].double()).chunk(2)
                inner = gate / (1 + (-gate).exp()) * up
                wanted[token] += weights[token, place] * (inner @ second[expert].double())
        own = slice(2 * rank, 2 * rank + 2)
        lists = [[matrix.to(device) for matrix in every[own]] for every in (first, second)]
        given = [each.to(device) for each in (x, ids, weights)]
        y, numbers = package.mega_moe(*given, *lists, buffer, x_active_mask=mask.to(device))
        torch.testing.assert_close(y.cpu().double(), wanted, rtol=3e-2, atol=3e-2)
        active = torch.cat([_tokens(other)[1][:-1].flatten() for other in range(size)])
        assert numbers.tolist() == active.bincount(minlength=EXPERTS)[own].tolist()
        assert numbers.dtype == torch.int32
        error = str(caught(lambda: package.mega_moe(*given, *lists, buffer, activation_clamp=1.0)))
        assert "activation_clamp is 1.0, expected SwiGLU without more" in error
        assert "for Ascend 950 only" in str(caught(lambda: package.ElasticBuffer(world)))


def test_programs_find_the_package_where_they_ask_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    find = "import importlib.util; print(importlib.util.find_spec('cann_ops_transformer'))"
    for packages, found in (((), False), (emulator.PACKAGES, True)):
        env = emulator.environment(packages=packages)
        printed = subprocess.run([sys.executable, "-c", find], env=env, check=True, capture_output=True, text=True)
        assert ("alltoallv_emulator" in printed.stdout) == found
    program = tmp_path / "program.py"
    program.touch()
    for options, error in (
        (["--emulate-npu", "--with", "numpy"], "--with is 'numpy', expected one of cann_ops_transformer"),
        (["--with", "cann_ops_transformer"], "--with is given without --emulate-npu"),
    ):
        assert main(["run", "-n", "1", *options, str(program)]) == 2
        assert error in capsys.readouterr().err
