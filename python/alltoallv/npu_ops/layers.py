"""What stands between matrix products: activations, norms, softmax, rotary embeddings; and optimizer steps.

Norms are by the root mean square of the last dimensions, with additions before and casts or quantization after.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops.registry import backward, expect, operator, renamed


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    expect(x.size(dim) % 2 == 0, "input", x, f"an even size of dimension {dim}")
    a, b = x.float().chunk(2, dim)
    return a, b


def swish_of_first(x: Tensor, dim: int) -> Tensor:
    """Returns SwiGLU in float32: swish of the first half of dimension ``dim``, times the second half."""
    a, b = _halves(x, dim)
    return functional.silu(a) * b


@operator("npu_fast_gelu", "fast_gelu")
def fast_gelu(input: Tensor) -> Tensor:
    x = input.float()
    return (x * torch.sigmoid(1.702 * x)).to(input.dtype)


@operator("npu_mish")
def mish(input: Tensor) -> Tensor:
    return functional.mish(input.float()).to(input.dtype)


@operator("npu_swiglu")
def swiglu(input: Tensor, dim: int) -> Tensor:
    return swish_of_first(input, dim).to(input.dtype)


@operator("npu_silu")
def silu(input: Tensor) -> Tensor:
    return functional.silu(input.float()).to(input.dtype)


@operator("npu_silu_")
def silu_(input: Tensor) -> Tensor:
    return input.copy_(silu(input))


@operator("npu_gelu")
def gelu(input: Tensor, approximate: str) -> Tensor:
    return functional.gelu(input.float(), approximate=approximate).to(input.dtype)


@operator("npu_gelu_mul")
def gelu_mul(input: Tensor, approximate: str) -> Tensor:
    a, b = _halves(input, -1)
    return (functional.gelu(a, approximate=approximate) * b).to(input.dtype)


@operator("npu_geglu")
def geglu(input: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    """Returns one half times GELU of the other half, and that GELU; ``approximate``: 1 for tanh, 0 for none."""
    expect(approximate in (0, 1), "approximate", approximate, "0 or 1")
    first, second = _halves(input, dim)
    activated, factor = (first, second) if activate_left else (second, first)
    activated = functional.gelu(activated, approximate="tanh" if approximate else "none")
    return (factor * activated).to(input.dtype), activated.to(input.dtype)


backward("npu_fast_gelu_backward", fast_gelu, grad="grad")
backward("npu_mish_backward", mish, grad="grad")
backward("npu_swiglu_backward", swiglu)
backward("npu_silu_backward", renamed(silu, names={"x0": "input"}), inputs=("x0",), ignores=("x1",))  # x1: the result
backward("npu_gelu_backward", gelu)
backward("npu_geglu_grad", geglu, ignores=("gelu",))


def _normalize(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Normalizes float32 values; the dimensions of gamma make one row."""
    axes = list(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon)
    return x * rstd * gamma, rstd


