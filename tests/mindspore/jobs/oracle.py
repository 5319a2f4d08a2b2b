"""Ours beside MindSpore's own collectives in one job; rank 0 prints the medians of both as JSON, in seconds."""

import json
import statistics
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.communication import create_group
from mindspore.communication import init as mindspore_init

import alltoallv.mindspore as am

mindspore_init()
comm = am.init(timeout=60)
rank, size = comm.rank, comm.size
seconds: dict[str, list[float]] = {}


def timed(name, function):
    am.exchange_counts([0] * size)  # together
    begin = time.perf_counter()
    result = function()
    seconds.setdefault(name, []).append(time.perf_counter() - begin)
    return result


def gather_ours(x):
    out = am.empty((size * x.shape[0], *x.shape[1:]), x.dtype)
    am.all_gather_into_tensor(out, x)
    return out.asnumpy()


def gather_theirs(x):
    parts = [ops.zeros_like(x) for _ in range(size)]
    mint.distributed.all_gather(parts, x)
    return np.concatenate([part.asnumpy() for part in parts])


def sum_ours(x):
    out = am.empty((size * x.shape[0], *x.shape[1:]), x.dtype)
    am.all_gather_into_tensor(out, x)
    return out.reshape(size, *x.shape).sum(axis=0).asnumpy()


reduce = ops.AllReduce()
random = np.random.default_rng(rank)
for dtype in (np.float32, np.float16, np.int32):
    x = Tensor((random.standard_normal((64, 3)) * 100).astype(dtype))
    np.testing.assert_array_equal(gather_ours(x), gather_theirs(x))
x = Tensor(random.standard_normal((64, 3)).astype(np.float32)).astype(ms.bfloat16)
np.testing.assert_array_equal(gather_ours(x).astype(np.float32), gather_theirs(x).astype(np.float32))

big = Tensor(random.standard_normal(1 << 18).astype(np.float32))  # 1 MiB per rank
for _ in range(5):
    a, b = timed("ours all_gather", lambda: gather_ours(big)), timed("mint all_gather", lambda: gather_theirs(big))
    np.testing.assert_array_equal(a, b)
    a, b = timed("ours sum", lambda: sum_ours(big)), timed("ops.AllReduce", lambda: reduce(big).asnumpy())
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

# Ours behind a pending collective of MindSpore's, and one of MindSpore's behind ours.
for step in range(40):
    pending = reduce(Tensor(np.full(4096, step + rank, np.float32)))
    ours = am.all_to_all_v(pending, [2048] * size, [2048] * size)
    assert (reduce(ours).asnumpy() == size * (size * step + 1)).all(), step

# Names of MindSpore's groups are groups of ours.
theirs = mint.distributed.new_group([0, 1], backend="mccl")
create_group("mine", [0, 1])
for group in (theirs, "mine", "hccl_world_group", mint.distributed.new_group()):
    out = ops.zeros((2,))
    am.all_gather_into_tensor(out, Tensor(np.array([rank + 1], np.float32)), group=group)
    assert out.asnumpy().tolist() == [1, 2], group

am.exchange_counts([0] * size)
if rank == 0:
    print("MEDIANS", json.dumps({name: statistics.median(values) for name, values in seconds.items()}), flush=True)
am.exchange_counts([0] * size)
