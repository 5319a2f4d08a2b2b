"""Gradients of a tiny Qwen3-MoE and Mixtral, with experts on all ranks by transformers' own plan."""

from __future__ import annotations

import client
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 16, "num_experts_per_tok": 2, "max_position_embeddings": 32,
}  # fmt: skip
KINDS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
}

dist.init_process_group(client.BACKEND)
rank, size = dist.get_rank(), dist.get_world_size()
kept = {}
for kind, more in KINDS.items():
    folder = client.FOLDER / f"{client.BACKEND}-{kind}"
    if rank == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **more)).save_pretrained(folder)
    dist.barrier()
    alone = AutoModelForCausalLM.from_pretrained(folder)
    for tp in (1, size):
        plan = DistributedConfig(tp_size=tp, fsdp_size=size // tp, ep_size=size, ep_implementation="all_to_all")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
        tokens = torch.randint(32, (size // tp, 9), generator=torch.Generator().manual_seed(1))
        mine = tokens[[rank // tp]]
        loss = model(mine, labels=mine).loss
        loss.backward()
        alone.zero_grad()
        whole = alone(tokens, labels=tokens).loss
        whole.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / size, whole.detach())
        grads = {name: each.grad for name, each in model.named_parameters()}
        full = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        for name, each in alone.named_parameters():
            torch.testing.assert_close(full[name], each.grad)
        kept[kind, tp] = mean, full
client.keep(kept)
