"""What paddle.distributed gives under `alltoallv.paddle.install`, on two ranks."""

import alltoallv
import alltoallv.paddle as ap

ap.install()

import os  # noqa: E402

import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402
import pytest  # noqa: E402
from paddle.incubate.distributed.models.moe import MoELayer  # noqa: E402
from paddle.incubate.distributed.models.moe.grad_clip import ClipGradForMOEByGlobalNorm  # noqa: E402

from alltoallv.paddle.installation import ProcessGroup  # noqa: E402

os.environ["PADDLE_DISTRI_BACKEND"] = "nccl"  # as programs for GPUs do
dist.init_parallel_env()
rank, peer = dist.get_rank(), 1 - dist.get_rank()
assert (dist.get_world_size(), dist.is_initialized(), "PADDLE_TRAINER_ID" in os.environ) == (2, True, False)
assert alltoallv.Communicator.from_env().rank == rank
x = paddle.arange(4.0) + 10 * rank
both = [[0, 1, 2, 3], [10, 11, 12, 13]]
group = dist.new_group([1, 0], backend="nccl")


def lists(tensors):
    return [each.tolist() for each in tensors]


for how in ({}, {"sync_op": False}):
    for where in (None, group):

        def wait(task, is_sync=not how):
            assert (task.wait(), task.is_completed(), task.is_sync()) == (True, True, is_sync)

        out = []
        wait(dist.all_gather(out, x, group=where, **how))
        assert lists(out) == both
        out = []
        wait(dist.alltoall(out, [x, x + 1], group=where, **how))
        assert lists(out) == [[v + rank for v in part] for part in both]
        out = paddle.empty([4])
        wait(dist.alltoall_single(out, x, group=where, **how))
        assert out.tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
        total = x.clone()
        wait(dist.all_reduce(total, dist.ReduceOp.MAX, group=where, **how))
        assert total.tolist() == both[1]
        total = x.clone()
        wait(dist.reduce(total, 1, group=where, **how))
        assert total.tolist() == ([10, 12, 14, 16] if rank == 1 else both[0])
        part = paddle.empty([2])
        wait(dist.reduce_scatter(part, [x[:2], x[2:]], group=where, **how))
        assert part.tolist() == ([10, 12] if rank == 0 else [14, 16])
        wait(dist.scatter(part, [x[:2], x[2:]] if rank else None, src=1, group=where, **how))
        assert part.tolist() == ([10, 11] if rank == 0 else [12, 13])
        out = [] if rank == 0 else None
        wait(dist.gather(x, out, dst=0, group=where, **how))
        assert out is None or lists(out) == both
        same = x.clone()
        wait(dist.broadcast(same, src=1, group=where, **how))
        assert same.tolist() == both[1]
# Lists may have the output among them, as in Paddle's own examples.
parts = [x[:2].clone(), x[2:].clone()]
dist.stream.reduce_scatter(parts[0], parts, use_calc_stream=True)
assert parts[0].tolist() == ([10, 12] if rank == 0 else [14, 16])
uneven = paddle.empty([2 if rank == 0 else 6])  # rank 0 keeps one of its four, rank 1 keeps three
dist.stream.alltoall_single(uneven, x, [1, 1] if rank == 0 else [3, 3], [1, 3])
assert uneven.tolist() == ([0, 10] if rank == 0 else [1, 2, 3, 11, 12, 13])
# Messages, one by one, in a batch, in parts, and objects.
came = paddle.empty([4])
for task in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, came, peer)]):
    task.wait()
assert came.tolist() == both[peer]
members = group.process_group
came = paddle.zeros([4])
if rank == 0:
    members.send_partial(x, 1, 2, 1)
    members.send_partial_on_calc_stream(x, 1, 2, 0)
else:
    members.recv_partial(came, 0, 2, 1)
    assert came.tolist() == [0, 0, 2, 3]
    members.recv_partial_on_calc_stream(came, 0, 2, 0)
    assert came.tolist() == both[0]
quarters = x.clone()
members.all_gather_partial_on_calc_stream(quarters, quarters, 2, rank)
assert quarters.tolist() == [0, 1, 12, 13]
whole, half = paddle.empty([8]), paddle.empty([2])
members.all_gather(x, whole).wait()
assert whole.tolist() == both[0] + both[1]
members.scatter(x, half, 1).wait()
assert half.tolist() == [10 + 2 * rank, 11 + 2 * rank]
texts = []
dist.all_gather_object(texts, {"rank": rank})
assert texts == [{"rank": 0}, {"rank": 1}]
texts = [rank, "x"]
dist.broadcast_object_list(texts, 1)
assert texts == [1, "x"]
# What Paddle lacks on CPU, and what it does in C++.
work = dist.all_reduce(slow := paddle.ones([2]), sync_op=False)
dist.wait(slow, use_calc_stream=False)
assert (work.is_completed(), slow.tolist()) == (True, [2, 2])
dist.wait(slow)
model = paddle.DataParallel(paddle.nn.Linear(4, 1), group=group)
model(x).sum().backward()
assert model._layers.weight.grad.flatten().tolist() == [5, 6, 7, 8]
with pytest.raises(alltoallv.errors.BackendUnavailableError, match="group has 1 of 2 ranks, expected all"):
    paddle.base.core.EagerReducer([], [], [], ProcessGroup(0, 1))
# Experts whose tokens are also divided over a group for model parallelism, and gradients clipped over all experts.
sums = []
for mp_group in (None, group):
    experts = paddle.nn.LayerList()
    for number in range(2):
        paddle.seed(2 * rank + number)
        experts.append(paddle.nn.Linear(4, 4))
    paddle.seed(7)
    layer = MoELayer(4, experts, {"type": "naive", "top_k": 2}, moe_group=group, mp_group=mp_group)
    result = layer(paddle.arange(24.0).reshape([3, 2, 4]))
    result.sum().backward()
    sums.append(result.tolist())
assert sums[0] == sums[1]
inside = {id(each) for each in experts.parameters()}
clip = ClipGradForMOEByGlobalNorm(1.0, lambda each: id(each) in inside, group)
norm = paddle.stack([(g**2).sum() for p, g in clip([(p, p.grad) for p in layer.parameters()]) if id(p) in inside]).sum()
dist.all_reduce(norm)
assert 0 < float(norm) <= 1.0001
# A rank's mistake is heard by all, and names what differs.
with pytest.raises(alltoallv.errors.PeerMismatchError, match="rank 0 has elements: 1, rank 1 has elements: 2"):
    dist.all_reduce(paddle.ones([rank + 1]))
dist.barrier()
refused = {
    "backend is 'median', expected None or one of gloo": lambda: dist.new_group([0, 1], backend="median"),
    r"ranks is \[0, 5\], expected different ranks below 2": lambda: dist.new_group([0, 5]),
    r"rank is 9, expected one of the group's ranks \[0, 1\]": lambda: dist.broadcast(paddle.ones([1]), src=9),
}
for said, call in refused.items():
    with pytest.raises(alltoallv.errors.InvalidParamError, match=said):
        call()
with pytest.raises(alltoallv.errors.InvalidParamError, match="the process group belongs to no group"):
    ProcessGroup(rank, 2).barrier()
print("done")
