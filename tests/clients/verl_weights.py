"""verl's exchange of changed weights and its Ulysses attention, of its package without what that wants beside torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import client
import torch
import torch.distributed as dist
from torch import Tensor

# verl's packages import ray, hydra and more, which these modules do not need.
(root,) = map(Path, importlib.util.find_spec("verl").submodule_search_locations)
for each in ("", "checkpoint_engine", "checkpoint_engine/delta_sync", "utils"):
    package = types.ModuleType(".".join(("verl", *each.split("/"))).rstrip("."))
    package.__path__ = [str(root / each)]
    sys.modules[package.__name__] = package
weights = importlib.import_module("verl.checkpoint_engine.delta_sync.sparse_gather")
ulysses = importlib.import_module("verl.utils.ulysses")

dist.init_process_group(client.BACKEND)
rank, size = dist.get_rank(), dist.get_world_size()
trainers = dist.new_group(list(range(size - 1)))  # the last rank generates: it gets what they have changed
kept = []

parameters = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in (12, 30, 6)]
changed = [each.clone() for each in parameters]
for step, each in enumerate(changed):
    each[step :: step + 3] += 1
if rank < size - 1:
    mine = [
        (each.chunk(size - 1)[rank], old.chunk(size - 1)[rank]) for each, old in zip(changed, parameters, strict=True)
    ]
    found = [weights.shard_delta_indices(new, old, rank * len(new)) for new, old in mine]
    counts = torch.tensor([len(places) for places, _ in found])
    for limit in (None, 40):
        places, values = torch.cat([each[0] for each in found]), torch.cat([each[1] for each in found])
        kept.append(weights.gather_slot_entries_to_rank0(places, values, counts, trainers, limit))

updates = dist.new_group([0, size - 1])  # made while the others go on
if rank in (0, size - 1):
    objects = [[len(places) for places, _ in kept[0]]] if rank == 0 else [None]
    dist.broadcast_object_list(objects, src=0, group=updates)
    for number, (weight, n) in enumerate(zip(parameters, objects[0], strict=True)):
        places, values = kept[0][number] if rank == 0 else (torch.empty(n, dtype=torch.int64), weight.new_empty(n))
        for each in (places, values):
            dist.broadcast(each, src=0, group=updates)
        weight[places] = values
    assert all(map(torch.equal, parameters, changed))
    kept.append(parameters)


def attention(queries: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Over the whole sequence, [rows, heads, width], of which each rank has some rows."""
    if group is not None:
        queries = ulysses.gather_seq_scatter_heads(queries, 0, 1, group=group)
    heads = queries.transpose(0, 1)
    out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(0, 1)
    return out if group is None else ulysses.gather_heads_scatter_seq(out, 1, 0, group=group)


whole = torch.randn(4 * size, 2 * size, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
attention(whole, None).square().sum().backward()
part = whole.detach().chunk(size)[rank].clone().requires_grad_()
out = attention(part, dist.group.WORLD)
out.square().sum().backward()
torch.testing.assert_close(part.grad, whole.grad.chunk(size)[rank])
client.keep([*kept, out.detach(), part.grad])
