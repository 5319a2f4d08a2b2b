"""Sorts tokens by expert and brings them back, where a map of tokens by experts says who goes where."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.moe import rows_at
from alltoallv.npu_ops.registry import differentiate, expect, operator, present


def _slots(routing_map: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Returns token and expert of each row, by expert and then by token. With a capacity each expert has as many rows;
    rows without a choice repeat tokens that did not choose the expert.
    """
    by_expert = routing_map.bool().t()
    if capacity is None:
        experts, tokens = by_expert.nonzero(as_tuple=True)
        return tokens, experts
    tokens = by_expert.int().sort(dim=1, descending=True, stable=True)[1][:, :capacity].reshape(-1)
    return tokens, torch.arange(len(by_expert)).repeat_interleave(capacity)


@operator("npu_moe_token_permute_with_routing_map")
def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int | None, drop_and_pad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, their probabilities, and each row's place by token (with ``drop_and_pad`` its token)."""
    rows = len(tokens) if num_out_tokens is None else num_out_tokens
    sources, experts = _slots(routing_map, rows // routing_map.size(1) if drop_and_pad else None)
    if not drop_and_pad:
        expect(len(sources) == rows, "num_out_tokens", num_out_tokens, f"the map's {len(sources)} ones")
    places = sources if drop_and_pad else sources.sort(stable=True)[1]
    permuted_probs = tokens.new_zeros(0) if probs is None else probs[sources, experts]
    return tokens[sources], permuted_probs, places.to(torch.int32)


@operator("npu_moe_token_permute_with_routing_map_grad")
def permute_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    sources, experts = _slots(routing_map, len(sorted_indices) // experts_num if drop_and_pad else None)
    grad = permuted_token_out_grad.float()
    of_tokens = grad.new_zeros(tokens_num, grad.size(1)).index_add(0, sources, grad)
    of_probs = None
    if probs_grad is not None and probs_grad.numel():
        of_probs = probs_grad.new_zeros(tokens_num, experts_num).index_put((sources, experts), probs_grad)
    return of_tokens.to(permuted_token_out_grad.dtype), of_probs


@operator("npu_moe_token_unpermute_with_routing_map")
def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
    values, places = permuted_tokens.float(), sorted_indices.long()
    if drop_and_pad:
        if probs is not None:
            experts = torch.arange(probs.size(1)).repeat_interleave(len(values) // probs.size(1))
            values = values * probs.float()[places, experts].unsqueeze(-1)
        return values.new_zeros(restore_shape).index_add(0, places, values).to(permuted_tokens.dtype)
    if probs is not None:
        chosen = present(routing_map, "routing_map", "a map, where there are probabilities")
        values = values * probs.float()[_slots(chosen, None)].unsqueeze(-1)
    each = len(places) // max(restore_shape[0], 1)
    return rows_at(values, places).view(restore_shape[0], each, restore_shape[1]).sum(1).to(permuted_tokens.dtype)


@operator("_npu_moe_token_unpermute_with_routing_map")
def unpermute_and_keep(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the tokens, and what only the gradient needs: the indices twice, and an unused tensor."""
    result = unpermute(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, drop_and_pad)
    unused = None if probs is None else probs.new_zeros(len(sorted_indices))
    return result, sorted_indices.clone(), sorted_indices.clone(), unused


@operator("npu_moe_token_unpermute_with_routing_map_grad", ignores=("permuted_token_id",))
def unpermute_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> tuple[Tensor | None, ...]:
    grad = unpermuted_tokens_grad
    rows = grad.new_zeros(len(out_index), grad.size(1)) if permuted_tokens is None else permuted_tokens

    def forward(rows: Tensor, probs: Tensor | None) -> Tensor:
        return unpermute(rows, out_index, restore_shape, probs, routing_map, drop_and_pad)

    return tuple(differentiate(forward, [rows, probs], grad))
