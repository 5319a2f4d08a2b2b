"""Train a small mixture of experts on 1,797 handwritten digits, with the same losses as in one process.

This is moe_torch.py in MindSpore, with `global_scatter` and `global_gather`. A router sends every digit to 2 of 8
experts. The digits are split over the ranks, and so are the experts: in every step the digits travel to the ranks of
their experts and the results travel back, with gradients through both. Gradients of weights that all ranks have
(router, classifier) are added up; an expert has one owner, which already gets all its gradients. The losses differ from
one process's only by rounding, below 1e-9: sums over the batch are made in another order.

    pip install "mindspore==2.10.*" "numpy<2" scikit-learn
    msrun --worker_num=4 --local_worker_num=4 --join=True examples/moe_mindspore.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np

try:
    import mindspore as ms
    from mindspore import Parameter, Tensor, ops
    from sklearn import datasets
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/moe_mindspore.py needs {error.name}: pip install 'mindspore==2.10.*' 'numpy<2' scikit-learn"
    ) from None

import alltoallv.mindspore as am
from alltoallv import Communicator

EXPERTS, TOP_K, WIDTH, HIDDEN, CLASSES = 8, 2, 64, 64, 10
TOLERANCE = 1e-9


def make(seed: int, name: str, *shape: int) -> Parameter:
    """Returns a weight; every expert is initialized identically on any rank."""
    values = np.random.default_rng(seed).uniform(-1, 1, shape) / np.sqrt(shape[0])
    return Parameter(Tensor(values), name=name)


class Classifier:
    """Computes x + MoE(x), then a linear classifier."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self.per_rank = EXPERTS // group.size
        first = group.rank * self.per_rank
        self.experts = [
            (make(100 + e, f"expert_{e}_in", WIDTH, HIDDEN), make(200 + e, f"expert_{e}_out", HIDDEN, WIDTH))
            for e in range(first, first + self.per_rank)
        ]
        self.router = make(0, "router", WIDTH, EXPERTS)
        self.head = make(1, "head", WIDTH, CLASSES)
        self.shared = [self.router, self.head]
        self.parameters = [*self.shared, *(weight for expert in self.experts for weight in expert)]

    def logits(self, x: Tensor) -> Tensor:
        """Computes ``[n, 10]`` from tokens ``[n, 64]``."""
        scores = ops.exp(ops.matmul(x, self.router))
        chosen = np.argsort(-scores.asnumpy(), axis=1, kind="stable")[:, :TOP_K]  # [n, 2], not differentiable
        picked = ops.gather_elements(scores, 1, Tensor(chosen))
        weights = picked / picked.sum(axis=1, keepdims=True)
        return ops.matmul(x + self.mixture(x, chosen, weights), self.head)

    def mixture(self, x: Tensor, chosen: np.ndarray, weights: Tensor) -> Tensor:
        """Sends token i to the experts ``chosen[i]`` and adds up their results, weighted by ``weights[i]``."""
        pairs = chosen.ravel()
        order = np.argsort(pairs, kind="stable")  # by expert, so also by rank
        here = np.bincount(pairs, minlength=EXPERTS)
        each = [self.per_rank] * self.group.size
        there = am.all_to_all_v(Tensor(here), each, each, group=self.group).asnumpy()
        rows = ops.gather(x, Tensor(order // TOP_K), 0)
        arrived = am.global_scatter(rows, here, there, group=self.group)
        ends = np.cumsum(there.reshape(self.group.size, -1).sum(axis=0)).tolist()
        results = [
            ops.matmul(ops.tanh(ops.matmul(arrived[begin:end], w_in)), w_out)
            for begin, end, (w_in, w_out) in zip([0, *ends], ends, self.experts, strict=False)
            if end > begin
        ]
        done = ops.concat(results) if results else arrived
        back = am.global_gather(done, here, there, group=self.group)
        by_token = ops.gather(back, Tensor(np.argsort(order, kind="stable")), 0).reshape(-1, TOP_K, WIDTH)
        return (by_token * weights.expand_dims(2)).sum(axis=1)

    def total(self, values: list[Tensor]) -> list[Tensor]:
        """Returns the sums over all ranks of all tensors, in one exchange."""
        flat = ops.concat([value.reshape(-1) for value in values])
        out = am.empty(flat.size * self.group.size, flat.dtype)
        am.all_gather_into_tensor(out, flat, group=self.group)
        sums = out.reshape(self.group.size, -1).sum(axis=0)
        ends = np.cumsum([value.size for value in values]).tolist()
        pairs = zip(values, [0, *ends], ends, strict=False)
        return [sums[begin:end].reshape(value.shape) for value, begin, end in pairs]


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels, 0 to 1, [1797, 64], and classes 0 to 9, [1797]; shuffled, the same on all ranks."""
    pixels, classes = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(classes))
    return pixels[order] / 16, classes[order]


def train(group: Communicator, options: argparse.Namespace, say: bool) -> list[float]:
    """Returns the losses of all epochs over all ranks together."""
    pixels, classes = load_digits()
    model = Classifier(group)

    def forward(x: Tensor, labels: Tensor, count: float) -> tuple[Tensor, Tensor]:
        logits = model.logits(x)
        normal = ops.log(ops.exp(logits).sum(axis=1))
        return (normal - (logits * labels).sum(axis=1)).sum() / count, logits

    step = ms.value_and_grad(forward, None, model.parameters, has_aux=True)
    losses = []
    for epoch in range(options.epochs):
        sums = np.zeros(2)
        for begin in range(0, len(classes), options.batch):
            batch = np.arange(begin, min(begin + options.batch, len(classes)))
            mine = np.array_split(batch, group.size)[group.rank]
            labels = Tensor(np.eye(CLASSES)[classes[mine]])
            (loss, logits), grads = step(Tensor(pixels[mine]), labels, float(len(batch)))
            hits = float((logits.asnumpy().argmax(axis=1) == classes[mine]).sum())
            *shared, loss, hits = model.total([*grads[: len(model.shared)], loss, Tensor(np.array(hits))])
            for weight, grad in zip(model.parameters, [*shared, *grads[len(shared) :]], strict=True):
                weight.set_data(weight - options.lr * grad)
            sums += [float(loss) * len(batch), float(hits)]
        losses.append(sums[0] / len(classes))
        if say:
            print(f"epoch {epoch + 1:2d}: loss {losses[-1]:.12f}, accuracy {sums[1] / len(classes):.3f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="digits per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.5)
    options = parser.parse_args()

    group = am.init(timeout=120)
    first = group.rank == 0
    if EXPERTS % group.size:
        raise SystemExit(f"{group.size} ranks cannot share {EXPERTS} experts equally")
    if first:
        print(f"{group.size} ranks, {EXPERTS} experts, {options.epochs} epochs of 1,797 digits", flush=True)
    start = time.perf_counter()
    losses = train(group, options, first)
    if first:
        print(f"{time.perf_counter() - start:.1f} s; now the same in one process", flush=True)
        (alone,) = Communicator.threads(1)
        expected = train(alone, options, True)
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"largest difference {apart:.1e}, tolerance {TOLERANCE:.0e}")
        if not apart <= TOLERANCE:
            raise SystemExit("the losses differ")
        print("same losses")


if __name__ == "__main__":
    main()
