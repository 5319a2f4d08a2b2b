"""A program for GPUs, which knows nothing of this package: Paddle's MoELayer in fleet's groups, and its losses.

With the argument "alone" one process has all experts.
"""

import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.incubate.distributed.models.moe import MoELayer
from paddle.incubate.distributed.models.moe.gate import GShardGate

MODEL, EXPERTS, TOKENS = 8, 4, 32
alone = sys.argv[1:] == ["alone"]
paddle.set_device("gpu")
rank, size, ranks, group = 0, 1, 1, None
if not alone:
    strategy = fleet.DistributedStrategy()
    ranks = dist.ParallelEnv().world_size
    shards = ranks // 2
    degrees = {"dp_degree": 1, "sharding_degree": ranks, "ep_degree": 2, "moe_sharding_degree": shards}
    strategy.hybrid_configs = degrees
    strategy.hybrid_parallel_order = ["sharding", "moe_sharding", "pp", "sep", "cp", "dp", "ep", "mp"]
    fleet.init(is_collective=True, strategy=strategy)
    groups = fleet.get_hybrid_communicate_group()
    group, size = groups.get_expert_parallel_group(), groups.get_expert_parallel_world_size()
    rank = groups.get_expert_parallel_rank()
    expected = [[0, 1], [2, 3]][:shards]
    assert group.ranks == expected[dist.get_rank() // 2]


def expert(number: int) -> nn.Layer:
    paddle.seed(100 + number)
    return nn.Sequential(nn.Linear(MODEL, 16), nn.Tanh(), nn.Linear(16, MODEL))


def train(kind: str) -> list[float]:
    mine = EXPERTS // size
    experts = nn.LayerList([expert(rank * mine + k) for k in range(mine)])
    paddle.seed(7)
    gate = {"type": "naive", "top_k": 2}
    if kind == "gshard":  # its capacities are large enough that no number of ranks drops a token
        gate = GShardGate(MODEL, mine, size, capacity=(4.0, 4.0), random_routing=False, group=group)
    layer = MoELayer(d_model=MODEL, experts=experts, gate=gate, moe_group=group)
    optimizer = paddle.optimizer.SGD(0.5 / ranks, parameters=layer.parameters())
    data = np.random.default_rng(0).normal(size=(2, TOKENS, 1, MODEL)).astype("float32")
    part = slice(dist.get_rank() * TOKENS // ranks, (dist.get_rank() + 1) * TOKENS // ranks)
    x, y = (paddle.to_tensor(each[part]) for each in data)
    losses = []
    for _ in range(4):
        loss = ((layer(x.clone()) - y) ** 2).mean()
        loss.backward()
        for parameter in [] if alone else layer.parameters():
            if parameter.grad is not None:
                shared = parameter.name.startswith("gate_")
                dist.all_reduce(parameter.grad, group=None if shared else groups.get_moe_sharding_parallel_group())
        optimizer.step()
        optimizer.clear_grad()
        total = loss.detach()
        if not alone:
            dist.all_reduce(total)
        losses.append(float(total) / ranks)
    return losses


for kind in ("naive", "gshard"):
    print(kind, *(f"{loss:.5f}" for loss in train(kind)), flush=True)
