"""The ranks give all_reduce tensors of different sizes."""

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

dist.init_process_group("hccl")
rank = dist.get_rank()
torch.npu.set_device(rank)
x = torch.ones(4 + rank, device="npu")
dist.all_reduce(x)
print("the sum is", x.tolist(), flush=True)
