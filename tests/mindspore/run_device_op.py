"""Run by msrun: exchanges through MindSpore's own queue, with consumers right behind."""

import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor

import alltoallv.mindspore as am
from alltoallv import _core
from alltoallv.mindspore import device_op, tensors
from alltoallv.mindspore.device_op import DeviceExchange, build

comm = am.init(timeout=240)
if comm.rank == 0:
    build(folder=sys.argv[1])
am.exchange_counts([0, 0])  # rank 1 loads what rank 0 has built
module = build(folder=sys.argv[1])
arrays = ([2000, 2000], [0, 2000], [2000, 2000], [0, 2000])
for dtype, name in ((ms.float32, "float32"), (ms.bfloat16, "bfloat16")):
    exchange = DeviceExchange(_core.Plan(comm.core, "all_to_all_v", name, *arrays), module)
    ones = Tensor(np.ones(4000, np.float32)).astype(dtype)
    wrong = 0
    for step in range(100):
        got = (exchange(ones * float(step % 50 + comm.rank), [4000]) + 1).asnumpy().astype(np.float32).reshape(2, -1)
        wrong += not (got == [[step % 50 + 1], [step % 50 + 2]]).all()
    print(name, "wrong", wrong, flush=True)
square = Tensor(np.arange(4000, dtype=np.float32).reshape(40, 100) + comm.rank)
exchange = DeviceExchange(_core.Plan(comm.core, "all_to_all_v", "float32", *arrays), module)
turned = [(np.arange(4000).reshape(40, 100) + j).T.reshape(-1)[2000 * comm.rank :][:2000] for j in range(2)]
print("view", bool((exchange(square.T, [4000]).asnumpy() == np.concatenate(turned)).all()), flush=True)

# The functions themselves, as they go on Ascend.
device_op.build = lambda *_: module
tensors.queued = True


def both(call):
    """What a function gives through the queue, and without."""
    results = []
    for tensors.queued in (True, False):
        results.append([value.asnumpy() for value in call()])
    tensors.queued = True
    return all((a.shape == b.shape) and (a == b).all() for a, b in zip(*results, strict=True))


sends, recvs = [[3, 4], [3, 3]][comm.rank], [[3, 3], [4, 3]][comm.rank]


def gradient():
    weights = Tensor(np.arange(sum(recvs), dtype=np.float32))
    x = Tensor(np.arange(sum(sends), dtype=np.float32))
    return (ms.grad(lambda x: (am.all_to_all_v(x * x, sends, recvs) * weights).sum())(x),)


def gaps():
    x = Tensor(np.arange(10, dtype=np.float32) + 100 * comm.rank)
    out = Tensor(np.full(12, -1, np.float32))
    layout = {"sdispls": [6, 1], "rdispls": [7, 2]}
    given = am.all_to_all_v(x, [2, 2], [2, 2], out=out, **layout)
    return am.all_to_all_v(x, [2, 2], [2, 2], **layout), given + 0


def learnt():
    x = Tensor(np.arange(3 * sum(sends), dtype=np.float32).reshape(-1, 3) + 100 * comm.rank)
    y, handle = am.all_to_all_v(x, sends, recvs, unit="row", async_op=True)
    handle.wait()
    return am.all_to_all_v(x, sends, unit="row"), y


def others():
    x = Tensor(np.arange(8, dtype=np.float32).reshape(4, 2) + 100 * comm.rank)
    split, gathered = (Tensor(np.zeros((n, 2), np.float32)) for n in (4, 8))
    am.all_to_all_single(split, x)
    am.all_gather_into_tensor(gathered, x)
    local = [1, 1, 2, 0] if comm.rank == 0 else [0, 2, 1, 1]  # rows for expert e of card j
    received = [1, 1, 0, 2] if comm.rank == 0 else [2, 0, 1, 1]
    scattered = am.global_scatter(x, local, received)
    return split + 0, gathered + 0, scattered, am.global_gather(scattered, local, received), am.exchange_counts([1, 2])


for call in (gaps, learnt, gradient, others):
    print(call.__name__, both(call), flush=True)
tensors.queued = False
try:
    bad = ([2000, 2000], [0, 2000], [2000 + comm.rank, 2000], [0, 2001])
    DeviceExchange(_core.Plan(comm.core, "all_to_all_v", "float32", *bad), module)(square, [4001]).asnumpy()
except RuntimeError as error:
    print(str(error).splitlines()[0], flush=True)
