"""A program that destroys nothing: its communicator goes at exit, before torch_npu, which it imports later."""

from __future__ import annotations

import os

from alltoallv import Communicator  # isort: skip
import torch

import alltoallv.torch as at

rank, size = int(os.environ["ALLTOALLV_RANK"]), int(os.environ["ALLTOALLV_WORLD_SIZE"])
torch.npu.set_device(rank)
comm = Communicator.from_env(backend="hccl")
y = at.all_to_all_v(torch.full((size,), float(rank)).npu(), [1] * size, [1] * size, group=comm)
print("it has", y.tolist())
