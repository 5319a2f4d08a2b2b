"""Matrix products: of floating point numbers, of int8 with scales, of mx, of groups of rows; and packing.

Numbers of four bits are packed in words of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from alltoallv.npu_ops import limits
from alltoallv.npu_ops.microscaling import E1M2, Blocks, element_of, is_scale, product_of_blocks
from alltoallv.npu_ops.registry import backward, dtype_of, expect, operator, present, renamed

_OFFSET_BIT = 37


def pack(values: Tensor) -> Tensor:
    """Packs eight neighbours of the last dimension, -8 to 7, in an int32: the first in the lowest bits."""
    expect(values.size(-1) % 8 == 0, "input", values, "a last dimension that is a multiple of 8")
    nibbles = (values.long() & 0xF).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return nibbles.sum(-1).to(torch.uint32).view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Returns the int8 values that `pack` packed."""
    nibbles = (words.long().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 0xF
    return ((nibbles ^ 8) - 8).flatten(-2).to(torch.int8)


def unpack_matrix(matrix: Tensor) -> Tensor:
    """Returns a matrix of int8 as it is, and one of int32 unpacked along its contiguous dimension."""
    if matrix.dtype != torch.int32:
        return matrix
    along_rows = matrix.stride(-2) == 1 and matrix.stride(-1) != 1
    return unpack(matrix.mT).mT if along_rows else unpack(matrix)


def scale_and_offset(scale: Tensor) -> tuple[Tensor, Tensor | float]:
    """Returns the scale and offset that an int64 scale holds; any other dtype is a scale without offset."""
    if scale.dtype != torch.int64:
        return scale.float(), 0.0
    offset = (scale >> _OFFSET_BIT) & 0x1FF
    return (scale & 0xFFFFFFFF).to(torch.uint32).view(torch.float32), ((offset ^ 0x100) - 0x100).float()


@operator("npu_trans_quant_param")
def trans_quant_param(scale: Tensor, offset: Tensor | None) -> Tensor:
    """Packs a float32 without its lowest 13 bits, bit 46, and the offset as 9 bits from bit 37."""
    result = (scale.contiguous().view(torch.int32).long() & 0xFFFFE000) | (1 << 46)
    if offset is not None:
        result = result | ((offset.round().clamp(-256, 255).long() & 0x1FF) << _OFFSET_BIT)
    return result


@operator("npu_convert_weight_to_int4pack", ignores=("inner_k_tiles",))
def convert_weight_to_int4pack(weight: Tensor) -> Tensor:
    expect(weight.dtype == torch.int32, "weight", weight, "int32 values from -8 to 7")
    return pack(weight)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies floating point matrices in float32, and integers exactly, as float64."""
    return a.float() @ b.float() if a.is_floating_point() else a.double() @ b.double()


def product_of_four_bits(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor, name: str = "bias") -> Tensor:
    """Multiplies rows of int8 by a matrix whose numbers of four bits are packed in words, with int64 scales.

    These are of columns, or of as many groups of the matrix's rows as ``scale`` has. The device multiplies the rows
    less 8, as two parts of four bits each; ``bias`` makes up for it: 8 * the sum of the matrix, scaled, over its rows.
    """
    matrix, factors = unpack(words).double(), scale_and_offset(scale)[0].double()
    factors = factors.view(-1, factors.size(-1))
    depth, columns = matrix.shape
    fits = factors.size(1) == columns and depth % len(factors) == 0 and x.size(1) == depth
    expect(fits, "scale", scale, f"scales of {columns} columns, for groups of the {depth} rows")
    expect(bias.shape == (columns,) and bias.is_floating_point(), name, bias, f"{columns} floating point numbers")
    rows, parts = ((each.double()).unflatten(axis, (len(factors), -1)) for each, axis in ((x - 8.0, 1), (matrix, 0)))
    return torch.einsum("tgk,gkn,gn->tn", rows, parts, factors).float() + bias.float()


def check_dtypes(first: str, a: Tensor, second: str, b: Tensor, scaled: bool) -> None:
    """Raises for dtypes that an operator which communicates does not multiply: int8 needs scales of the second matrix.

    Floating point rows may become int8 on the way.
    """
    expect(a.is_floating_point() or scaled, first, a, "floating point numbers, where there are no scales")
    same = b.dtype == a.dtype or (scaled and b.dtype == torch.int8)
    expect(same, second, b, f"{a.dtype}, as {first}")
    limits.check_dtype(first, a.dtype, ("int8", "float16", "bfloat16") if scaled else ("float16", "bfloat16"))


@operator("npu_linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    expect(input.dim() == 2, "input", input, "two dimensions")
    y = product(input, weight.t())
    return (y if bias is None else y + bias.float()).to(input.dtype)


backward("npu_linear_backward", renamed(linear, bias=None), inputs=("input", "weight"), grad="grad")


@operator("npu_transpose_batchmatmul")
def transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    perm_x1: list[int] | None,
    perm_x2: list[int] | None,
    perm_y: list[int] | None,
    batch_split_factor: int | None,
) -> Tensor:
    """Multiplies batches of matrices whose dimensions are permuted first; returns [m, batch, n].

    With a split factor the batches are split into as many groups; the result is [factor, m, batch * n / factor].
    """
    expect(list(perm_y or [1, 0, 2]) == [1, 0, 2], "perm_y", perm_y, "[1, 0, 2]")
    order, factor = [0, 1, 2], batch_split_factor or 1
    y = product(input.permute(perm_x1 or order), weight.permute(perm_x2 or order)).to(input.dtype)
    if factor == 1:
        return y.transpose(0, 1).contiguous()
    expect(len(y) % factor == 0, "batch_split_factor", factor, f"a divisor of the batch, {len(y)}")
    return y.unflatten(0, (factor, -1)).transpose(1, 2).flatten(2)


@operator("npu_bmmV2", ignores=("output_sizes",))
def bmm_v2(input: Tensor, mat2: Tensor) -> Tensor:
    return product(input, mat2).to(input.dtype)


@operator("npu_bmm_v2_mat1_backward", ignores=("mat1",))
def bmm_v2_mat1_backward(grad: Tensor, mat2: Tensor, size: list[int]) -> Tensor:
    return product(grad, mat2.mT).sum_to_size(size).to(grad.dtype)


@operator("npu_bmm_v2_mat2_backward", ignores=("mat2",))
def bmm_v2_mat2_backward(grad: Tensor, mat1: Tensor, size: list[int]) -> Tensor:
    return product(mat1.mT, grad).sum_to_size(size).to(grad.dtype)


def to_int8(values: Tensor) -> Tensor:
    """Rounds to the nearest int8, halves to even; values beyond its range become its limits."""
    return values.round().clamp(-128, 127).to(torch.int8)


def dequantize(
    total: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    pertoken: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns (total + bias) * scale * pertoken; a floating point bias is added last. With an offset: int8."""
    if bias is not None and bias.dtype == torch.int32:
        total, bias = total + bias.double(), None
    if dtype == torch.int32:
        return total.to(torch.int32)
    factor, packed_offset = scale_and_offset(scale)
    result = total.float() * factor
    if pertoken is not None:
        result = result * pertoken.float().unsqueeze(-1)
    if bias is not None:
        result = result + bias.float()
    if dtype == torch.int8:
        return to_int8(result + (packed_offset if offset is None else offset))
    return result.to(dtype)


_ROUNDED = "float16, bfloat16 or float32, for numbers of mx or of float8"


def _floating(code: int | torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a product of mx or float8, which a caller has to give."""
    expect(code is not None, "output_dtype", code, _ROUNDED)
    dtype = dtype_of(code, torch.float32, "output_dtype")
    expect(dtype.is_floating_point, "output_dtype", dtype, _ROUNDED)
    return dtype


def _spread(scale: Tensor, shape: Sequence[int], sizes: Sequence[int], argument: str) -> Tensor:
    """Returns a number for each of a matrix's, given one for each block of ``sizes``."""
    expected = tuple(-(-length // size) for length, size in zip(shape, sizes, strict=True))
    expect(scale.shape[-2:] == expected, argument, scale, f"the shape {expected}, a number for each block")
    for dim, size in zip((-2, -1), sizes, strict=True):
        scale = scale.float().repeat_interleave(size, dim)
    return scale[..., : shape[0], : shape[1]]


@operator("npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
) -> Tensor:
    """Multiplies matrices of int8, of four bits in int32, of float8, or of mx. Without ``output_dtype``: int8.

    ``group_sizes`` are the rows, columns and inner numbers that have a scale together: [1, 1, 32] for mx, and for int8
    and float8 [1, 128, 128] or [128, 128, 128].
    """
    sizes = [size or 1 for size in group_sizes or (0, 0, 0)]
    expect(len(sizes) == 3, "group_sizes", group_sizes, "three sizes")
    if is_scale("scale", scale, scale_dtype):
        mx = is_scale("pertoken_scale", pertoken_scale, pertoken_scale_dtype)
        expect(mx, "pertoken_scale", pertoken_scale, "scales of float8_e8m0fnu, like scale")
        expect(group_sizes is None or sizes == [1, 1, 32], "group_sizes", group_sizes, "[1, 1, 32]")
        expect(offset is None, "offset", offset, "None, for numbers of mx")
        for name, kind in (("x1_dtype", x1_dtype), ("x2_dtype", x2_dtype)):
            expect(element_of(kind) != E1M2, name, kind, "float8_e5m2, float8_e4m3fn or float4_e2m1fn_x2")
        rows = Blocks("x1", x1, x1_dtype, "pertoken_scale", present(pertoken_scale, "", ""))
        total = product_of_blocks(rows, Blocks("x2", x2, x2_dtype, "scale", scale))
        return (total if bias is None else total + bias.float()).to(_floating(output_dtype))
    for name, kind in (("pertoken_scale", pertoken_scale_dtype), ("x1", x1_dtype), ("x2", x2_dtype)):
        expect(kind is None, f"{name}_dtype", kind, "None, where scale_dtype is not float8_e8m0fnu")
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2) if x1.is_floating_point() else (torch.int8, torch.int32)
    for name, value in (("x1", x1), ("x2", x2)):
        expected = "int8, int32 with eight numbers of four bits, or float8 like the other"
        expect(value.dtype in kinds, name, value, expected)
    dtype = _floating(output_dtype) if x1.is_floating_point() else dtype_of(output_dtype, torch.int8, "output_dtype")
    if max(sizes) > 1:
        expect(sizes in ([1, 128, 128], [128] * 3), "group_sizes", group_sizes, "[1, 128, 128] or [128, 128, 128]")
        tokens = present(pertoken_scale, "pertoken_scale", "scales, where there are group_sizes")
        expect(offset is None and dtype.is_floating_point, "output_dtype", dtype, _ROUNDED)
        a = x1.float() * _spread(tokens, x1.shape[-2:], sizes[::2], "pertoken_scale")
        b = x2.float() * _spread(scale, x2.shape[-2:], sizes[:0:-1], "scale")
        return (a @ b if bias is None else a @ b + bias.float()).to(dtype)
    total = product(unpack_matrix(x1), unpack_matrix(x2))
    return dequantize(total, scale, offset, pertoken_scale, bias, dtype)


def antiquantize(weight: Tensor, scale: Tensor, offset: Tensor | None, group_size: int, dtype: torch.dtype) -> Tensor:
    """Returns (weight + offset) * scale in the dtype of the product; scales of groups of rows are repeated."""
    weight = unpack_matrix(weight).float()
    if group_size:
        scale, offset = (
            None if each is None else each.repeat_interleave(group_size, 0)[: weight.size(-2)]
            for each in (scale, offset)
        )
    if offset is not None:
        weight = weight + offset.float()
    return (weight * scale.float()).to(dtype)


@operator("npu_weight_quant_batchmatmul", ignores=("inner_precise",))
def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    antiquant_group_size: int,
) -> Tensor:
    expect(antiquant_scale.is_floating_point(), "antiquant_scale", antiquant_scale, "floating point")
    alone = quant_offset is not None and quant_scale is None
    expect(not alone, "quant_offset", quant_offset, "None, where there is no quant_scale")
    y = product(x, antiquantize(weight, antiquant_scale, antiquant_offset, antiquant_group_size, x.dtype))
    y = y if bias is None else y + bias.float()
    if quant_scale is None:
        return y.to(x.dtype)
    return to_int8(y * quant_scale.float() + (0 if quant_offset is None else quant_offset.float()))


@operator("npu_dequant_bias")
def dequant_bias(
    x: Tensor,
    weight_scale: Tensor,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    dtype = dtype_of(output_dtype, torch.float16, "output_dtype")
    return dequantize(x.double(), weight_scale, None, activation_scale, bias, dtype)


_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda y: y,
    1: functional.relu,
    2: lambda y: functional.gelu(y, approximate="tanh"),
    4: lambda y: y * torch.sigmoid(1.702 * y),
    5: functional.silu,
}


def ends_of(group_list: Tensor | Sequence[int], group_list_type: int) -> list[int]:
    """Returns where each group ends. ``group_list_type`` 0: the list holds ends; 1: it holds sizes; 2: it holds pairs
    of a group and its size, of the groups that have any first.
    """
    expect(group_list_type in (0, 1, 2), "group_list_type", group_list_type, "0 (ends), 1 (sizes) or 2 (pairs)")
    if group_list_type == 2:
        pairs = group_list if isinstance(group_list, Tensor) else torch.tensor(group_list)
        expect(pairs.dim() == 2 and pairs.size(1) == 2, "group_list", pairs, "a group and its size in each row")
        used = [(int(group), int(size)) for group, size in pairs.tolist() if size]
        numbers = [group for group, _ in used]
        ascend = numbers == sorted(set(numbers)) and all(0 <= number < len(pairs) for number in numbers)
        expect(ascend, "group_list", used, f"groups from 0 to {len(pairs) - 1} in ascending order")
        sizes = dict(used)
        group_list = [sizes.get(number, 0) for number in range(len(pairs))]
    entries = [int(entry) for entry in group_list]
    ends = list(accumulate(entries)) if group_list_type else entries
    expect(
        ends == sorted(ends) and ends[:1] >= [0], "group_list", entries, "groups that begin where the one before ends"
    )
    return ends


def _slices(total: int, group_list: Tensor | Sequence[int], group_list_type: int) -> list[slice]:
    ends = ends_of(group_list, group_list_type)
    expect(ends[-1] <= total, "group_list", ends, f"groups of {total} in all")
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _members(tensors: Sequence[Tensor] | None, count: int) -> list[Tensor | None]:
    """Returns each group's tensor from a list of ``count``, or from one tensor with groups as first dimension."""
    if not tensors:
        return [None] * count
    return list(tensors[0]) if len(tensors) == 1 and tensors[0].size(0) == count else list(tensors)


@operator("npu_grouped_matmul", "npu_grouped_matmul.List", ignores=("tuning_config",))
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    antiquant_scale: list[Tensor] | None,
    antiquant_offset: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    group_list: Tensor | list[int] | None,
    split_item: int,
    group_type: int | None,
    group_list_type: int,
    act_type: int,
    output_dtype: int | torch.dtype | None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Multiplies rows of x (``group_type`` 0), columns (2) or whole matrices (-1), each by the weight of its group.

    Rows after the last group give zeros. Numbers of mx have scales of float8_e8m0: of their rows, and of the weights,
    which are ``antiquant_scale`` where the weights have four bits and the rows eight.
    """
    expect(group_type in (None, -1, 0, 2), "group_type", group_type, "-1, 0 or 2")
    expect(act_type in _ACTIVATIONS, "act_type", act_type, f"one of {sorted(_ACTIVATIONS)}")
    mx = is_scale("per_token_scale", per_token_scale[0] if per_token_scale else None, per_token_scale_dtype)
    of_weights = is_scale("scale", scale[0] if scale else None, scale_dtype)
    expect(mx or not of_weights, "per_token_scale", None, "scales of float8_e8m0fnu, like scale")
    expect(mx or x_dtype is None, "x_dtype", x_dtype, "None, where there are no scales of float8_e8m0fnu")
    expect(mx or weight_dtype is None, "weight_dtype", weight_dtype, "None, without scales of float8_e8m0fnu")
    expect(not mx or group_type != 2, "group_type", group_type, "-1 or 0, for numbers of mx")
    eights = mx or x[0].dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    dtype = _floating(output_dtype) if eights else dtype_of(output_dtype, x[0].dtype, "output_dtype")
    if group_type == 2:
        expect(len(x) == len(weight) == 1, "x", len(x), "one matrix")
        ends = present(group_list, "group_list", "a list, for columns")
        parts = _slices(x[0].size(1), ends, group_list_type)
        products = [product(x[0][:, part], weight[0][part]).to(dtype) for part in parts]
        return [torch.stack(products)] if split_item in (2, 3) else products
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    if len(x) == 1 and group_list is not None:
        parts = _slices(x[0].size(0), group_list, group_list_type)
        rows = [x[0][part] for part in parts]
        tokens = [per_token_scale[0][part] if per_token_scale else None for part in parts]
    else:
        rows, tokens = x, list(per_token_scale) if per_token_scale else [None] * len(x)
    expect(len(rows) == len(weights), "weight", len(weights), f"one for each of {len(rows)} groups")
    members = [_members(argument, len(rows)) for argument in (bias, scale, antiquant_scale, antiquant_offset)]
    groups = list(zip(rows, weights, tokens, *members, strict=True))
    if mx:
        results = [_mx_group(act_type, dtype, x_dtype, weight_dtype, *each) for each in groups]
    else:
        results = [_one_group(act_type, dtype, *each) for each in groups]
    if split_item in (0, 1):
        return results
    joined = torch.cat(results)
    behind = sum(part.size(0) for part in x) - joined.size(0)
    return [torch.cat([joined, joined.new_zeros(behind, joined.size(1))]) if behind else joined]


def _mx_group(
    act_type: int,
    dtype: torch.dtype,
    x_dtype: int | None,
    weight_dtype: int | None,
    x: Tensor,
    weight: Tensor,
    token: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
) -> Tensor:
    expect(antiquant_offset is None, "antiquant_offset", antiquant_offset, "None, for numbers of mx")
    name = "scale" if antiquant_scale is None else "antiquant_scale"
    expect(antiquant_scale is None or scale is None, "scale", scale, "None, where there is an antiquant_scale")
    own = present(scale if antiquant_scale is None else antiquant_scale, "scale", "scales of float8_e8m0fnu")
    expect(own.itemsize == 1, name, own, "one byte for each scale, of float8_e8m0fnu")
    rows = Blocks("x", x, x_dtype, "per_token_scale", token)
    y = product_of_blocks(rows, Blocks("weight", weight, weight_dtype, name, own))
    return _ACTIVATIONS[act_type](y if bias is None else y + bias.float()).to(dtype)


def _one_group(
    act_type: int,
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    token: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
) -> Tensor:
    activate = _ACTIVATIONS[act_type]
    if scale is not None and weight.dtype == torch.int32 and (x.dtype, scale.dtype) == (torch.int8, torch.int64):
        expect(not act_type, "act_type", act_type, "0, for weights of four bits")
        expect(dtype.is_floating_point, "output_dtype", dtype, "float16 or bfloat16, for weights of four bits")
        makes_up = present(bias, "bias", "8 * the sum of the weights with their scales, for weights of four bits")
        factors = present(token, "per_token_scale", "scales of the rows, for weights of four bits")
        return (product_of_four_bits(x, weight, scale, makes_up) * factors.float().unsqueeze(-1)).to(dtype)
    if x.itemsize == 1 or not x.is_floating_point():
        expect(scale is not None or dtype == torch.int32, "scale", scale, "one for int8 or float8")
        scale = torch.ones(1) if scale is None else scale
        total = product(x, unpack_matrix(weight))
        if dtype in (torch.int8, torch.int32) or not act_type:
            expect(not act_type, "act_type", act_type, "0 for a result of integers")
            return dequantize(total, scale, None, token, bias, dtype)
        return activate(dequantize(total, scale, None, token, bias, torch.float32)).to(dtype)
    if antiquant_scale is not None:
        groups = antiquant_scale.size(0) if antiquant_scale.dim() == 2 else 0
        size = -(-x.size(-1) // groups) if groups else 0
        weight = antiquantize(weight, antiquant_scale, antiquant_offset, size, x.dtype)
    expect(weight.dtype == x.dtype, "weight", weight, f"{x.dtype}, as x, where no scales say otherwise")
    for argument, value in (("scale", scale), ("per_token_scale", token)):
        expect(value is None, argument, value, "None for floating point numbers")
    y = product(x, weight)
    return activate(y if bias is None else y + bias.float()).to(dtype)


@operator("npu_grouped_matmul_add", ignores=("group_type",))
def grouped_matmul_add(input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, group_list_type: int) -> Tensor:
    """Adds to ``input``, for each group of rows, x transposed times weight, as in weight gradients.

    The result is [groups * m, n] or [groups, m, n].
    """
    parts = _slices(x.size(0), group_list, group_list_type)
    products = torch.stack([product(x[part].t(), weight[part]) for part in parts])
    return (input.float() + products.reshape(input.shape)).to(input.dtype)


@operator("npu_grouped_matmul_add_", ignores=("group_type",))
def grouped_matmul_add_(input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, group_list_type: int) -> Tensor:
    return input.copy_(grouped_matmul_add(input, x, weight, group_list, group_list_type))
