"""mint.distributed's collectives on ranks of several hosts, started with msrun's variables."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

import alltoallv.mindspore as am
import alltoallv.mindspore.distributed as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
assert am.init().backend == "tcp"
x = Tensor(np.arange(40_000, dtype=np.float32) + rank)
total = x.copy()
dist.all_reduce(total)
assert np.array_equal(total.asnumpy(), np.arange(40_000, dtype=np.float32) * size + sum(range(size)))
parts = [Tensor(np.zeros(3, np.int32)) for _ in range(size)]
dist.all_gather(parts, Tensor(np.full(3, rank, np.int32)))
assert [part.asnumpy().tolist() for part in parts] == [[j] * 3 for j in range(size)]
rows = am.all_to_all_v(Tensor(np.full((size, 2), rank, np.float32)), [1] * size)
assert rows.asnumpy()[:, 0].tolist() == list(range(size))
quantized = am.quantized_all_reduce(Tensor(np.full(1000, 2.0, np.float32)))
assert np.array_equal(quantized.asnumpy(), np.full(1000, 2.0 * size, np.float32))
if rank == 0:
    dist.send(Tensor(np.arange(5.0, dtype=np.float32)), size - 1)
elif rank == size - 1:
    got = Tensor(np.zeros(5, np.float32))
    dist.recv(got, 0)
    assert got.asnumpy().tolist() == [0, 1, 2, 3, 4]
for members in ([0, size - 1], [0, 1]):  # across the hosts, and on one
    group = dist.new_group(members)
    if rank in members:
        one = Tensor(np.ones(3, np.float32))
        dist.all_reduce(one, group=group)
        assert one.asnumpy().tolist() == [2.0] * 3
dist.barrier()
dist.destroy_process_group()
assert ms.__version__
