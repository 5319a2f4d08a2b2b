"""Train a small mixture of experts on 1,797 handwritten digits, with the same losses as in one process.

A router sends every digit to 2 of 8 experts. The digits are split over the ranks, and so are the experts: in every step
the digits travel to the ranks of their experts and the results travel back, with gradients through both. Gradients of
weights that all ranks have (router, classifier) are added up; an expert has one owner, which already gets all its
gradients. With float64 the losses differ from one process's only by rounding, below 1e-9: sums over the batch
are made in another order.

    pip install torch scikit-learn
    python -m alltoallv run -n 4 examples/moe_torch.py
    torchrun --nproc-per-node 4 examples/moe_torch.py

On Ascend NPUs, one per rank, over HCCL, or on emulated NPUs; the losses are compared with one process's on CPU:

    pip install torch_npu
    python -m alltoallv run -n 4 examples/moe_torch.py --device npu
    python -m alltoallv run --emulate-npu -n 4 examples/moe_torch.py --device npu
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

try:
    import torch
    from sklearn import datasets
    from torch import Tensor, nn
    from torch.nn import functional as F
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/moe_torch.py needs {error.name}: pip install torch scikit-learn") from None

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.launch import detect as launch

EXPERTS, TOP_K, WIDTH, HIDDEN, CLASSES = 8, 2, 64, 64, 10
TOLERANCE = 1e-9


class Classifier(nn.Module):
    """Computes x + MoE(x), then a linear classifier. Every expert is initialized identically on any rank."""

    def __init__(self, group: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.dispatcher = at.nn.MoEDispatcher(EXPERTS, group)
        self.experts = nn.ModuleList(make_expert(number) for number in self.dispatcher.local_experts)
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        weights, chosen = gates.topk(TOP_K)
        return self.head(x + self.dispatcher(x, chosen, weights / weights.sum(-1, keepdim=True), self.experts))

    def reduce_gradients(self) -> None:
        """Sums the gradients of what all ranks have, in one all_reduce; a rank's loss is a part of the whole loss."""
        shared = [*self.router.parameters(), *self.head.parameters()]
        flat = torch.cat([parameter.grad.view(-1) for parameter in shared])
        parts = at.functional.all_reduce(flat, self.group).split([parameter.numel() for parameter in shared])
        for parameter, part in zip(shared, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def make_expert(number: int) -> nn.Module:
    torch.manual_seed(1000 + number)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def load_digits() -> tuple[Tensor, Tensor]:
    """Returns pixels, 0 to 1, [1797, 64], and classes 0 to 9, [1797]; shuffled, the same on all ranks."""
    pixels, classes = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(pixels)[order] / 16, torch.as_tensor(classes)[order]


def train(group: Communicator, device: torch.device, options: argparse.Namespace, say: bool) -> list[float]:
    """Returns the loss of every epoch, over the digits of all ranks."""
    dtype = getattr(torch, options.dtype)
    pixels, classes = load_digits()
    pixels, classes = pixels.to(device, dtype), classes.to(device)
    model = Classifier(group, dtype).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    losses = []
    for epoch in range(options.epochs):
        total = torch.zeros(2, dtype=dtype, device=device)
        for batch in torch.arange(len(classes)).split(options.batch):
            mine = batch.tensor_split(group.size)[group.rank]  # some ranks get none if the last batch is small
            logits = model(pixels[mine])
            loss = F.cross_entropy(logits, classes[mine], reduction="sum") / len(batch)
            optimizer.zero_grad()
            loss.backward()
            model.reduce_gradients()
            optimizer.step()
            hits = (logits.argmax(-1) == classes[mine]).sum()
            total += torch.stack([loss.detach() * len(batch), hits.to(dtype)])
        loss_sum, hits = (at.functional.all_reduce(total, group) / len(classes)).tolist()
        losses.append(loss_sum)
        if say:
            print(f"epoch {epoch + 1:2d}: loss {loss_sum:.12f}, accuracy {hits:.3f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128, help="digits per step, of all ranks together")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "npu"], help="where every rank computes")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"])
    options = parser.parse_args()
    if options.device == "npu" and find_spec("torch_npu") is None:
        parser.error("--device npu needs torch_npu: pip install 'torch_npu==2.13.*'")
    torch.set_num_threads(1)

    device = torch.device("cpu")
    if options.device == "npu":
        device = torch.device(f"npu:{launch.detect().local_rank}")
        torch.npu.set_device(device)
    group = Communicator.from_env(backend="hccl" if options.device == "npu" else "auto", timeout=120)
    first = group.rank == 0
    if first:
        print(f"{group.size} ranks, {EXPERTS} experts, {options.epochs} epochs of 1,797 digits", flush=True)
    start = time.perf_counter()
    losses = train(group, device, options, first)
    if first:
        print(f"{time.perf_counter() - start:.1f} s; now the same in one process on the cpu", flush=True)
        (alone,) = Communicator.threads(1)
        expected = train(alone, torch.device("cpu"), options, True)
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        tolerance = TOLERANCE if options.dtype == "float64" else 1e-3
        print(f"largest difference {apart:.1e}, tolerance {tolerance:.0e}")
        if not apart <= tolerance:
            raise SystemExit("the losses differ")
        print("same losses")
    group.destroy()


if __name__ == "__main__":
    main()
