"""torch_npu's own process group on the emulated HCCL, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from npu_ranks import emulated, group
from on_ranks import on_ranks

ITEM = {"float32": np.float32, "float16": np.float16, "int32": np.int32, "int64": np.int64, "int8": np.int8}


def values(rank: int, count: int, dtype: str, seed: int) -> Any:
    """Small integers, whose sums are exact in every dtype."""
    return np.random.default_rng([seed, rank]).integers(-5, 6, count).astype(ITEM[dtype])


@pytest.mark.parametrize("size", [2, 3])
@on_ranks(communicator=False)
def test_collectives(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device):
        seed = 0
        for dtype in ITEM:
            for count in (1, 7, 20000):
                seed += 1
                data = [values(j, count * n, dtype, seed) for j in range(n)]

                def on(array: Any) -> torch.Tensor:
                    return torch.from_numpy(array.copy()).to(device)

                def equal(tensor: torch.Tensor, expected: Any) -> None:
                    np.testing.assert_array_equal(tensor.cpu().numpy(), expected)

                mine = data[rank]
                for op, reduce in ((dist.ReduceOp.SUM, np.add), (dist.ReduceOp.MAX, np.maximum)):
                    x = on(mine)
                    dist.all_reduce(x, op=op)
                    equal(x, reduce.reduce(data))
                part = on(mine[:count])
                dist.reduce_scatter_tensor(part, on(mine))
                equal(part, np.add.reduce(data)[rank * count : (rank + 1) * count])
                gathered = on(np.zeros(n * len(mine), ITEM[dtype]))
                dist.all_gather_into_tensor(gathered, on(mine))
                equal(gathered, np.concatenate(data))
                pieces = [on(np.zeros_like(mine)) for _ in range(n)]
                dist.all_gather(pieces, on(mine))
                for piece, expected in zip(pieces, data, strict=True):
                    equal(piece, expected)
                x = on(mine)
                dist.broadcast(x, n - 1)
                equal(x, data[n - 1])
                x = on(mine)
                dist.reduce(x, 0)
                if rank == 0:
                    equal(x, np.add.reduce(data))
                received = on(np.zeros_like(mine))
                dist.all_to_all_single(received, on(mine))
                equal(received, np.concatenate([d[rank * count : (rank + 1) * count] for d in data]))
                x = on(mine[:count])
                dist.scatter(x, [on(data[0][j * count : (j + 1) * count]) for j in range(n)] if rank == 0 else None)
                equal(x, data[0][rank * count : (rank + 1) * count])
        flags = torch.tensor([rank == 0, True], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        assert flags.tolist() == [False, True]
        average = torch.tensor([rank, -7 * n], device=device)
        dist.all_reduce(average, op=dist.ReduceOp.AVG)  # torch_npu divides the sum, here of integers, in place
        assert average.tolist() == [(n - 1) // 2, -7 * n]
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": j} for j in range(n)]


@pytest.mark.parametrize("backend", ["hccl", "alltoallv"])
@on_ranks(3, communicator=False)
def test_messages_and_subgroups(rank: int, n: int, file: str, backend: str) -> None:
    with group(rank, n, file, backend) as (_, device):
        after, before = (rank + 1) % n, (rank - 1) % n
        x, y = torch.full((5,), rank, device=device), torch.empty(5, dtype=torch.int64, device=device)
        work = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)])
        for pending in work:
            pending.wait()
        assert y.tolist() == [before] * 5
        if rank == 0:
            dist.send(x + 7, 1)
        elif rank == 1:
            dist.recv(y, 0)
            assert y.tolist() == [7] * 5
        outer = dist.new_group([0, n - 1])
        if rank in (0, n - 1):
            total = torch.tensor([rank + 1], device=device)
            dist.all_reduce(total, group=outer)
            assert total.item() == 1 + n
        dist.barrier()


@on_ranks(2, communicator=False)
def test_a_group_of_calls(rank: int, n: int, file: str) -> None:
    """torch_npu takes its functions from libhcomm.so."""
    with group(rank, n, file) as (made, device):
        backend = made._get_backend(device)
        x, y = torch.full((4,), rank + 1, device=device), torch.full((3,), 10 * rank, device=device)
        dist.barrier()  # the communicator is made by the first call
        backend._group_start()
        works = [dist.all_reduce(one, async_op=True) for one in (x, y)]
        backend._group_end()
        torch.npu.synchronize()  # the works' events are recorded before the calls, which start at the end
        assert all(work.is_completed() for work in works)
        assert (x.tolist(), y.tolist()) == ([3] * 4, [10] * 3)


@on_ranks(2, communicator=False)
def test_a_read_without_waiting_is_seen(rank: int, n: int, file: str) -> None:
    """The collective, whose tasks are late, has not run when the result is read too early; torch_npu waits for it."""
    with group(rank, n, file) as (_, device), emulated(task_delay_us=300000):
        x = torch.full((4,), float(rank + 1), device=device)
        torch.npu.synchronize()
        work = dist.all_reduce(x, async_op=True)
        assert x.tolist() == [rank + 1.0] * 4
        work.wait()
        assert (x * 2).tolist() == [n * (n + 1.0)] * 4
