"""Changes from data parallel to model parallel and back with ATB's AllToAllV in a MindSpore graph, trained under msrun.

The rows of a batch are split over the ranks, 3 to one and 5 to another. A layer in the middle needs all rows of a
feature: it scales every feature by its mean and deviation over the whole batch. So the matrix is transposed over the
ranks: every rank sends its rows of other ranks' features and gets all rows of its own features. Both ways have
gradients, so the losses and the weights equal one process's, up to rounding.

    pip install "mindspore==2.10.*" "numpy<2"
    msrun --worker_num=4 --local_worker_num=4 --join=True examples/transposition_mindspore.py
"""

from __future__ import annotations

import numpy as np

try:
    import mindspore as ms
    from mindspore import Parameter, Tensor, nn, ops
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/transposition_mindspore.py needs {error.name}: pip install 'mindspore==2.10.*' 'numpy<2'"
    ) from None

import alltoallv.mindspore as am
from alltoallv import AllToAllVParam, Communicator

ROWS, INPUTS, FEATURES, STEPS, RATE = 26, 12, 14, 20, 0.1
TOLERANCE = 1e-5


def parts(total: int, size: int) -> list[int]:
    """Returns uneven shares of a total: every rank but the last has one more than the rank before it."""
    shares = [total // size - size // 2 + j for j in range(size)]
    return [*shares[:-1], total - sum(shares[:-1])]


def exchange(group: Communicator, sends: list[int], recvs: list[int]) -> am.AllToAllVCell:
    """Returns ATB's operation as a cell; the regions follow each other."""
    displs = [np.cumsum([0, *counts[:-1]]).tolist() for counts in (sends, recvs)]
    param = AllToAllVParam(
        rank=group.rank,
        rank_size=group.size,
        send_counts=sends,
        sdispls=displs[0],
        recv_counts=recvs,
        rdispls=displs[1],
    )
    return am.AllToAllVCell(param, group)


class Model(nn.Cell):
    """Applies a dense layer to this rank's rows, the scaling of its features over all rows, and a dense layer to its
    rows.
    """

    def __init__(self, group: Communicator) -> None:
        super().__init__()
        random = np.random.default_rng(1)
        self.enter = Parameter(Tensor(random.normal(size=(INPUTS, FEATURES)).astype(np.float32)), name="enter")
        self.leave = Parameter(Tensor(random.normal(size=(FEATURES, 1)).astype(np.float32) / 4), name="leave")
        self.rows, features = parts(ROWS, group.size), parts(FEATURES, group.size)
        self.features, mine = features[group.rank], self.rows[group.rank]
        self.ends = np.cumsum([n * self.features for n in self.rows]).tolist()
        gives, gets = [n * mine for n in features], [n * self.features for n in self.rows]
        self.to_features, self.to_rows = exchange(group, gives, gets), exchange(group, gets, gives)

    def construct(self, x: Tensor) -> Tensor:
        by_feature = ops.matmul(x, self.enter).T.reshape(-1)  # the features of a rank are contiguous
        arrived = self.to_features(by_feature).reshape(-1)
        blocks = [
            arrived[end - n * self.features : end].reshape(self.features, n)
            for n, end in zip(self.rows, self.ends)  # noqa: B905 - MindSpore's graphs know no strict
        ]
        whole = ops.concat(blocks, 1)  # [features of this rank, all rows]
        apart = whole - whole.mean(axis=1, keep_dims=True)
        scaled = apart / ops.sqrt((apart**2).mean(axis=1, keep_dims=True) + 1e-5)
        pieces, begin = [], 0
        for n in self.rows:
            pieces.append(scaled[:, begin : begin + n].reshape(-1))
            begin += n
        back = self.to_rows(ops.concat(pieces)).reshape(FEATURES, -1).T
        return ops.matmul(ops.tanh(back), self.leave).reshape(-1)


def train(group: Communicator) -> tuple[list[float], np.ndarray]:
    """Returns the losses of all rows, and a weight at the end."""
    random = np.random.default_rng(0)
    xs = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
    begin = sum(parts(ROWS, group.size)[: group.rank])
    rows = slice(begin, begin + parts(ROWS, group.size)[group.rank])
    x, wanted = Tensor(xs[rows]), Tensor(np.sin(xs.sum(axis=1)).astype(np.float32)[rows])
    model = Model(group)
    weights = [model.enter, model.leave]

    def loss(x: Tensor, wanted: Tensor) -> Tensor:
        return ((model(x) - wanted) ** 2).sum() / ROWS

    step, losses = ms.jit(ms.value_and_grad(loss, None, weights)), []
    for _ in range(STEPS):
        value, gradients = step(x, wanted)
        for tensor in (value, *gradients):  # every rank has all weights, and some rows
            am.all_reduce(tensor, group=group)
        for weight, gradient in zip(weights, gradients, strict=True):
            ops.assign(weight, weight - RATE * gradient)
        losses.append(float(value))
    return losses, model.enter.asnumpy()


def main() -> None:
    group = am.init(timeout=120)
    losses, weight = train(group)
    if group.rank == 0:
        print(f"{group.size} ranks with {parts(ROWS, group.size)} rows and {parts(FEATURES, group.size)} features")
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {STEPS} steps")
        (alone,) = Communicator.threads(1)
        expected, other = train(alone)
        apart = max(np.abs(np.subtract(losses, expected)).max(), np.abs(weight - other).max())
        print(f"largest difference from one process {apart:.1e}, tolerance {TOLERANCE:.0e}")
        if not (apart <= TOLERANCE and losses[-1] < losses[0]):
            raise SystemExit("the losses or the weights differ")
        print("same as one process")


if __name__ == "__main__":
    main()
