"""Dispatch and combine where two ranks share an expert: tensor parallelism beside expert parallelism, on four ranks.

Ranks 0 and 2, and 1 and 3, exchange tokens; 0 and 1, and 2 and 3, have the same expert. A rank has its own rows first,
and then the rows of the other rank of its expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from operator_case import called, to_torch

from alltoallv.errors import PeerMismatchError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

WIDTH = 8
#: The experts of each rank's tokens, and weights of both choices.
CHOICES = [[[0, 1], [1, 0], [0, 1]], [[1, 0], [0, 1], [1, 0]], [[1, 0], [0, 1], [1, 0]], [[0, 1], [1, 0], [0, 1]]]
MASKS = [[1, 0], [1, 1], [0, 1]]  # not all choices count, so that ranks have different numbers of rows


def groups(rank: int) -> list[dist.ProcessGroup]:
    """Makes all groups; returns the one of this rank's that exchanges tokens, and the one that shares an expert."""
    import torch.distributed as dist

    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))}
    return [group for ranks, group in made.items() if rank in ranks]


def rows_of(rank: int, tokens: list[Any], masks: list[Any]) -> tuple[list[Any], list[int]]:
    """What one rank gets of its own group's tokens, and where the rows of each source end."""
    expert, sources = rank // 2, [rank % 2, rank % 2 + 2]
    parts = [
        [tokens[source][token] for token, k in np.argwhere((np.array(CHOICES[source]) == expert) & masks[source])]
        for source in sources
    ]
    return [row for part in parts for row in part], list(np.cumsum([len(part) for part in parts]))


def check(device: torch.device, ep: str, tp: str, rank: int) -> None:
    """Fails unless rows, counts and sums are as the formulas say, and a refusal of one rank reaches all."""
    import torch

    r = np.random.default_rng(3)
    tokens = [r.integers(-8, 9, (3, WIDTH)).astype(np.float64) for _ in range(4)]
    masks = [np.roll(np.array(MASKS, bool), shift, 0) for shift in range(4)]
    weights = [np.float32(r.uniform(0.1, 1, (3, 2))) for _ in range(4)]
    place = {"group_ep": ep, "ep_world_size": 2, "ep_rank_id": rank // 2, "moe_expert_num": 2}
    place |= {"group_tp": tp, "tp_world_size": 2, "tp_rank_id": rank % 2}

    def on_device(value: Any) -> Any:
        return to_torch(value, "float16", device)

    ids, mask = on_device(np.array(CHOICES[rank], np.int32)), on_device(masks[rank])
    dispatch, combine = (called(f"npu_moe_distribute_{name}_v2", device) for name in ("dispatch", "combine"))
    results = dispatch(on_device(tokens[rank]), ids, x_active_mask=mask, **place)
    other = rank ^ 1
    own, own_ends = rows_of(rank, tokens, masks)
    theirs, their_ends = rows_of(other, tokens, masks)
    expected = np.concatenate([own, theirs])
    assert len(own) != len(theirs)
    rows = results[0].cpu().double().numpy()
    assert rows.shape == (2 * 3 * 2, WIDTH)
    assert np.array_equal(rows[: len(expected)], expected)
    assert not rows[len(expected) :].any()
    assert results[3].tolist() == [len(expected)]
    assert results[4].tolist() == [*own_ends, *their_ends]
    assert results[5].tolist() == [len(own), len(theirs)][:: 1 if rank % 2 == 0 else -1]
    # Each rank makes a part of what the expert makes of a row: the parts add up.
    back = combine(
        results[0] * (1 + rank % 2), ids, results[2], results[4], on_device(weights[rank]), x_active_mask=mask,
        tp_send_counts=results[5], **place,
    )  # fmt: skip
    wanted = 3 * tokens[rank] * (weights[rank] * masks[rank]).sum(1, keepdims=True)
    assert np.allclose(back.cpu().double().numpy(), wanted, rtol=2e-3, atol=1e-2)
    scaled = dispatch(on_device(tokens[rank]), ids, x_active_mask=mask, quant_mode=2, **place)
    largest = np.abs(expected).max(1)
    assert np.allclose(scaled[1].cpu().double().numpy()[: len(expected)], largest / 127, rtol=1e-6)
    back_again = scaled[0].cpu().double() * scaled[1].cpu().double().unsqueeze(1)
    assert np.allclose(back_again.numpy()[: len(expected)], expected, atol=0.04)
    for change, words in (
        ({"tp_rank_id": 1 - rank % 2}, "tp_rank_id is"),
        ({"expert_scales": on_device(weights[rank])}, "expert_scales is a tensor"),
    ):
        with pytest.raises(NotImplementedError if rank == 2 else PeerMismatchError, match=words):
            dispatch(on_device(tokens[rank]), ids, **place | (change if rank == 2 else {}))
    assert torch.equal(dispatch(on_device(tokens[rank]), ids, x_active_mask=mask, **place)[0], results[0])