@operator("npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, rstd = _normalize(input.float(), gamma.float(), epsilon)
    return y.to(input.dtype), rstd


@operator("npu_gemma_rms_norm")
def gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return rms_norm(input, gamma.float() + 1, epsilon)


@operator("npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients. ``rstd`` is the forward operator's output, which includes its epsilon."""
    x, weight, dy = input.float(), gamma.float(), dy.float()
    axes = list(range(-gamma.dim(), 0))
    scaled = dy * weight
    dx = rstd * (scaled - x * rstd.square() * (scaled * x).mean(axes, keepdim=True))
    dgamma = (dy * x * rstd).reshape(-1, *gamma.shape).sum(0)
    return dx.to(input.dtype), dgamma.to(torch.float32)


@operator("npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x1.float() + x2.float()
    y, rstd = _normalize(total, gamma.float(), epsilon)
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


@operator("npu_add_rms_norm_cast")
def add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the result in float32 and in the inputs' dtype, the factors and the sum."""
    y, rstd, total = add_rms_norm(x1.float(), x2.float(), gamma, epsilon)
    return y, y.to(x1.dtype), rstd, total.to(x1.dtype)


@operator("npu_add_rms_norm_v2")
def add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Normalizes in place: x1 becomes the result, x2 the sum."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


@operator("npu_add_rms_norm_v2_functional")
def add_rms_norm_v2_functional(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the factors, then what npu_add_rms_norm_v2 makes of x1 and x2."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, total


@operator("npu_add_layer_norm", ignores=("additional_output",))
def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x1.float() + x2.float()
    y, mean, rstd = torch.native_layer_norm(total, gamma.shape, gamma.float(), beta.float(), epsilon)
    return y.to(x1.dtype), mean, rstd, total.to(x1.dtype)


@operator("npu_deep_norm")
def deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.float() * alpha + gx.float()
    y, mean, rstd = torch.native_layer_norm(total, gamma.shape, gamma.float(), beta.float(), epsilon)
    return mean, rstd, y.to(x.dtype)


@operator("npu_scaled_masked_softmax")
def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns the softmax of x * scale over the last dimension; what the mask hides counts as -10000."""
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


@operator("npu_scaled_masked_softmax_backward")
def scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    expect(not fixed_triu_mask, "fixed_triu_mask", fixed_triu_mask, "False")
    grad, result = y_grad.float(), y.float()
    inner = (grad * result).sum(-1, keepdim=True)
    return (result * (grad - inner) * scale).masked_fill(mask.bool(), 0.0).to(y_grad.dtype)


@operator("npu_softmax_cross_entropy_with_logits")
def softmax_cross_entropy_with_logits(input: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy of each row, with a probability for each class, in float32."""
    return -(labels.float() * input.float().log_softmax(-1)).sum(-1)


backward("npu_softmax_cross_entropy_with_logits_backward", softmax_cross_entropy_with_logits, grad="grad")


@operator("npu_top_k_top_p")
def top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    """Returns the logits, but -inf for all that are not among a row's ``k`` largest, or not among its likeliest.

    These are the fewest whose probabilities, after the choice of k, sum up to ``p`` at least. One is always left.
    """
    expect(logits.dim() == 2, "logits", logits, "[rows, words]")
    words = logits.size(1)
    ordered, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        expect(bool(((k >= 1) & (k <= words)).all()), "k", k.tolist(), f"numbers from 1 to {words}")
        ordered = ordered.masked_fill(ordered < ordered.gather(1, words - k.long().unsqueeze(1)), -torch.inf)
    if p is not None:
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(1)
        dropped[:, -1] = False
        ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered).to(logits.dtype)


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
    sections = [section for section in mrope_section or [] if section]
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
            for section in (1, 2):
                row[section : 3 * sections[section] : 3] = section
        angles = angles.gather(0, row.repeat(2).expand(1, angles.size(1), -1))[0]
    else:
        expect(positions.dim() == 1, "positions", positions, "one dimension where mrope_section is not given")
        expect(cache_mode != "interleave", "cache_mode", cache_mode, "default where mrope_section is not given")
    cos, sin = (torch.cat([x, x], -1) if mode == "half" else x.repeat_interleave(2, -1) for x in angles.chunk(2, -1))
    width = cos.size(-1)

    def rotate(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, head_size))
        turned = turn(heads[..., :width], cos.unsqueeze(1), sin.unsqueeze(1), mode)
        return torch.cat([turned, heads[..., width:]], -1).view(x.shape)

    return rotate(query), rotate(key)


@operator("npu_apply_adam_w.out")
def apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    out: list[Tensor],
) -> tuple[Tensor, ...]:
    """Makes one step in place on ``out``, the weights and both moments; the powers belong to the previous step."""
    expect(len(out) == 3, "out", len(out), "weights and both moments")
    var, m, v = out
    step = -grad.float() if maximize else grad.float()
    first = m.float() * beta1 + step * (1 - beta1)
    second = v.float() * beta2 + step * step * (1 - beta2)
    if amsgrad:
        expect(max_grad_norm is not None, "max_grad_norm", None, "a tensor, with amsgrad")
        second = torch.maximum(max_grad_norm.float(), second) if max_grad_norm is not None else second
    bias1, bias2 = 1 - beta1_power * beta1, 1 - beta2_power * beta2
    change = first / bias1 / ((second / bias2).sqrt() + epsilon)
    var.copy_(var.float() - lr * change - lr * weight_decay * var.float())
    m.copy_(first)
    v.copy_(second)
    return var, m, v


@operator("_amp_foreach_non_finite_check")
def amp_foreach_non_finite_check(scaled_grads: list[Tensor]) -> bool:
    return any(not bool(grad.isfinite().all()) for grad in scaled_grads)
