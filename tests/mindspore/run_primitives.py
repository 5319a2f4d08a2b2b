"""MindSpore's communication primitives in graphs under `install`, by compiled kernels in the folder of the argument."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from primitive_cases import cases, check

import alltoallv.mindspore as am
from alltoallv.errors import PeerMismatchError
from alltoallv.mindspore import device_op

module = device_op.build(folder=sys.argv[1])  # compiled already
device_op.build = lambda *_: module
am.install()
am.init(timeout=60)
ms.communication.init()
RANK = ms.communication.get_rank()

for name, case in cases(RANK).items():
    check(name, case, RANK, ms.jit)
print("as NumPy")

# Independent exchanges, of counts that would be a mismatch in any other order.
exchanges = [ops.AlltoAllV(block_size=n) for n in (1, 2, 3)]


def loss(x):
    total = 0.0
    for i in range(3):
        total = total + (exchanges[i]((x * (1.0 + i))[: 2 * (i + 1)], (1, 1), (1, 1)) ** 2).sum()
    return total


x = Tensor(np.arange(6, dtype=np.float32) + 10 * RANK)
eager = ms.grad(loss)(x).asnumpy()
for take in (ms.jit(ms.grad(loss)), ms.grad(ms.jit(loss))):
    for _ in range(3):
        np.testing.assert_array_equal(take(x).asnumpy(), eager)
print("in order")


class Net(nn.Cell):
    """Counts are computed in the graph, as an MoE's are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(3, 3)
        self.counts, self.exchange = ops.AlltoAll(2, -1, -2), ops.AlltoAllV(block_size=3)

    def construct(self, x, counts):
        arrived = self.counts(counts.astype(ms.float32)).reshape(-1).astype(ms.int64)
        there = self.exchange(self.layer(x).reshape(-1), counts.reshape(-1), arrived)
        return self.exchange((there * 2.0).reshape(-1), arrived, counts.reshape(-1)).reshape(x.shape)


net, rows = Net(), Tensor(np.random.default_rng(RANK).standard_normal((4, 3)).astype(np.float32))


def squares(x, counts):
    return (net(x, counts) ** 2).sum()


step = ms.value_and_grad(squares, None, net.trainable_params())
for counts in ([1, 3], [2, 2], [4, 0]):
    made = []
    for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE):
        ms.set_context(mode=mode)
        value, grads = step(rows, Tensor([counts]))
        made.append([value.asnumpy(), *(grad.asnumpy() for grad in grads)])
    ms.set_context(mode=ms.PYNATIVE_MODE)
    for one, other in zip(*made, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
print("trained")


@ms.jit
def moved(x, index, mask):
    """Operators that MindSpore has, but not for bfloat16, and `any`, which it has for bools alone."""
    rows = exchanges[0](x.reshape(-1), (3, 3), (3, 3)).reshape(2, 3)
    changed = mint.scatter(rows, 1, index, ops.gather_d(rows, 1, index) * 2.0)
    return (
        *(rows.transpose(1, 0), changed, ops.masked_select(rows, mask), rows[:, 1:], rows.unsqueeze(1).squeeze(1)),
        *(ops.gather(rows, index[0], 1), ops.addn([rows, changed]), ops.nonzero(rows), mint.any(rows, 1)),
    )


values = np.array([[-0.0, 2.0**-124, 2.0**123], [-0.0, 0.0, -0.0]], np.float32)  # the third is no number as float16
index, mask = np.array([[1], [0]]), np.array([[True, False, True], [False, True, True]])
rows = Tensor(values[[RANK, RANK]], ms.bfloat16).float().asnumpy()
changed = rows.copy()
np.put_along_axis(changed, index, 2 * np.take_along_axis(rows, index, 1), 1)
expected = [rows.T, changed, rows[mask], rows[:, 1:], rows, rows[:, index[0]]]
expected += [rows + changed, np.argwhere(rows), rows.any(1)]
found = moved(Tensor(values, ms.bfloat16), Tensor(index), Tensor(mask))
for got, want in zip(found, expected, strict=True):
    got = (got.float() if got.dtype == ms.bfloat16 else got).asnumpy()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
print("moved")


@ms.jit
def wrong(x):
    return ops.AlltoAllV()(x, (3, 3), (3, 2)) + 1


try:
    wrong(x).asnumpy()
except (RuntimeError, PeerMismatchError) as error:
    print("PeerMismatchError" in f"{type(error).__name__} {error}")
