"""A mixture of experts as one MindSpore cell with capacity, top-k and expert parallelism, trained in a graph by msrun.

A router sends every token to 2 of 8 experts. An expert takes at most CAPACITY tokens of each rank; later tokens are
dropped, and the residual carries them on. So all shapes are known and a step is one graph: tokens are put into slots by
expert, the cell `AllToAllV` sends the slots to the ranks of the experts, the results come back, and every token adds up
the results of its experts. A second loss balances the experts' loads. The graph's losses equal PyNative's.

    pip install "mindspore==2.10.*" "numpy<2" scikit-learn
    msrun --worker_num=4 --local_worker_num=4 --join=True examples/moe_cell_mindspore.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

try:
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn, ops
    from sklearn import datasets
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/moe_cell_mindspore.py needs {error.name}: pip install 'mindspore==2.10.*' 'numpy<2' scikit-learn"
    ) from None

import alltoallv.mindspore as am
from alltoallv import Communicator

EXPERTS, TOP_K, WIDTH, HIDDEN, CLASSES = 8, 2, 64, 32, 10
BATCH, CAPACITY_FACTOR, EPOCHS, RATE = 256, 1.25, 6, 0.5


def weight(seed: int, name: str, *shape: int) -> Parameter:
    """Returns a weight, which is initialized identically on every rank."""
    values = np.random.default_rng(seed).uniform(-1, 1, shape) / np.sqrt(shape[-2])
    return Parameter(Tensor(values.astype(np.float32)), name=name)


class MixtureOfExperts(nn.Cell):
    """Applies the experts to this rank's tokens ``[n, WIDTH]``; also returns the balance loss and the number of kept
    choices.
    """

    def __init__(self, tokens: int, group: Communicator) -> None:
        super().__init__()
        self.capacity = int(np.ceil(CAPACITY_FACTOR * TOP_K * tokens / EXPERTS))
        self.size, self.mine = group.size, EXPERTS // group.size  # number of ranks, experts per rank
        self.router = weight(0, "router", WIDTH, EXPERTS)
        experts = range(group.rank * self.mine, (group.rank + 1) * self.mine)
        self.inner, self.outer = (
            Parameter(ops.stack([weight(seed + e, "", *shape) for e in experts]), name=name)
            for seed, name, shape in ((100, "inner", (WIDTH, HIDDEN)), (200, "outer", (HIDDEN, WIDTH)))
        )
        counts = [self.mine * self.capacity] * group.size
        self.dispatch, self.collect = (am.AllToAllV(counts, counts, unit="row", group=group) for _ in range(2))

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = ops.softmax(ops.matmul(x, self.router), -1)
        best, chosen = ops.topk(scores, TOP_K)
        share = best / best.sum(-1, keepdims=True)
        # First choices of all tokens come first, then the second choices.
        expert = chosen.T.reshape(-1)
        ones = ops.one_hot(expert, EXPERTS, Tensor(1.0), Tensor(0.0))
        place = ((ops.cumsum(ones, 0) - 1.0) * ones).sum(-1)
        kept = ops.cast(place < self.capacity, ms.float32)
        slot = ops.cast((expert * self.capacity + place) * kept, ms.int32)
        slots = EXPERTS * self.capacity
        sent = ops.unsorted_segment_sum(ops.tile(x, (TOP_K, 1)) * kept.reshape(-1, 1), slot, slots)
        # Slots lie by rank, then by its expert; they arrive by rank of origin and must be grouped by expert.
        arrived = self.dispatch(sent).reshape(self.size, self.mine, self.capacity, WIDTH)
        grouped = arrived.transpose(1, 0, 2, 3).reshape(self.mine, -1, WIDTH)
        made = ops.bmm(ops.tanh(ops.bmm(grouped, self.inner)), self.outer)
        back = made.reshape(self.mine, self.size, self.capacity, WIDTH).transpose(1, 0, 2, 3).reshape(-1, WIDTH)
        results = ops.gather(self.collect(back), slot, 0) * (share.T.reshape(-1) * kept).reshape(-1, 1)
        balance = EXPERTS * (ones.mean(0) * scores.mean(0)).sum()
        return results.reshape(TOP_K, -1, WIDTH).sum(0), balance, kept.sum()


class Classifier(nn.Cell):
    """Computes x + MoE(x), then a linear classifier."""

    def __init__(self, tokens: int, group: Communicator) -> None:
        super().__init__()
        self.experts = MixtureOfExperts(tokens, group)
        self.head = weight(1, "head", WIDTH, CLASSES)

    def construct(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, balance, kept = self.experts(x)
        logits = ops.matmul(x + mixed, self.head)
        loss = ops.cross_entropy(logits, labels) + 0.01 * balance
        hits = ops.cast(logits.argmax(-1) == labels, ms.float32).sum()
        return loss, kept, hits


def train(group: Communicator, compiled: Callable[..., Callable[..., object]], epochs: int) -> list[list[float]]:
    """Returns loss, share of dropped choices, and accuracy of every epoch, over all ranks."""
    pixels, classes = datasets.load_digits(return_X_y=True)
    pixels, classes = (pixels / 16).astype(np.float32), classes.astype(np.int32)
    tokens = BATCH // group.size
    model = Classifier(tokens, group)
    shared = [model.experts.router, model.head]  # every rank has these, and some tokens; an expert has one owner
    weights = [*shared, model.experts.inner, model.experts.outer]
    step = compiled(ms.value_and_grad(model, None, weights, has_aux=True))
    history = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(classes))
        sums = np.zeros(3)
        batches = range(0, len(order) - BATCH + 1, BATCH)
        for begin in batches:
            mine = order[begin + group.rank * tokens :][:tokens]
            figures, gradients = step(Tensor(pixels[mine]), Tensor(classes[mine]))
            for gradient in gradients[: len(shared)]:
                am.all_reduce(gradient, group=group)
            for parameter, gradient in zip(weights, gradients, strict=True):
                ops.assign(parameter, parameter - RATE / group.size * gradient)
            sums += [float(figure) for figure in figures]
        total = Tensor((sums / len(batches)).astype(np.float32))
        am.all_reduce(total, group=group)
        loss, kept, hits = total.asnumpy() / [group.size, TOP_K * BATCH, BATCH]
        history.append([float(loss), 1 - float(kept), float(hits)])
    return history


def main() -> None:
    group = am.init(timeout=120)
    if EXPERTS % group.size:
        raise SystemExit(f"{group.size} ranks cannot share {EXPERTS} experts equally")
    begin = time.perf_counter()
    history = train(group, ms.jit, EPOCHS)
    eager = train(group, lambda step: step, 1)
    if group.rank == 0:
        print(f"{group.size} ranks, {EXPERTS} experts, top {TOP_K}, {time.perf_counter() - begin:.1f} s")
        for number, (loss, dropped, hits) in enumerate(history):
            print(f"epoch {number + 1}: loss {loss:.4f}, dropped {dropped:.1%}, accuracy {hits:.3f}")
        apart = abs(history[0][0] - eager[0][0])
        print(f"the first epoch's loss in PyNative differs by {apart:.1e}")
        if not (apart < 1e-4 and history[-1][2] > 0.85):
            raise SystemExit("the model has not learnt, or a graph learns otherwise")


if __name__ == "__main__":
    main()
