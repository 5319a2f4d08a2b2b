"""Run under a launcher, with the argument "init" after paddle.distributed.init_parallel_env: groups of every kind."""

import sys
import warnings

import paddle
import paddle.distributed as dist

import alltoallv.paddle as ap

initialized = sys.argv[1:] == ["init"]
if initialized:
    dist.init_parallel_env()
rank = int(ap.exchange_counts([0] * 2).shape[0]) and dist.get_rank() if initialized else None
x = paddle.arange(4, dtype="float32")
mine = int(ap.all_to_all_v(paddle.to_tensor([0, 1]), [1, 1])[0])  # what rank 0 sends here is this rank's number
assert rank in (None, mine)
x += 10 * mine
expected = [0, 1, 10, 11] if mine == 0 else [2, 3, 12, 13]
groups = [None, ap.new_group(), ap.new_group([1, 0])]
if initialized:
    groups += [dist.new_group([0, 1]), dist.get_group(0)]
    # What Paddle itself has on CPU, as oracle.
    parts = []
    dist.all_gather(parts, x)
    assert paddle.concat([part[2 * mine : 2 * mine + 2] for part in parts]).tolist() == expected
    arrives = paddle.empty([4])
    pair = [dist.P2POp(dist.isend, x, 1 - mine), dist.P2POp(dist.irecv, arrives, 1 - mine)]
    for task in ap.batch_isend_irecv(pair):
        task.wait()
    assert arrives.tolist() == [10 * (1 - mine) + n for n in range(4)]
for group in groups:
    out = paddle.empty([4])
    ap.alltoall_single(out, x, group=group)
    assert out.tolist() == expected, group
# In opposite order on the two ranks: groups are independent.
two = [groups[1], groups[2]]
outs = [paddle.empty([4]) for _ in two]
order = [0, 1] if mine == 0 else [1, 0]
tasks = [ap.alltoall_single(outs[i], x, group=two[i], sync_op=False) for i in order]
assert all(task.wait() for task in tasks)
assert [out.tolist() for out in outs] == [expected, expected]
alone = dist.new_group([1]) if initialized else ap.new_group([1])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    got = ap.all_to_all_v(x, [4], group=alone)
    assert ap.alltoall_single(x * 1, x, group=alone) is None or mine == 1
if mine == 0:
    assert got is None
    assert "Current global rank 0 is not in group" in str(said[0].message)
else:
    assert got.tolist() == [10, 11, 12, 13]
    assert not said
print(f"rank {mine} done", flush=True)
