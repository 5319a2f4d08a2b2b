"""Ours beside MindSpore's own collectives in one job."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.communication import create_group
from mindspore.communication import init as mindspore_init

import alltoallv.mindspore as am

mindspore_init()
comm = am.init(timeout=60)
rank, size = comm.rank, comm.size


def gather_ours(x):
    out = am.empty((size * x.shape[0], *x.shape[1:]), x.dtype)
    am.all_gather_into_tensor(out, x)
    return out.asnumpy()


def gather_theirs(x):
    parts = [ops.zeros_like(x) for _ in range(size)]
    mint.distributed.all_gather(parts, x)
    return np.concatenate([part.asnumpy() for part in parts])


reduce = ops.AllReduce()
random = np.random.default_rng(rank)
for dtype in (np.float32, np.float16, np.int32):
    x = Tensor((random.standard_normal((64, 3)) * 100).astype(dtype))
    np.testing.assert_array_equal(gather_ours(x), gather_theirs(x))
x = Tensor(random.standard_normal((64, 3)).astype(np.float32)).astype(ms.bfloat16)
np.testing.assert_array_equal(gather_ours(x).astype(np.float32), gather_theirs(x).astype(np.float32))

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
