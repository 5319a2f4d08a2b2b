"""DistributedDataParallel, FSDP2 and DTensor on backend alltoallv."""

from __future__ import annotations

import torch
import torch.distributed as dist
from backend_groups import Grouped, on_group, operators
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def mlp() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 20, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def test_ddp(grouped: Grouped) -> None:
    """Gradients and weights equal DDP's over gloo: bit for bit on 2 ranks, else up to the order of additions."""

    def run(rank: int, size: int, group: dist.ProcessGroup) -> None:
        gloo = dist.new_group(backend="gloo")
        models = [
            DistributedDataParallel(mlp(), process_group=g, bucket_cap_mb=0.01)
            for g in (group, gloo)  # 3 buckets
        ]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        before = operators(group)
        for step in range(STEPS):
            x, y = (part.chunk(size)[rank] for part in batch(step, 8 * size))
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                if size == 2:
                    assert ours.grad.equal(theirs.grad), (step, name)
                    assert ours.equal(theirs), (step, name)
                else:
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        assert operators(group) > before + 2 * STEPS
        flat = torch.cat([p.detach().reshape(-1) for p in models[0].parameters()])
        dist.all_gather(all_flat := [torch.empty_like(flat) for _ in range(size)], flat)
        assert all(other.equal(flat) for other in all_flat)  # replicas have not drifted apart

        # Uneven inputs, no_sync, and a Python hook on the futures.
        model = models[0]
        with model.join():
            for step in range(2 + rank):
                model(batch(step, 4)[0]).sum().backward()

        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch would read the annotations
            future = dist.all_reduce(bucket.buffer() / size, group=group, async_op=True).get_future()
            return future.then(lambda f: f.value()[0])

        plain, *hooked = (DistributedDataParallel(mlp(), process_group=group) for _ in range(4))
        for model, one in zip(
            hooked, (hook, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook), strict=True
        ):
            model.register_comm_hook(None if one is hook else group, one)
        x = batch(0, 8 * size)[0].chunk(size)[rank]
        for model in (plain, *hooked):
            with model.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            limits = {"rtol": 0.01, "atol": 0.01} if model is hooked[2] else {}
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, **limits)

    grouped(2)(run)
    grouped(3)(run)


def test_fsdp2(grouped: Grouped) -> None:
    """A few steps of fully_shard equal steps of the unsharded model on the whole batch."""

    def run(rank: int, size: int, group: dist.ProcessGroup) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        def transformer() -> nn.Module:
            torch.manual_seed(3)
            layers = [nn.TransformerEncoderLayer(20, 2, 31, 0.0, batch_first=True) for _ in range(2)]
            return nn.Sequential(*layers, nn.Linear(20, 4))

        mesh = init_device_mesh("cpu", (size,))
        assert mesh.get_group() is group
        sharded, whole = transformer(), transformer()
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (sharded, whole)]
        before = operators(group)
        losses = []
        for step in range(STEPS):
            x, y = batch(step, 6 * size * 3)
            x, y, mine = x.view(-1, 3, 20), y.view(-1, 3), slice(6 * rank, 6 * rank + 6)
            for model, optimizer, rows in zip((sharded, whole), optimizers, (mine, slice(None)), strict=True):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        assert operators(group) > before + 4 * STEPS
        for (name, shard), full in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert shard.full_tensor().shape == full.shape
            torch.testing.assert_close(
                shard.full_tensor(), full, rtol=1e-4, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}"
            )
        assert losses[-1] < losses[0] * 1.5
        return losses

    losses = grouped(4)(run)
    assert all(other == losses[0] for other in losses)


@on_group(4)
def test_dtensor_on_a_mesh(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """A mesh of 2 x 2 ranks: sub-groups of the backend, redistribution between all placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert mesh.get_group("rows").name() == "alltoallv"
    whole = torch.arange(48.0).view(6, 8)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    before = sum(operators(mesh.get_group(name)) for name in ("rows", "columns"))
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(1), Shard(1)]):
        moved = tensor.redistribute(mesh, placements)
        assert moved.full_tensor().equal(whole)
    product = tensor @ tensor.t()
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())
    assert any(isinstance(p, Partial) for p in (tensor.sum(0)).placements)
    assert tensor.sum(0).full_tensor().equal(whole.sum(0))
    assert sum(operators(mesh.get_group(name)) for name in ("rows", "columns")) > before
