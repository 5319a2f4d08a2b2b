"""Dispatch and combine after ranks have left the group: the others go on, with the experts that they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from operator_case import called, to_torch

if TYPE_CHECKING:
    import torch

WIDTH, LOCAL = 8, 2


def check(device: torch.device, group: str, rank: int, size: int) -> None:
    """Fails unless the ranks that are left, the odd ones, exchange their tokens without the others."""
    left = list(range(1, size, 2))
    experts = LOCAL * len(left)
    table = [1, len(left), 0, experts, *(left.index(i) if i in left else -1 for i in range(size)), *left]
    info = np.array(table + [-1] * (size - len(left)), np.int32)
    r = np.random.default_rng(7)
    tokens = [r.integers(-8, 9, (3, WIDTH)).astype(np.float64) for _ in range(size)]
    choices = [np.stack([r.permutation(experts)[:2] for _ in range(3)]).astype(np.int32) for _ in range(size)]
    weights = [np.float32(r.uniform(0.1, 1, (3, 2))) for _ in range(size)]

    def on_device(value: Any) -> Any:
        return to_torch(value, "float16", device)

    place = {"group_ep": group, "ep_world_size": size, "ep_rank_id": rank, "moe_expert_num": LOCAL * size}
    x, ids, scales = (on_device(each[rank]) for each in (tokens, choices, weights))
    dispatch, combine = (called(f"npu_moe_distribute_{name}_v2", device) for name in ("dispatch", "combine"))
    whole = on_device(np.concatenate([[0, size, 0, LOCAL * size], np.arange(size), np.arange(size)]).astype(np.int32))
    assert dispatch(x, ids, elastic_info=whole, **place)[0].shape == (3 * size * 2, WIDTH)
    if rank in left:
        place["elastic_info"] = on_device(info)
        rows, _, places, numbers, ends, _, _ = dispatch(x, ids, **place)
        own = [LOCAL * left.index(rank) + i for i in range(LOCAL)]
        parts = [[tokens[s][t] for t in np.argwhere(choices[s] == expert)[:, 0]] for expert in own for s in left]
        expected = np.concatenate([np.reshape(part, (-1, WIDTH)) for part in parts])
        assert rows.shape == (3 * size * 2, WIDTH)
        assert np.array_equal(rows.cpu().double().numpy()[: len(expected)], expected)
        assert numbers.tolist() == [sum(map(len, parts[i * len(left) :][: len(left)])) for i in range(LOCAL)]
        back = combine(rows * 3, ids, places, ends, scales, **place)
        wanted = 3 * tokens[rank] * weights[rank].sum(1, keepdims=True)
        assert np.allclose(back.cpu().double().numpy(), wanted, rtol=2e-3, atol=1e-2)
    for wrong in (info[1:], np.where(np.arange(len(info)) == 3, experts + 1, info).astype(np.int32)):
        if rank in left:
            with pytest.raises(NotImplementedError, match="elastic_info is"):
                dispatch(x, ids, **place | {"elastic_info": on_device(wrong)})
