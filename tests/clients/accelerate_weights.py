"""accelerate's training, gathers and broadcasts, and new weights for a process that generates, over a later group."""

from __future__ import annotations

import client
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object, pad_across_processes, reduce
from torch import nn

STEPS = 3


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 1))
    return net, torch.optim.SGD(net.parameters(), 0.1)


dist.init_process_group(client.BACKEND)
accelerator = Accelerator(cpu=True)
rank, size = accelerator.process_index, accelerator.num_processes
kept = []

x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
net, optimizer = accelerator.prepare(*make())
alone, other = make()
for _ in range(STEPS):
    for model, each, rows in ((net, optimizer, x[rank : rank + 1]), (alone, other, x)):
        each.zero_grad()
        loss = model(rows).square().mean()
        accelerator.backward(loss) if model is net else loss.backward()
        each.step()
trained = accelerator.unwrap_model(net).state_dict()
for name, each in alone.named_parameters():
    torch.testing.assert_close(trained[name], each.detach())

updates = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    rollout = make()[0] if rank else None
    for name, each in trained.items():
        weight = each if rank == 0 else rollout.get_parameter(name).data
        dist.broadcast(weight, src=0, group=updates)
        kept.append(weight)

rows = torch.arange(2.0 * (rank + 1)).view(-1, 2)
padded = pad_across_processes(rows, pad_index=-1)
kept += [accelerator.gather(padded), accelerator.gather_for_metrics(torch.tensor([rank])), reduce(rows[:1], "mean")]
kept += [broadcast(rows[:1].clone(), from_process=1), gather_object([{"rank": rank}] * rank)]
kept.append(broadcast_object_list([f"from {rank}", rank], from_process=size - 1))
assert kept[-1] == [f"from {size - 1}", size - 1]
assert len(kept[-2]) == size * (size - 1) // 2
client.keep([trained, *kept])
