"""Trains examples/moe_torch.py on NPUs, with our exchanges and with torch_npu's own all_to_all_single in their place.

Started by test_npu_examples.py; rank 0 prints one line per way: the losses, in hexadecimal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import Communicator
from alltoallv._calls.counts import Layout, packed
from alltoallv.launch import detect as launch
from alltoallv.torch.eager import calls

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import moe_torch

used = 0


class Theirs:
    """A call ready to run, as `alltoallv.torch.eager.calls` has them."""

    def __init__(self, output: Tensor, input: Tensor, layout: Layout) -> None:
        sends, sdispls, recvs, rdispls = layout
        assert sdispls == packed(sends)
        assert rdispls == packed(recvs)
        self.output, self.input = output, input
        self.sends, self.recvs = list(sends), list(recvs)

    def run(self) -> Any:
        global used
        used += 1
        dist.all_to_all_single(self.output.view(-1), self.input.reshape(-1), self.recvs, self.sends)
        return self.output, self.recvs


def exchange(comm: Any, operator: str, output: Tensor, input: Tensor, layout: Layout, row: int = 1) -> Theirs:
    return Theirs(output, input, layout)


def learn(comm: Any, operator: str, input: Tensor, sends: list[int], sdispls: list[int], row: int = 1) -> Theirs:
    told = torch.tensor(sends).to(input.device)
    heard = torch.empty_like(told)
    dist.all_to_all_single(heard, told)
    recvs = heard.tolist()
    return Theirs(input.new_empty(sum(recvs)), input, (sends, sdispls, recvs, packed(recvs)))


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device(f"npu:{launch.detect().local_rank}")
    torch.npu.set_device(device)
    dist.init_process_group("hccl")
    options = argparse.Namespace(epochs=3, batch=256, lr=0.3, device="npu", dtype="float32")
    with Communicator.from_env(backend="hccl", timeout=120) as group:
        for way in ("ours", "theirs"):
            if way == "theirs":
                calls.exchange, calls.learn = exchange, learn  # type: ignore[assignment]
            losses = moe_torch.train(group, device, options, False)
            if group.rank == 0:
                print(way, *(loss.hex() for loss in losses), flush=True)
        assert used > 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
