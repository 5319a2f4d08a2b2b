"""What needs no second rank: a process without a launcher is a job of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

import alltoallv.mindspore as am


@pytest.fixture
def x() -> Tensor:
    return Tensor(np.arange(6, dtype=np.float32))


def test_init_is_a_job_of_one() -> None:
    comm = am.init()
    assert (comm.rank, comm.size) == (0, 1)
    assert am.init() is comm


def test_alone(x: Tensor) -> None:
    assert am.all_to_all_v(x, [4], sdispls=[0]).asnumpy().tolist() == [0, 1, 2, 3]
    assert am.exchange_counts([3]).asnumpy().tolist() == [3]
    out = ops.zeros((6,))
    assert am.all_to_all_single(out, x) is None
    assert out.asnumpy().tolist() == [0, 1, 2, 3, 4, 5]
    slope = ms.grad(lambda x: (am.all_to_all_v(x, [3], [3], sdispls=[1]) ** 2).sum())(x)
    assert slope.asnumpy().tolist() == [0, 2, 4, 6, 0, 0]


def test_primitives_alone(x: Tensor) -> None:
    with am.install():
        ms.communication.init("hccl")
        for made in (
            ops.AlltoAllV()(x, [6], [6]),
            ops.AllReduce()(x),
            ops.AlltoAll(1, 0, 0)(x),
            ops.Broadcast(0)((x,))[0],
        ):
            assert made.asnumpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_output_lies_in_shared_memory_and_lives_as_long_as_it_is_used(x: Tensor) -> None:
    comm = am.init()
    before = comm.stats()["arena_used_bytes"]
    y = am.all_to_all_v(Tensor(np.ones(100_000, np.float32)), [100_000])
    assert comm.stats()["arena_used_bytes"] >= before + 400_000
    part = y[10:20]
    del y
    other = am.empty((100_000,))
    other.asnumpy()[...] = -1
    assert part.asnumpy().tolist() == [1] * 10
    del part, other
    ops.zeros((1,)).asnumpy()
    assert comm.stats()["arena_used_bytes"] < before + 400_000


def test_tracing_is_refused(tmp_path: Path) -> None:
    """MindSpore would bake the values of the first call into the graph; in a process of its own, which it spoils."""
    script = tmp_path / "traced.py"  # MindSpore looks for the source of what it traces
    script.write_text(
        "import os, numpy as np, mindspore as ms, alltoallv.mindspore as am\n"
        "@ms.jit(capture_mode='trace')\n"
        "def f(x): return am.all_to_all_v(x * 2, [6], [6])\n"
        "try: f(ms.Tensor(np.ones(6, np.float32)))\n"
        "except RuntimeError as error: print(error, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    assert "alltoallv.mindspore cannot be traced" in done.stdout
