"""Tensor-parallel blocks in MindSpore whose sums travel as int8, in a graph, trained under msrun.

Two blocks of two dense layers with a residual: the first layer is split by columns, the second by rows, so that every
rank computes a part of each block and the parts are summed over the ranks. That sum is the cell `QuantizedAllReduce`:
int8 codes with a scale per 128 elements on the wire instead of float32. Gradients pass straight through the rounding.
Beside it the same model is trained in one process without quantization, to show what int8 costs.

    pip install "mindspore==2.10.*" "numpy<2"
    msrun --worker_num=4 --local_worker_num=4 --join=True examples/tensor_parallel_mindspore.py
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

try:
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn, ops
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/tensor_parallel_mindspore.py needs {error.name}: pip install 'mindspore==2.10.*' 'numpy<2'"
    ) from None

import alltoallv.mindspore as am
from alltoallv import Communicator

ROWS, WIDTH, HIDDEN, BLOCKS, STEPS, RATE = 64, 32, 128, 2, 60, 2.0


class Block(nn.Cell):
    """Computes x + the sum over the ranks of this rank's part."""

    def __init__(self, number: int, group: Communicator, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        random, share = np.random.default_rng(number), HIDDEN // group.size
        mine = slice(group.rank * share, (group.rank + 1) * share)
        inner = random.normal(size=(WIDTH, HIDDEN)).astype(np.float32)[:, mine] / np.sqrt(WIDTH)
        outer = random.normal(size=(HIDDEN, WIDTH)).astype(np.float32)[mine] / np.sqrt(HIDDEN)
        self.inner, self.outer = (
            Parameter(Tensor(weight.astype(np.float32)), name=f"{name}_{number}")
            for name, weight in (("inner", inner), ("outer", outer))
        )
        self.total = total

    def construct(self, x: Tensor) -> Tensor:
        return x + self.total(ops.matmul(ops.tanh(ops.matmul(x, self.inner)), self.outer))


def train(group: Communicator, total: Callable[[Tensor], Tensor]) -> list[float]:
    """Returns the losses; every rank has all rows, and the same loss."""
    random = np.random.default_rng(7)
    xs = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    x, wanted = Tensor(xs), Tensor(np.roll(xs, 1, axis=1) * 0.5)
    net = nn.SequentialCell(*(Block(number, group, total) for number in range(BLOCKS)))
    weights = list(net.trainable_params())

    def loss(x: Tensor, wanted: Tensor) -> Tensor:
        # Gradients belong to the sum of all ranks' losses, so each rank contributes its share.
        return ((net(x) - wanted) ** 2).sum() / (wanted.size * group.size)

    step, losses = ms.jit(ms.value_and_grad(loss, None, weights)), []
    for _ in range(STEPS):
        value, gradients = step(x, wanted)
        for weight, gradient in zip(weights, gradients, strict=True):
            ops.assign(weight, weight - RATE * gradient)
        losses.append(float(value) * group.size)
    return losses


def identity(x: Tensor) -> Tensor:
    return x


def main() -> None:
    group = am.init(timeout=120)
    if HIDDEN % group.size:
        raise SystemExit(f"{group.size} ranks cannot share {HIDDEN} columns equally")
    losses = train(group, am.QuantizedAllReduce(group=group))
    if group.rank == 0:
        (alone,) = Communicator.threads(1)
        exact = train(alone, identity)
        codes, floats = ROWS * WIDTH + 4 * ROWS * WIDTH // 128, 4 * ROWS * WIDTH
        print(f"{group.size} ranks; a term of a sum is {codes:,} bytes instead of {floats:,}")
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps; unquantized {exact[-1]:.4f}")
        apart = abs(losses[-1] / exact[-1] - 1)
        print(f"int8 changes the last loss by {apart:.1%}")
        if not (apart < 0.05 and losses[-1] < losses[0] / 2):
            raise SystemExit("int8 has changed the training")


if __name__ == "__main__":
    main()
