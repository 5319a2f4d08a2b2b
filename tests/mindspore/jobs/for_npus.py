"""A program as it is written for NPUs; it knows nothing of alltoallv."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import comm_func, get_group_size, get_rank, init
from mindspore.mint.distributed import (
    P2POp,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    barrier,
    batch_isend_irecv,
    broadcast_object_list,
    destroy_process_group,
    get_world_size,
    init_process_group,
    new_group,
    reduce_scatter_tensor,
)

assert Path(sys.path[0]) == Path(__file__).resolve().parent  # it can import what lies beside it
ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
ms.set_device("Ascend", 0)
init("hccl")
init_process_group()
rank, size = get_rank(), get_group_size()
assert get_world_size() == size == 2
x = Tensor(np.full((2, 3), rank + 1, np.float32))
assert all_reduce(x) is None
assert (x.asnumpy() == 3).all()
out = Tensor(np.zeros((4, 3), np.float32))
all_gather_into_tensor(out, Tensor(np.full((2, 3), rank, np.float32)), group=new_group([0, 1]))
assert out.asnumpy()[:, 0].tolist() == [0, 0, 1, 1]
rows = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank)
handle = all_to_all_single(x, rows, async_op=True)
handle.wait()
assert x.asnumpy()[:, 0].tolist() == [3 * rank, 3 * rank + 10]
exchanged = ops.AlltoAllV(block_size=3)(rows.reshape(-1), [1, 1], [1, 1])
assert exchanged.asnumpy()[::3].tolist() == [3 * rank, 3 * rank + 10]
part = Tensor(np.zeros((1, 3), np.float32))
reduce_scatter_tensor(part, rows)
assert part.asnumpy().tolist() == [[6 * rank + 10, 6 * rank + 12, 6 * rank + 14]]
for handle in batch_isend_irecv([P2POp("isend", rows, 1 - rank), P2POp("irecv", x, 1 - rank)]):
    handle.wait()
assert x.asnumpy()[0, 0] == 10 * (1 - rank)
objects = ["told", {"by": 0}] if rank == 0 else [None, None]
broadcast_object_list(objects)
assert objects == ["told", {"by": 0}]

total, handle = comm_func.all_reduce(rows)
assert handle is None
assert total.asnumpy()[0].tolist() == [10, 12, 14]
gathered, _ = comm_func.all_gather_into_tensor(rows)
assert gathered.shape == (4, 3)
mine, _ = comm_func.reduce_scatter_tensor(rows)
assert mine.asnumpy().tolist() == part.asnumpy().tolist()
assert comm_func.broadcast(rows, 1).asnumpy()[0, 0] == 10
assert comm_func.reduce(rows, 0).asnumpy()[0, 0] == (10 if rank == 0 else 10 * rank)
assert comm_func.scatter_tensor(rows, 1).asnumpy()[0, 0] == 10 + 3 * rank
assert comm_func.gather_into_tensor(rows, 1).shape == ((4, 3) if rank == 1 else (1,))
(first, second), _ = comm_func.all_to_all_with_output_shape([(3,), (1, 3)], [rows[0], rows[1]])
assert first.asnumpy()[0] == 3 * rank
assert second.asnumpy()[0, 0] == 10 + 3 * rank
single, _ = comm_func.all_to_all_single_with_output_shape((2, 3), rows)
assert single.asnumpy()[1, 0] == 10 + 3 * rank
if rank == 0:
    comm_func.send(rows, 1)
else:
    assert comm_func.recv(Tensor(np.zeros((2, 3), np.float32)), 0).asnumpy()[0, 0] == 0
sent, got = comm_func.batch_isend_irecv(
    [comm_func.P2POp("isend", rows, 1 - rank), comm_func.P2POp("irecv", (2, 3), 1 - rank, recv_dtype=rows.dtype)]
)
assert sent.shape == ()
assert got.asnumpy()[0, 0] == 10 * (1 - rank)
swapped = Tensor(np.zeros((2, 3), np.float32))
comm_func.all_to_all_v_c(swapped, rows, [1, 1, 1, 1])
assert swapped.asnumpy()[:, 0].tolist() == [3 * rank, 10 + 3 * rank]
comm_func.barrier()
barrier()
destroy_process_group()
print("ran on CPU", flush=True)
