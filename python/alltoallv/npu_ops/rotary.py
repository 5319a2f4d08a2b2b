"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.registry import backward, expect, operator, renamed


def _rotated(x: Tensor, mode: str) -> Tensor:
    """Turns every pair (a, b) into (-b, a).

    A pair is the same place of both halves, or two neighbours (interleave).
    """
    expect(mode in ("half", "interleave"), "rotary_mode", mode, "half or interleave")
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return (x.float() * cos.float() + _rotated(x.float(), mode) * sin.float()).to(x.dtype)


@operator("npu_rotary_mul")
def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    """Returns ``r1`` * input + ``r2`` * the rotated input, which is input @ rotate if that is given."""
    if rotate is None:
        return turn(input, r1, r2, rotary_mode)
    return (input.float() * r1.float() + input.float() @ rotate.float() * r2.float()).to(input.dtype)


backward("npu_rotary_mul_backward", renamed(rotary_mul, rotate=None), inputs=("input", "r1", "r2"), grad="grad")


@operator("npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    """Rotates query and key, which are changed as well, as on the device."""
    expect(layout in ("BSND", "BSH", "TND"), "layout", layout, "BSND")
    for x in (query, key):
        x.copy_(turn(x, cos, sin, rotary_mode))
    return query.clone(), key.clone()


@operator("npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates half by half after sorting even places first, then odd ones."""
    return turn(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin, "half")


@operator("npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: list[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> tuple[Tensor, Tensor]:
    """Rotates the first places of every head in [tokens, heads * head_size], by angles that the cache has by position.

    A row of the cache holds cosines, then sines, of half as many pairs as places. With several rows of ``positions``
    each gives the angles of its section of the pairs.
    """
    sections = [one for one in mrope_section or [] if one]
    expect(cache_mode in (None, "default", "interleave"), "cache_mode", cache_mode, "default or interleave")
    mode = {None: "half", "interleaved": "interleave"}.get(rotary_mode, rotary_mode or "half")
    angles = cos_sin_cache.float()[positions.long()]
    if sections:
        pairs, rows = cos_sin_cache.size(-1) // 2, positions.size(0) if positions.dim() == 2 else 0
        expect(rows == len(sections), "positions", positions, f"a row for each of {len(sections)} sections")
        expect(sum(sections) == pairs, "mrope_section", sections, f"sections of {pairs} pairs in all")
        row = torch.arange(rows).repeat_interleave(torch.tensor(sections))  # which positions a pair follows
        if cache_mode == "interleave":
            expect(rows == 3 and sections[1] == sections[2], "mrope_section", sections, "3, the last two of them equal")
            row = torch.zeros(pairs, dtype=torch.long)
            for one in (1, 2):
                row[one : 3 * sections[one] : 3] = one
        angles = angles.gather(0, row.repeat(2).expand(1, angles.size(1), -1))[0]
    else:
        expect(positions.dim() == 1, "positions", positions, "one dimension where mrope_section is not given")
        expect(cache_mode != "interleave", "cache_mode", cache_mode, "default where mrope_section is not given")
    cos, sin = (
        torch.cat([one, one], -1) if mode == "half" else one.repeat_interleave(2, -1) for one in angles.chunk(2, -1)
    )
    width = cos.size(-1)

    def rotate(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, head_size))
        turned = turn(heads[..., :width], cos.unsqueeze(1), sin.unsqueeze(1), mode)
        return torch.cat([turned, heads[..., width:]], -1).view(x.shape)

    return rotate(query), rotate(key)
