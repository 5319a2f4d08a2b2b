"""Train a small mixture of experts on 1,797 handwritten digits in Paddle, on CPU, with the losses of one process.

Every digit goes to one of 8 experts. Digits and experts are split over the ranks: `global_scatter` takes the digits to
the ranks of their experts, `global_gather` brings the results back, and gradients go both ways. Paddle itself has
neither on CPU. Gradients of weights that all ranks have are added up; an expert has one owner, which already gets all
its gradients.

    pip install "paddlepaddle==3.3.*" scikit-learn
    python -m paddle.distributed.launch --nproc_per_node=4 examples/moe_paddle.py
"""

from __future__ import annotations

import argparse

import numpy as np

try:
    import paddle
    from paddle import Tensor
    from paddle.nn import functional as F
    from sklearn import datasets
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/moe_paddle.py needs {error.name}: pip install 'paddlepaddle==3.3.*' scikit-learn"
    ) from None

import alltoallv.numpy as an
import alltoallv.paddle as ap
from alltoallv import Communicator

EXPERTS, WIDTH, CLASSES = 8, 64, 10
TOLERANCE = 1e-9


class Classifier:
    """Computes x + gate * expert(x), then a linear classifier."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self.per_rank = EXPERTS // group.size
        first = group.rank * self.per_rank
        # Every expert is initialized identically on any rank.
        self.experts = [make(100 + e, WIDTH, WIDTH) for e in range(first, first + self.per_rank)]
        self.shared = [make(0, WIDTH, EXPERTS), make(1, WIDTH, CLASSES)]  # router and head

    def logits(self, x: Tensor) -> Tensor:
        """Computes ``[n, 10]`` from tokens ``[n, 64]``."""
        router, head = self.shared
        gates = F.softmax(paddle.matmul(x, router), axis=-1)
        chosen = gates.argmax(axis=-1)
        order = paddle.argsort(chosen, stable=True)  # by expert, so also by rank
        here = paddle.bincount(chosen, minlength=EXPERTS)
        each = [self.per_rank] * self.group.size
        there = ap.all_to_all_v(here, each, each, group=self.group)
        arrived = ap.global_scatter(paddle.gather(x, order), here, there, group=self.group)
        rows = there.reshape([self.group.size, -1]).sum(axis=0).tolist()
        parts = paddle.split(arrived, rows) if len(rows) > 1 else [arrived]
        done = paddle.concat([paddle.tanh(paddle.matmul(part, w)) for part, w in zip(parts, self.experts, strict=True)])
        back = ap.global_gather(done, here, there, group=self.group)
        results = paddle.gather(back, paddle.argsort(order))
        return paddle.matmul(x + results * gates.max(axis=-1, keepdim=True), head)

    def step(self, loss: Tensor, rate: float) -> None:
        """Makes a step of gradient descent; a rank's loss is a part of the whole loss."""
        loss.backward()
        for weight in [*self.shared, *self.experts]:
            slope = weight.grad.numpy()
            if any(weight is one for one in self.shared):
                slope = an.all_reduce(slope, group=self.group)
            weight.set_value(weight.detach() - rate * paddle.to_tensor(slope))
            weight.clear_gradient()


def make(seed: int, *shape: int) -> Tensor:
    values = np.random.default_rng(seed).uniform(-1, 1, shape) / np.sqrt(shape[0])
    return paddle.to_tensor(values, stop_gradient=False)


def train(group: Communicator, steps: int, say: bool) -> list[float]:
    """Returns the loss of every step, over the digits of all ranks."""
    pixels, classes = datasets.load_digits(return_X_y=True)
    mine = np.array_split(np.arange(len(classes)), group.size)[group.rank]
    # x needs a gradient, because Paddle's matmul cannot differentiate zero rows without one.
    x, labels = paddle.to_tensor(pixels[mine] / 16, stop_gradient=False), paddle.to_tensor(classes[mine])
    model, losses = Classifier(group), []
    for number in range(steps):
        loss = F.cross_entropy(model.logits(x), labels, reduction="sum") / len(classes)
        losses.append(float(an.all_reduce(loss.numpy(), group=group)))
        model.step(loss, 0.5)
        if say:
            print(f"step {number + 1:2d}: loss {losses[-1]:.12f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    group = Communicator.from_env(timeout=120)
    first = group.rank == 0
    if EXPERTS % group.size:
        raise SystemExit(f"{group.size} ranks cannot share {EXPERTS} experts equally")
    losses = train(group, options.steps, first)
    if first:
        print("now the same in one process", flush=True)
        (alone,) = Communicator.threads(1)
        expected = train(alone, options.steps, True)
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"largest difference {apart:.1e}, tolerance {TOLERANCE:.0e}")
        if not apart <= TOLERANCE:
            raise SystemExit("the losses differ")
        print("same losses")


if __name__ == "__main__":
    main()
