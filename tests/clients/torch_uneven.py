"""DTensor between every two placements of dimensions that the ranks do not divide, forward and back."""

from __future__ import annotations

import client
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

dist.init_process_group(client.BACKEND)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
kept = {}
for shape in ((5, 7), (2, 4, 3), (1, 8)):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    placements = [Replicate(), *map(Shard, range(len(shape)))]
    for before in placements:
        for after in placements:
            x = distribute_tensor(whole, mesh, [before]).requires_grad_()
            y = x.redistribute(placements=[after])
            torch.testing.assert_close(y.full_tensor(), whole, rtol=0, atol=0)
            (y * y).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)
            kept[shape, str(before), str(after)] = y.to_local().detach(), x.grad.to_local()
    for after in placements:
        numbers = (8 * whole).round()  # whose sums are exact in any order
        parts = DTensor.from_local(numbers * (dist.get_rank() + 1), mesh, [Partial()])
        y = parts.redistribute(placements=[after])
        total = sum(range(1, dist.get_world_size() + 1))
        torch.testing.assert_close(y.full_tensor(), numbers * total, rtol=0, atol=0)
        kept[shape, "sum", str(after)] = y.to_local()
client.keep(kept)
