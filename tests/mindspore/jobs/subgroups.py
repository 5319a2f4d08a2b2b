"""Three ranks, groups of two and three of them by our names and by MindSpore's, in use at the same time.

MindSpore's own collectives run between ours.
"""

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.communication import create_group
from mindspore.communication import init as mindspore_init

import alltoallv.mindspore as am
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import distributed as dist

mindspore_init()
comm = am.init(timeout=60)
rank = comm.rank
x = Tensor(np.array([rank + 1], np.float32))
members = {am.new_group([2, 0]): [0, 2], am.new_group([0, 1]): [0, 1], am.new_group(): [0, 1, 2]}
if rank in (0, 2):  # MindSpore's own are made by their members
    create_group("outer", [0, 2])
    members["outer"] = [0, 2]
if rank in (1, 2):
    members[mint.distributed.new_group([1, 2], backend="mccl")] = [1, 2]
for name, ranks in members.items():
    if rank not in ranks:
        try:
            am.all_gather_into_tensor(ops.zeros((len(ranks),)), x, group=name)
            raise SystemExit(f"rank {rank} is not in {name}, and was let in")
        except InvalidParamError:
            continue
    for _ in range(3):
        out = ops.zeros((len(ranks),))
        handle = am.all_gather_into_tensor(out, x, group=name, async_op=True)
        assert handle.wait() is None
        assert out.asnumpy().tolist() == [r + 1 for r in ranks], name
        # Rank i of the group sends i + 1 elements to everyone.
        mine = ranks.index(rank) + 1
        got = am.all_to_all_v(ops.ones((mine * len(ranks),)) * rank, [mine] * len(ranks), group=name)
        assert got.asnumpy().tolist() == [r for i, r in enumerate(ranks) for _ in range(i + 1)], name
if rank in (1, 2):  # roots and peers are ranks of the job
    pair = dist.new_group([1, 2])
    assert (dist.get_rank(pair), dist.get_group_rank(pair, 2), dist.get_global_rank(pair, 1)) == (rank - 1, 1, 2)
    gathered = [ops.zeros((1,)), ops.zeros((1,))]
    dist.gather(x, gathered, dst=2, group=pair)
    assert [part.asnumpy().item() for part in gathered] == ([2, 3] if rank == 2 else [0, 0])
    told = [rank]
    dist.broadcast_object_list(told, src=2, group=pair)
    assert told == [2]
    if rank == 2:
        dist.send(x, 1, group=pair)
    else:
        dist.recv(x, 2, group=pair)
    assert x.asnumpy().item() == 3
    dist.destroy_process_group(pair)
parts = [ops.zeros_like(x) for _ in range(3)]
mint.distributed.all_gather(parts, Tensor(np.array([rank + 1], np.float32)))
assert [part.asnumpy().item() for part in parts] == [1, 2, 3]
reduce = ops.AllReduce()
for step in range(40):  # ours behind a pending one of MindSpore's, and one of MindSpore's behind ours
    pending = reduce(Tensor(np.full(3000, step + rank, np.float32)))
    ours = am.all_to_all_v(pending, [1000] * 3, [1000] * 3)
    assert (reduce(ours).asnumpy() == 9 * (step + 1)).all(), step
am.exchange_counts([0] * 3)
print("groups agree", flush=True)
