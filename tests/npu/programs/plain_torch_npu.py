"""A torch_npu program that knows nothing of an emulator: trains a small model with all_reduce of the gradients."""

import os
import sys

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch import nn
from torch.nn import functional as F


def main() -> None:
    dist.init_process_group("hccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    assert torch.npu.is_available()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to("npu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(12 * size, 8), torch.randint(0, 3, (12 * size,))
    mine = slice(12 * rank, 12 * rank + 12)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[mine].npu()), y[mine].npu())
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(f"arguments {sys.argv[1:]} name {__name__} loss {total.item() / size:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
