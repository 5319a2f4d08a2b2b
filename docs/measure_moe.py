"""Dispatch and combine of a mixture of experts, ours and others': the tables of docs/moe.md.

    python -m alltoallv run -n 4 --no-prefix docs/measure_moe.py    # on one host
    sudo python docs/measure_moe.py --rate 1gbit                     # bfloat16 and int8 between two, as measure_network

4096 tokens of 4096 float32, all ranks' together, each to 8 of 16 experts and back. The experts give back what they get,
so every result is the tokens, which is checked. All get the same routes, and others a capacity that drops nothing: what
chooses experts is not measured. They talk through gloo; Megatron's counts are made lists for it, which gloo wants.
Those that are not installed are left out:

    pip install fairscale deepspeed && pip install --no-deps megatron-core==0.16.*
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import measure_network
import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv.torch.nn import MoEDispatcher

EXPERTS, TOP_K, WIDTH = 16, 8, 4096
Call = Callable[[Tensor], Tensor]


class Routes:
    """Of this rank's tokens: ids and weights [tokens, TOP_K], and where in an expert's capacity each row lies."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
        self.weights = torch.rand(tokens, TOP_K, generator=generator).softmax(1)
        chosen = torch.nn.functional.one_hot(self.ids, EXPERTS).sum(1)
        self.places = (chosen.cumsum(0) - chosen).gather(1, self.ids)
        most = chosen.sum(0).max()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self.capacity = int(most)


class Gate(torch.nn.Module):
    """In place of a gate: what has been chosen."""

    def __init__(self, answer: tuple[Any, ...]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, *_: object) -> tuple[Any, ...]:
        return self.answer


def ours(routes: Routes, **options: Any) -> Call:
    dispatcher = MoEDispatcher(EXPERTS, dist.group.WORLD, **options)

    def call(x: Tensor) -> Tensor:
        rows, _, state = dispatcher.dispatch(x, routes.ids, routes.weights)
        return dispatcher.combine(rows, state)

    return call


def fairscale(routes: Routes) -> Call:
    from fairscale.nn.moe import MOELayer

    weights = torch.zeros(len(routes.ids), EXPERTS, routes.capacity)
    weights[torch.arange(len(routes.ids))[:, None], routes.ids, routes.places] = routes.weights
    experts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(EXPERTS // dist.get_world_size()))
    layer = MOELayer(Gate((0, weights, weights > 0)), experts)
    return lambda x: layer(x.unsqueeze(1)).squeeze(1)


def deepspeed(routes: Routes) -> Call:
    import deepspeed
    from deepspeed.moe.sharded_moe import MOELayer

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiles what only its all_reduce calls
    deepspeed.init_distributed("gloo", verbose=False)
    answer = (0, routes.capacity, EXPERTS, routes.ids.T, routes.places.T, routes.weights.T, None)
    size = dist.get_world_size()
    layer = MOELayer(Gate(answer), torch.nn.Identity(), "", size, EXPERTS // size)
    layer.ep_group = dist.group.WORLD
    return lambda x: layer(x, None)


def megatron(routes: Routes) -> Call:
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron_dispatcher import without_streams

    without_streams()
    plainly = dist.all_to_all_single

    def with_lists(output: Tensor, input: Tensor, **options: Any) -> Any:
        sizes = {name: [*map(int, given)] for name, given in options.items() if "sizes" in name and given is not None}
        return plainly(output, input, **options | sizes)

    dist.all_to_all_single = torch.distributed.all_to_all_single = with_lists
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(size)][rank]
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=TOP_K
    )
    groups = ProcessGroupCollection(ep=dist.group.WORLD, expt_tp=alone, tp_ep=dist.group.WORLD)
    mine = list(range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size))
    dispatcher = MoEAlltoAllTokenDispatcher(len(mine), mine, config, groups)
    probs = torch.zeros(len(routes.ids), EXPERTS).scatter(1, routes.ids, routes.weights)

    def call(x: Tensor) -> Tensor:
        rows, weights = dispatcher.dispatch_preprocess(x, probs > 0, probs)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, _, weights = dispatcher.dispatch_postprocess(rows, weights)
        rows = dispatcher.combine_preprocess(rows * weights.unsqueeze(-1))
        return dispatcher.combine_postprocess(dispatcher.token_combine(rows))

    return call


OTHERS = {"fairscale": fairscale, "deepspeed": deepspeed, "megatron": megatron}


def competitors(routes: Routes, only: Iterable[str]) -> dict[str, Call]:
    made = {"alltoallv": ours(routes), "alltoallv, int8": ours(routes, payload="int8", combine_payload="int8")}
    for name in only:
        try:
            made[name] = OTHERS[name](routes)
        except ImportError as error:
            if dist.get_rank() == 0:
                print(f"without {name}: {error}", flush=True)
    return made


def dispatches(routes: Routes) -> dict[str, Call]:
    """One way, of bfloat16 tokens."""
    plain, coded = (MoEDispatcher(EXPERTS, dist.group.WORLD, payload=payload) for payload in (None, "int8"))
    return {
        "bfloat16": lambda x: plain.dispatch(x, routes.ids, routes.weights)[0],
        "int8": lambda x: coded.dispatch(x, routes.ids, routes.weights)[0],
    }


def run_rank(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """By competitor the seconds of the slowest rank, of every turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = arguments.tokens // dist.get_world_size()
    routes, x = Routes(tokens), torch.randn(tokens, WIDTH)
    calls = dispatches(routes) if arguments.rate else competitors(routes, arguments.only)
    x = x.bfloat16() if arguments.rate else x
    told: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for turn in range(arguments.turns + 1):
            for name, call in calls.items():
                dist.barrier()
                begin = time.perf_counter()
                result = call(x)
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if turn:
                    told[name].append(took.item())
                elif not arguments.rate and (result - x).abs().max() > (0.2 if "int8" in name else 1e-4):
                    raise SystemExit(f"{name}: the result is off by {(result - x).abs().max():.1e}")
                del result
    return told


def show(told: dict[str, list[float]], title: str) -> None:
    base = statistics.median(next(iter(told.values())))
    print(f"\n{title}\n\n| | s | × the first |\n|---|---|---|")
    for name, times in told.items():
        median = statistics.median(times)
        print(f"| {name} | {median:.3f} | {median / base:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of tc: between two network namespaces, one way")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="*", default=OTHERS, choices=OTHERS, help="of others")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    arguments.mib, arguments.seconds = [1], 60  # measure_network's, which give its time limit
    if arguments.rate and measure_network.RANK not in os.environ:
        told: Any = measure_network.measure(arguments.rate, arguments)
        return show(told, f"{arguments.rate}, {arguments.tokens} tokens, 2 ranks")
    told = run_rank(arguments)
    if dist.get_rank() == 0 and arguments.rate:
        print(json.dumps(told), flush=True)
    elif dist.get_rank() == 0:
        show(told, f"{arguments.tokens} tokens, {dist.get_world_size()} ranks, {arguments.turns} turns")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads would be waited for


if __name__ == "__main__":
    main()
