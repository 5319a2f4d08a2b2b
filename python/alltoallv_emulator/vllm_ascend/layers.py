"""Layers of vllm-ascend: norms, rotary embeddings, adapters (LoRA), rows of a vocabulary, hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.npu_ops.layers import add_rms_norm, gemma_rms_norm, rms_norm, turn
from alltoallv.npu_ops.quantization import quantize_rows
from alltoallv.npu_ops.registry import expect, renamed
from alltoallv_emulator.vllm_ascend import Table, nothing


def _add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes the sum of x1 and x2, times gamma, plus beta; returns that, the factors and the sum."""
    y, rstd, total = add_rms_norm(x1.float(), x2.float(), gamma, epsilon)
    return (y if beta is None else y + beta.float()).to(x1.dtype), rstd, total.to(x1.dtype)


def _add_rms_norm_bias_shapes(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    factors = *x1.shape[: x1.dim() - gamma.dim()], *[1] * gamma.dim()
    return torch.empty_like(x1), x1.new_empty(factors, dtype=torch.float32), torch.empty_like(x1)


def _rms_norm_dynamic_quant(
    x: Tensor, gamma: Tensor, smooth_scale: Tensor | None, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Normalizes rows, times gamma, plus beta, and quantizes them, times the smooth scale; returns int8 and scales."""
    y, _ = rms_norm(x.float(), gamma, epsilon)
    y = y if beta is None else y + beta.float()
    return quantize_rows(y if smooth_scale is None else y * smooth_scale.float(), torch.int8)


def _rms_norm_dynamic_quant_shapes(x: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _gemma_rms_norm_shapes(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    factors = *x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()
    return torch.empty_like(x), x.new_empty(factors, dtype=torch.float32)


def _partial_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, partial_slice: list[int]) -> None:
    """Turns the numbers from the first to before the second of ``partial_slice`` in each row, in place."""
    fits = len(partial_slice) == 2 and 0 <= partial_slice[0] < partial_slice[1] <= x.size(-1)
    expect(fits, "partial_slice", partial_slice, f"two numbers in ascending order, up to {x.size(-1)}")
    part = x[..., slice(*partial_slice)]
    part.copy_(turn(part, r1, r2, rotary_mode))


def _batch_matmul_transpose(tensor_a: Tensor, tensor_b: Tensor, tensor_c: Tensor) -> None:
    """Writes the products of tensor_a[:, i] and tensor_b[i] to tensor_c[:, i], with the bits of torch.bmm."""
    tensor_c.copy_(torch.bmm(tensor_a.transpose(0, 1), tensor_b).transpose(0, 1))


def _lora_products(x: Tensor, weight: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's product with the matrix of its adapter, and which rows have one: its number is not below 0."""
    matrices = weight.squeeze(1) if weight.dim() == 4 else weight
    there = indices >= 0
    chosen = matrices[indices.clamp(min=0).long()].float()
    return torch.einsum("tk,tnk->tn", x.float(), chosen), there


def _bgmv_shrink(x: Tensor, weight: Tensor, indices: Tensor, y: Tensor, scale: float) -> None:
    """Sets each row of y to the scaled product of its row of x with its adapter's matrix."""
    products, there = _lora_products(x, weight, indices)
    y[there] = (products * scale).to(y.dtype)[there]


def _bgmv_expand(x: Tensor, weight: Tensor, indices: Tensor, y: Tensor, slice_offset: int, slice_size: int) -> Tensor:
    """Adds to a slice of each row of y the product of its row of x with its adapter's matrix; returns y."""
    products, there = _lora_products(x, weight, indices)
    expect(products.size(1) == slice_size, "slice_size", slice_size, f"{products.size(1)}, as the weights have")
    part = y[:, slice_offset : slice_offset + slice_size]
    part[there] = (part.float() + products).to(y.dtype)[there]
    return y


def _sgmv_shrink(x: Tensor, weight: Tensor, lora_indices: Tensor, seq_len: Tensor, y: Tensor, scale: float) -> None:
    _bgmv_shrink(x, weight, lora_indices.repeat_interleave(seq_len.long()), y, scale)


def _sgmv_expand(
    x: Tensor,
    weight: Tensor,
    lora_indices: Tensor,
    seq_len: Tensor,
    y: Tensor,
    slice_offset: int,
    slice_size: int,
) -> Tensor:
    return _bgmv_expand(x, weight, lora_indices.repeat_interleave(seq_len.long()), y, slice_offset, slice_size)


def _masked_input_and_mask(
    input: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[Tensor, Tensor]:
    """Returns the rows of this rank's part of a vocabulary, 0 for tokens of others, and which tokens those are.

    The part has the tokens of the original range, padding, and the tokens of the added range.
    """
    original = (input >= org_vocab_start_index) & (input < org_vocab_end_index)
    added = (input >= added_vocab_start_index) & (input < added_vocab_end_index)
    first_added = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    rows = torch.where(added, input - added_vocab_start_index + first_added, torch.zeros_like(input))
    return torch.where(original, input - org_vocab_start_index, rows), ~(original | added)


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """Returns 1 / sqrt(mean of squares + epsilon) of the last two dimensions together, with one in their place."""
    return (x.float().square().mean((-2, -1)) + epsilon).rsqrt().unsqueeze(-1)


def _mixes(
    mixes: Tensor,
    rsqrt: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    x: Tensor,
    hc_mult: int,
    hc_sinkhorn_iters: int,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one row for the ``hc_mult`` of x, the factors of a layer's result, and those that mix the rows with it.

    ``mixes`` times ``rsqrt`` are, for each place: ``hc_mult`` numbers for the first, as many for the second, and a
    matrix, whose rows and columns are divided by their sums in turn, ``hc_sinkhorn_iters`` times.
    """
    streams = x.size(-2)
    expect(hc_mult == streams, "hc_mult", hc_mult, f"{streams}, as x has rows")
    expect(mixes.size(-1) == (2 + streams) * streams, "mixes", mixes, f"{(2 + streams) * streams} numbers at a place")
    expect(hc_sinkhorn_iters > 0, "hc_sinkhorn_iters", hc_sinkhorn_iters, "more than 0")
    sizes = [streams, streams, streams * streams]
    parts = (mixes.float() * rsqrt.float()).split(sizes, -1)
    bases = hc_base.float().split(sizes)
    first, post, matrix = (part * hc_scale[i].float() + bases[i] for i, part in enumerate(parts))
    comb = matrix.unflatten(-1, (streams, streams)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    y = ((first.sigmoid() + hc_eps).unsqueeze(-1) * x.float()).sum(-2)
    return y.bfloat16(), 2 * post.sigmoid(), comb


def _hyper_before(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    hc_sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes npu_hc_pre_sinkhorn of the products of all rows at a place with ``hc_fn``, and of npu_hc_pre_inv_rms."""
    products = x.float().flatten(-2) @ hc_fn.float().T
    return _mixes(products, _inverse_rms(x, norm_eps), hc_scale, hc_base, x, hc_mult, hc_sinkhorn_iters, hc_eps)


def _hyper_after(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Returns row j at each place: post_j * x + sum_i comb_ij * residual_i."""
    mixed = torch.einsum("...ij,...id->...jd", comb.float(), residual.float())
    return (mixed + post.float().unsqueeze(-1) * x.float().unsqueeze(-2)).to(residual.dtype)


def _mixes_shapes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    streams, places = x.size(-2), x.shape[:-2]
    y = x.new_empty((*places, x.size(-1)), dtype=torch.bfloat16)
    post = x.new_empty((*places, streams), dtype=torch.float32)
    return y, post, post.new_empty((*places, streams, streams))


OPERATORS: Table = {
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index,"
    " int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index)"
    " -> (Tensor masked_input, Tensor mask)": (_masked_input_and_mask, None),
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-06)"
    " -> (Tensor y, Tensor rstd, Tensor x)": (_add_rms_norm_bias, _add_rms_norm_bias_shapes),
    "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None, Tensor? beta=None,"
    " float epsilon=1e-6) -> (Tensor y_out, Tensor scale_out)": (
        _rms_norm_dynamic_quant,
        _rms_norm_dynamic_quant_shapes,
    ),
    "npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)": (
        renamed(gemma_rms_norm, names={"x": "input"}),
        _gemma_rms_norm_shapes,
    ),
    "inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, int[] partial_slice) -> ()": (
        _partial_rotary_mul,
        nothing,
    ),
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor(a!) tensor_c, str? format_mode=None,"
    " str? quant_mode=None) -> ()": (_batch_matmul_transpose, nothing),
    "bgmv_shrink(Tensor x, Tensor weight, Tensor indices, Tensor(a!) y, float scale) -> ()": (_bgmv_shrink, nothing),
    "sgmv_shrink(Tensor x, Tensor weight, Tensor lora_indices, Tensor seq_len, Tensor(a!) y, float scale) -> ()": (
        _sgmv_shrink,
        nothing,
    ),
    # vllm-ascend gives these two their shapes when it is imported.
    "bgmv_expand(Tensor x, Tensor weight, Tensor indices, Tensor(a!) y, int slice_offset, int slice_size) -> Tensor": (
        _bgmv_expand,
        None,
    ),
    "sgmv_expand(Tensor x, Tensor weight, Tensor lora_indices, Tensor seq_len, Tensor(a!) y, int slice_offset,"
    " int slice_size) -> Tensor": (_sgmv_expand, None),
    "npu_hc_pre_inv_rms(Tensor x, float epsilon=1e-20) -> (Tensor out)": (
        _inverse_rms,
        lambda x, *others, **more: x.new_empty((*x.shape[:-2], 1), dtype=torch.float32),
    ),
    "npu_hc_pre_sinkhorn(Tensor mixes, Tensor rsqrt, Tensor hc_scale, Tensor hc_base, Tensor x, int hc_mult,"
    " int hc_sinkhorn_iters, float hc_eps) -> (Tensor out0, Tensor out1, Tensor out2)": (
        _mixes,
        lambda mixes, rsqrt, hc_scale, hc_base, x, *others, **more: _mixes_shapes(x),
    ),
    **{
        f"{name}(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int hc_sinkhorn_iters,"
        " float norm_eps, float hc_eps) -> (Tensor out0, Tensor out1, Tensor out2)": (
            _hyper_before,
            lambda x, *others, **more: _mixes_shapes(x),
        )
        for name in ("npu_hc_pre", "npu_hc_pre_v2")
    },
    "npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> (Tensor out)": (
        _hyper_after,
        lambda x, residual, *others, **more: torch.empty_like(residual),
    ),
}
