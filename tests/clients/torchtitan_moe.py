"""torchtitan's MoE layer with its all-to-all dispatcher, forward and gradients, beside one process with all experts."""

from __future__ import annotations

import client
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

EXPERTS, TOP, WIDTH, HIDDEN = 6, 2, 16, 32


def make(experts: int) -> MoE:
    """A layer that holds so many experts itself."""
    routed = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=WIDTH, hidden_dim=HIDDEN, num_experts=experts),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP),
    )
    gate = Linear.Config(in_features=WIDTH, out_features=EXPERTS)
    router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP)
    return MoE.Config(num_experts=EXPERTS, routed_experts=routed, router=router).build()


dist.init_process_group(client.BACKEND)
set_spmd_backend("partial_dtensor")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
alone, ours = make(EXPERTS), make(EXPERTS // size)
with torch.no_grad():
    for each in (*alone.parameters(), *alone.buffers()):
        each.normal_(std=0.3) if each.requires_grad else each.zero_()
    for (name, mine), whole in zip(ours.state_dict().items(), alone.state_dict().values(), strict=True):
        mine.copy_(whole.chunk(size)[rank] if "inner_experts" in name else whole)
ours.tokens_per_expert_E.zero_()
ours.routed_experts.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))

x = torch.randn(size, 7, WIDTH)
whole = alone(x.requires_grad_())
whole.square().sum().backward()
part = x.detach()[rank : rank + 1].requires_grad_()
out = ours(part)
torch.testing.assert_close(out, whole[rank : rank + 1])
out.square().sum().backward()
torch.testing.assert_close(part.grad, x.grad[rank : rank + 1], rtol=1e-2, atol=1e-3)  # the experts compute in bfloat16
grads = {name: each.grad for name, each in ours.named_parameters()}
for name, each in alone.named_parameters():
    if "inner_experts" in name:
        torch.testing.assert_close(grads[name], each.grad.chunk(size)[rank], rtol=1e-2, atol=1e-2)
client.keep([out.detach(), part.grad, grads])
