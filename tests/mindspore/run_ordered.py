"""Run by ``alltoallv run``: sums in the order of ranks through MindSpore's own queue, over the emulator's HCCL."""

import itertools
import os
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from on_device import on_device

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import device_op, device_quantized, tensors
from alltoallv.testing import reference

world = am.init(timeout=800)
module = device_op.build(folder=sys.argv[1])  # compiled already
device_op.build = lambda *_: module
device_quantized.plan_of = on_device
tensors.queued = True  # the functions as they go on Ascend
rank, size = world.rank, world.size
FLOATS = {"float32": np.float32, "float64": np.float64, "float16": np.float16}
INTEGERS = {"int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "uint8": np.uint8}


def terms(numel, dtype, seed):
    """What the ranks give: values of many magnitudes, whose sum depends on the order, NaN and infinities."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(size, numel)) * 2.0 ** rng.integers(-3, 4, (size, numel))
    if dtype in INTEGERS.values():
        return list((values * 10).astype(np.int64).astype(dtype))
    values[seed % size, : numel // 4 : 3] = np.nan
    values[(seed + 1) % size, 1 : numel // 4 : 3] = np.inf
    values[:, 2 : numel // 4 : 3] = [[-0.0 if j % 2 else 0.0] for j in range(size)]
    return list(values.astype(dtype))


def same(found, wanted):
    return found.dtype == wanted.dtype and found.reshape(-1).tobytes() == wanted.tobytes()


def right(group):
    """Every reduction, on both ways: in one step and in two."""
    for seed, (name, dtype) in enumerate((FLOATS | INTEGERS).items()):
        for numel in (11, 17001):
            given = terms(numel, dtype, seed)
            ops = ("sum", "prod", "min", "max", "avg") if name in FLOATS else ("sum", "prod", "min", "max")
            for op in ops if numel < 100 or name == "float32" else ops[:1]:
                wanted, x = reference.all_reduce(given, op)[rank], Tensor(given[rank])
                am.all_reduce(total := x * 1, op, group, order="rank")
                yield f"{op} of {numel} {name}", same(total.asnumpy(), wanted)
            counts = [numel - size - 1, 3, *[1] * (size - 2)]
            begins = np.cumsum([0, *counts])
            listed = [x[begin:end] for begin, end in itertools.pairwise(begins.tolist())]
            am.reduce_scatter(part := ms.ops.zeros(counts[rank], x.dtype), listed, "sum", group, order="rank")
            wanted = reference.reduce_scatter(given, "sum", counts)[rank]
            yield f"parts of {numel} {name}", same(part.asnumpy(), wanted)
    given = terms(size * 5000, np.float32, 3)
    wanted, x = reference.all_reduce(given, "sum"), Tensor(given[rank])
    am.reduce(y := x * 1, size - 1, "sum", group, order="rank")
    yield "reduce", same(y.asnumpy(), wanted[rank] if rank == size - 1 else given[rank])
    halves = [Tensor(each).astype(ms.bfloat16) for each in given]
    am.all_reduce(twice := halves[rank] * 1, "sum", group, order="rank")
    exact = Tensor(reference.all_reduce([each.astype(ms.float32).asnumpy() for each in halves], "sum")[rank])
    yield "bfloat16", same(twice.astype(ms.float32).asnumpy(), exact.astype(ms.bfloat16).astype(ms.float32).asnumpy())

    for name, leaves, numel in (("float32", 2 * size, 7), ("float32", 3 * size, 9001), ("float16", 2 * size, 9001)):
        made = np.concatenate(terms(leaves // size * numel, FLOATS[name], 5)).reshape(leaves, numel)
        own, total = Tensor(np.split(made, size)[rank]), reference.all_reduce_leaves([made])[0]
        yield f"leaves of {name}", same(am.all_reduce_leaves(own, leaves, group).asnumpy(), total)
    slope = ms.grad(lambda x: (am.all_reduce_leaves(x, leaves, group) * Tensor(made[rank])).sum())(own).asnumpy()
    yield "gradient of leaves", same(slope, np.broadcast_to(reference.all_reduce_leaves([made[:size]])[0], own.shape))

    def loss(x):
        am.all_reduce(y := x * 1, "sum", group, order="rank")
        return (y * Tensor(given[rank])).sum()

    yield "gradient", same(ms.grad(loss)(x).asnumpy(), wanted[rank])

    def scattered(x):
        am.reduce_scatter_tensor(y := ms.ops.zeros(5000), x, order="rank")  # its gradient's gather is no sum
        return (y * y).sum()

    own = wanted[rank].reshape(size, -1)
    yield "gradient of parts", np.allclose(ms.grad(scattered)(x).asnumpy(), 2 * own.reshape(-1), equal_nan=True)


hccl = Communicator.from_env(domain="hccl", backend="hccl", timeout=800)
print("calls", [about for about, good in right(hccl) if not good], flush=True)
os.environ["ALLTOALLV_ORDER"] = "rank"
given = terms(9000, np.float32, 4)
by_variable = Communicator.from_env(domain="by variable", backend="hccl", timeout=800)
del os.environ["ALLTOALLV_ORDER"]
by_option = Communicator.from_env(domain="by option", backend="hccl", timeout=800, order="rank")
for group in (by_variable, by_option):
    am.all_reduce(total := Tensor(given[rank]) * 1, group=group)
    print(group.domain, same(total.asnumpy(), reference.all_reduce(given, "sum")[rank]), flush=True)
    group.destroy()
hccl.destroy()
hccl = Communicator.from_env(domain="compared", backend="hccl", timeout=800)
y = Tensor(np.ones(3, np.float32)) * 1
with pytest.raises(RuntimeError, match=r"rank 0 .*has order 'rank', rank 1 .*has order None"):
    am.all_reduce(y, group=hccl, order=None if rank == 1 else "rank")
with pytest.raises(InvalidParamError, match=r"order is 'ring', expected 'rank' or None"):
    am.all_reduce(y, order="ring")
print("agreed", flush=True)
