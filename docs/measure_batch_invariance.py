"""Of 300 slices of an all-reduce, how many have the bits of the all-reduce of the slice: this package and gloo.

python -m alltoallv run -n 4 docs/measure_batch_invariance.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

SLICES, ELEMENTS = 300, 4096


def kept(group: dist.ProcessGroup) -> int:
    """Slices that keep their bits; the same on all ranks."""
    mine = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(ELEMENTS, generator=mine) * 2.0 ** torch.randint(-6, 7, (ELEMENTS,), generator=mine)
    whole, same = x.clone(), 0
    dist.all_reduce(whole, group=group)
    common = torch.Generator().manual_seed(0)
    for _ in range(SLICES):
        begin, end = torch.randint(0, ELEMENTS + 1, (2,), generator=common).sort()[0].tolist()
        part = x[begin:end].clone()
        dist.all_reduce(part, group=group)
        same += torch.equal(part, whole[begin:end])
    return same


dist.init_process_group("gloo")
for backend in ("alltoallv", "gloo"):
    same = kept(dist.new_group(backend=backend))
    if dist.get_rank() == 0:
        print(f"{backend}: {same} of {SLICES} slices on {dist.get_world_size()} ranks")
dist.destroy_process_group()
