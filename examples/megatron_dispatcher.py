"""Runs Megatron-core's token dispatchers, unmodified, without a GPU: on CPU or on emulated NPUs.

Every rank routes its tokens to 2 of 8 experts, which the ranks share: Megatron's dispatcher sends them there and back,
forward and backward. One process then does the same with all tokens and all experts; the results, the gradients of the
tokens and of the experts differ in rounding only, below 1e-12 in float64.

    pip install --no-deps "megatron-core==0.16.*"    # beside `.[torch]`; without what it wants of a GPU
    python -m alltoallv run -n 4 examples/megatron_dispatcher.py

On CPU the processes talk through torch.distributed's backend `alltoallv`: gloo does not take the dispatcher's counts.
The dispatcher asks torch.cuda for streams, of which a CPU has none: `without_streams` is all that it needs. On NPUs,
emulated here, torch_npu's transfer_to_npu does that:

    pip install torch_npu==2.13.*
    python -m alltoallv run --emulate-npu -n 4 examples/megatron_dispatcher.py --device npu

With --flex it uses MoEFlexTokenDispatcher, whose deep_ep is `alltoallv.deep_ep`; weights then travel as float32, and
the results agree to 1e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import types
from importlib.util import find_spec

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/megatron_dispatcher.py needs {error.name}: pip install torch") from None

EXPERTS, TOP_K, TOKENS, WIDTH = 8, 2, 12, 16
TOLERANCE, FLEX_TOLERANCE = 1e-12, 1e-6


def without_streams() -> None:
    """Gives torch.cuda what Megatron asks it for, on a CPU: one stream whose work is always done."""
    event = types.SimpleNamespace(synchronize=lambda: None)
    stream = types.SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *args: stream
    torch.cuda.stream = lambda chosen: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")


def route(router: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the experts of every token and their weights: [tokens, EXPERTS] each."""
    weights, chosen = (x @ router).softmax(-1).topk(TOP_K)
    probs = torch.zeros(len(x), EXPERTS, dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
    return probs > 0, probs


def expert(weight: Tensor, rows: Tensor) -> Tensor:
    return torch.tanh(rows @ weight)


def layer(dispatcher: object, router: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """Runs this rank's tokens through all ranks' experts, in the steps of Megatron's MoELayer."""
    chosen, probs = route(router, x)
    rows, row_probs = dispatcher.dispatch_preprocess(x, chosen, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    parts = zip(weights, rows.split(counts.tolist()), strict=True)
    made = torch.cat([expert(weight, part) for weight, part in parts]) * row_probs.unsqueeze(-1)
    made = dispatcher.combine_preprocess(made)
    return dispatcher.combine_postprocess(dispatcher.token_combine(made))


def plainly(router: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """Applies every expert to every token; most have weight zero."""
    _, probs = route(router, x)
    return sum(expert(weight, x) * probs[:, number : number + 1] for number, weight in enumerate(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "npu"], help="where every rank computes")
    parser.add_argument("--flex", action="store_true", help="MoEFlexTokenDispatcher, in place of the all-to-all one")
    options = parser.parse_args()
    if options.device == "npu" and find_spec("torch_npu") is None:
        parser.error("--device npu needs torch_npu: pip install 'torch_npu==2.13.*'")
    if find_spec("megatron") is None:
        parser.error("Megatron-core is missing: pip install --no-deps 'megatron-core==0.16.*'")
    on_npu = options.device == "npu"
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if on_npu:
        from torch_npu.contrib import transfer_to_npu  # noqa: F401 - torch.cuda means NPUs from here on

        device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
        torch.npu.set_device(device)
    else:
        import alltoallv.torch

        without_streams()
    dist.init_process_group("hccl" if on_npu else "alltoallv")
    if options.flex:
        import alltoallv.deep_ep

        alltoallv.deep_ep.install()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(size)][rank]
    groups = ProcessGroupCollection(ep=dist.group.WORLD, expt_tp=alone, tp_ep=dist.group.WORLD)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_dtype="fp64",
    )
    if options.flex:
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", "deepep"
    mine = list(range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size))
    dispatcher = (MoEFlexTokenDispatcher if options.flex else MoEAlltoAllTokenDispatcher)(
        len(mine), mine, config, groups
    )

    torch.manual_seed(0)
    router, every = torch.randn(WIDTH, EXPERTS).double(), torch.randn(EXPERTS, WIDTH, WIDTH).double()
    tokens, target = torch.randn(2, size, TOKENS, WIDTH).double()
    x, weights = tokens[rank].to(device).requires_grad_(), every[mine].to(device).requires_grad_()
    y = layer(dispatcher, router.to(device), weights, x)
    (y * target[rank].to(device)).sum().backward()

    all_x, all_weights = tokens.view(-1, WIDTH).requires_grad_(), every.requires_grad_()
    all_y = plainly(router, all_weights, all_x)
    (all_y * target.view(-1, WIDTH)).sum().backward()
    pairs = {
        "results": (y, all_y.view_as(tokens)[rank]),
        "gradients of tokens": (x.grad, all_x.grad.view_as(tokens)[rank]),
        "gradients of experts": (weights.grad, all_weights.grad[mine]),
    }
    for name, (ours, expected) in pairs.items():
        apart = (ours.detach().cpu() - expected.detach()).abs().max().item()
        if not apart <= (FLEX_TOLERANCE if options.flex else TOLERANCE):
            raise SystemExit(f"rank {rank}: the {name} differ by {apart:.1e}")
    dist.barrier()
    if rank == 0:
        print(f"{size} ranks, {len(mine)} of {EXPERTS} experts each: the same as one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
