"""Paddle's own programs, unchanged, under `alltoallv.paddle.install`."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.base import core
from paddle.distributed.models.moe import utils as operators
from paddle.distributed.utils import moe_utils
from paddle.incubate.distributed.models.moe import moe_layer

import alltoallv.paddle as ap
from alltoallv.errors import InvalidTensorError
from alltoallv.paddle.installation import Methods

JOBS = Path(__file__).parent / "jobs"
ON_CPU = Path(__file__).resolve().parents[2] / "examples" / "paddle_on_cpu.py"


def run(ranks: int, *program: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ALLTOALLV_", "PADDLE_"))}
    command = [sys.executable, "-m", "alltoallv", "run", "-n", str(ranks), *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(rank: int, output: str) -> list[list[float]]:
    lines = re.findall(rf"^\[{rank}\] (?:naive|gshard) (.*)$", output, re.MULTILINE)
    return [[float(each) for each in line.split()] for line in lines]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_on_ranks_are_experts_in_one_process(ranks: int) -> None:
    program = str(ON_CPU), str(JOBS / "expert_parallel.py")
    alone = losses(0, run(1, *program, "alone"))
    assert [len(each) for each in alone] == [4, 4]
    assert alone[0][-1] < 0.9 * alone[0][0]
    output = run(ranks, *program)
    for rank in range(ranks):
        np.testing.assert_allclose(losses(rank, output), alone, rtol=1e-4)


def test_every_function_of_paddle() -> None:
    assert run(2, str(JOBS / "installed.py")).count("done") == 2


def test_operators_of_gates() -> None:
    def ints(*values: int) -> paddle.Tensor:
        return paddle.to_tensor(values, dtype="int64")

    pairs = ints(0, 2, 0, 2).reshape([2, 2])
    with ap.install():
        assert operators._number_count(pairs, 6).tolist() == [2, 0, 2, 0, 0, 0]
        assert operators._number_count(ints(-1, 3, 1), 3).tolist() == [0, 1, 0]
        assert operators._assign_pos(pairs, ints(2, 2, 4, 4)).tolist() == [2, 0, 3, 1]
        assert operators._assign_pos(ints(1, -1, 0), ints(1, 2)).tolist() == [2, 0]
        assert operators._assign_pos(ints(-1), ints(0)).shape == [0]
        values, chance = paddle.to_tensor([[0.9, 0.1], [0.6, 0.4]]), paddle.to_tensor([0.3, 0.3])
        assert operators._random_routing(pairs, values, chance).tolist() == [[0, -1], [0, 2]]
        with pytest.raises(RuntimeError, match="only topk=2"):
            operators._random_routing(pairs, values, chance, topk=1)
        limited = operators._limit_by_capacity(ints(1, 2, 2, 8, 3, 6), ints(5, 5, 5), 2)
        assert limited.tolist() == [1, 2, 2, 4, 3, 3]
        pruned = operators._prune_gate_by_capacity(ints(1, 3, 3, 3, 3, 2, 1, 1), ints(0, 3, 1, 3, 0, 0, 0, 0), 8, 1)
        assert pruned.tolist() == [1, 3, 3, 3, -1, 2, 1, 1]
        with pytest.raises(InvalidTensorError, match="expert_count has 1 elements, expected 2 \\* 1"):
            operators._prune_gate_by_capacity(pairs, ints(1), 2, 1)
        with pytest.raises(InvalidTensorError, match="numbers has dtype"):
            operators._number_count(paddle.ones([2]), 2)
    with pytest.raises(RuntimeError, match="cpu"):
        operators._number_count(pairs, 6)


def test_what_is_replaced_comes_back() -> None:
    def state() -> list[object]:
        modules = (moe_utils.global_scatter, moe_layer.global_scatter, dist.init_parallel_env, paddle.set_device)
        return [*modules, dist.wait, core.EagerReducer, *(vars(core.ProcessGroup).get(name) for name in vars(Methods))]

    before = state()
    with ap.install():
        ap.install()
        assert moe_layer.global_scatter is ap.global_scatter
        assert dist.wait is ap.wait
    assert state() == before
    ap.uninstall()
    missing = {name for name in vars(core.ProcessGroup) if name[:1] != "_"} - set(vars(Methods))
    assert missing == {"eager_connect", "eager_connect_ring_exchange", "name", "rank", "size"}


@pytest.mark.parametrize("name", dist.stream.__all__)
def test_signatures_of_stream(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters.values() for module in (ap.stream, dist.stream))
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]
