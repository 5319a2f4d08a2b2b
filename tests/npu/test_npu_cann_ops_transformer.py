"""CANN's package of operators for transformers, where `--with cann_ops_transformer` asks for it, on emulated NPUs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from npu_ranks import caught, group
from on_ranks import on_ranks
from operators.microscaling import mx, pairs
from torch import Tensor

import alltoallv_emulator as emulator
from alltoallv_tools.cli import main

WITH = {"ALLTOALLV_EMULATOR_WITH": "cann_ops_transformer", "ALLTOALLV_NPU_LIMITS": "relax"}
TOKENS, HIDDEN, INNER, EXPERTS, K = 5, 16, 8, 4, 2


def _tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a rank, the experts of each, and their weights."""
    made = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=made)[:K] for _ in range(TOKENS)]).int()
    return torch.randn(TOKENS, HIDDEN, generator=made).bfloat16(), ids, torch.rand(TOKENS, K, generator=made)


@on_ranks(2, communicator=False, env=WITH)
def test_tokens_go_to_their_experts_and_back(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        module: Any = importlib.import_module("cann_ops_transformer.ops")
        buffer = module.MoeDistributeBuffer(world)
        assert (buffer.rank_id, buffer.world_size) == (rank, size)
        x, ids, weights = _tokens(rank)
        given = [each.to(device) for each in (x, ids, weights)]
        rows, _, assist, numbers, ends, _ = buffer.low_latency_dispatch(*given[:2], EXPERTS)
        mine = [2 * rank, 2 * rank + 1]
        chosen = [(other, expert) for other in range(size) for expert in _tokens(other)[1].flatten().tolist()]
        assert numbers.tolist() == [sum(expert == one for _, expert in chosen) for one in mine]
        assert ends[-1] == numbers.sum()
        y = buffer.low_latency_combine(rows, given[1], given[2], assist, ends, num_experts=EXPERTS)
        wanted = x.double() * weights.double().sum(1, keepdim=True)
        torch.testing.assert_close(y.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
        error = caught(lambda: buffer.low_latency_combine(rows, given[1], given[2], None, ends, num_experts=EXPERTS))
        assert "assist_info_for_combine is None" in str(error)


@on_ranks(2, communicator=False, env=WITH)
def test_all_of_a_layer_in_one_call(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        buffer = package.get_symm_buffer_for_mega_moe(world, EXPERTS, TOKENS, K, HIDDEN, INNER)
        made = torch.Generator().manual_seed(9)
        first = torch.randn(EXPERTS, HIDDEN, 2 * INNER, generator=made).bfloat16() / 4
        second = torch.randn(EXPERTS, INNER, HIDDEN, generator=made).bfloat16() / 4
        x, ids, weights = _tokens(rank)
        mask = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int8)
        wanted = torch.zeros(TOKENS, HIDDEN).double()
        for token in range(TOKENS - 1):
            for place, expert in enumerate(ids[token].tolist()):
                gate, up = (x[token].double() @ first[expert].double()).chunk(2)
                inner = gate / (1 + (-gate).exp()) * up
                wanted[token] += weights[token, place] * (inner @ second[expert].double())
        own = slice(2 * rank, 2 * rank + 2)
        lists = [[matrix.to(device) for matrix in every[own]] for every in (first, second)]
        given = [each.to(device) for each in (x, ids, weights)]
        y, numbers = package.mega_moe(*given, *lists, buffer, x_active_mask=mask.to(device))
        torch.testing.assert_close(y.cpu().double(), wanted, rtol=3e-2, atol=3e-2)
        active = torch.cat([_tokens(other)[1][:-1].flatten() for other in range(size)])
        assert numbers.tolist() == active.bincount(minlength=EXPERTS)[own].tolist()
        assert numbers.dtype == torch.int32
        error = str(caught(lambda: package.mega_moe(*given, *lists, buffer, activation_clamp=1.0)))
        assert "activation_clamp is 1.0, expected SwiGLU without more" in error
        assert "for Ascend 950 only" in str(caught(lambda: package.all_gather_quant_matmul(x, x, "")))


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of whole numbers to 127, and the scale of each, in float64."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round(), scales


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["float16", "int8", "int8 with float32 scales", "four bits"])
@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False, env=WITH)
def test_layers_of_every_kind_of_weights(rank: int, size: int, kind: str, masked: bool, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        made = torch.Generator().manual_seed(9)
        most = 7 if kind == "four bits" else 127
        codes = [
            torch.randint(-most, most + 1, shape, generator=made)
            for shape in ((EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, INNER, HIDDEN))
        ]
        columns = [(torch.rand(EXPERTS, matrix.size(-1), generator=made) + 0.5) / (4 * most) for matrix in codes]
        matrices = [codes.double() * own.double().unsqueeze(1) for codes, own in zip(codes, columns, strict=True)]
        dtype = torch.float16 if kind == "float16" else torch.bfloat16
        local = EXPERTS // size
        own = slice(local * rank, local * (rank + 1))
        options: dict[str, Any] = {}
        if kind == "float16":
            given = [list(matrix[own].to(dtype)) for matrix in matrices]
            matrices = [matrix.to(dtype).double() for matrix in matrices]
        else:
            given = [list(matrix[own].to(torch.int8)) for matrix in codes]
            if kind == "four bits":  # eight in a number, the first in its lowest bits
                packed = [(torch.stack(part).int() & 15).unflatten(-1, (-1, 8)) for part in given]
                given = [
                    list((part << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32))
                    for part in packed
                ]
                names, biases = ("l1_bias", "l2_bias"), [list(8 * matrix.sum(1)[own].float()) for matrix in matrices]
                options = {name: [row.to(device) for row in rows] for name, rows in zip(names, biases, strict=True)}
            scales = [part[own] for part in columns]
            if "float32" not in kind:
                scales = [part.view(torch.int32).long() & 0xFFFFFFFF for part in scales]
                scales = [part.view(torch.uint64) for part in scales]
            options |= {f"l{i + 1}_weights_sf": [row.to(device) for row in part] for i, part in enumerate(scales)}
        mode = 0 if kind == "float16" else 2
        x, ids, weights = _tokens(rank)
        x = x.to(dtype)
        mask = torch.tensor([1, 1, 1, 0, 0] if masked else [1] * TOKENS, dtype=torch.int8)
        wanted = torch.zeros(TOKENS, HIDDEN).double()
        for token in range(int(mask.sum())):
            for place, expert in enumerate(ids[token].tolist()):
                row = x[token : token + 1].double()
                codes_of, scale = _rounded(row) if mode else (row, torch.ones(1))
                gate, up = (codes_of @ matrices[0][expert] * scale).chunk(2, -1)
                inner = gate / (1 + (-gate).exp()) * up
                codes_of, scale = _rounded(inner) if mode else (inner, torch.ones(1))
                wanted[token] += weights[token, place] * (codes_of @ matrices[1][expert] * scale)[0]
        buffer = package.get_symm_buffer_for_mega_moe(
            world, EXPERTS, TOKENS, K, HIDDEN, INNER, dispatch_quant_mode=mode,
            dispatch_quant_out_dtype=torch.int8 if mode else None,
        )  # fmt: skip
        lists = [[matrix.to(device) for matrix in part] for part in given]
        tokens = [each.to(device) for each in (x, ids, weights)]
        if masked:
            options["x_active_mask"] = mask.to(device)
        y, numbers = package.mega_moe(*tokens, *lists, buffer, **options)
        assert y.dtype == dtype
        torch.testing.assert_close(y.cpu().double(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
        active = torch.cat([_tokens(other)[1][: int(mask.sum())].flatten() for other in range(size)])
        assert numbers.tolist() == active.bincount(minlength=EXPERTS)[own].tolist()
        assert numbers.dtype == torch.int32
        other = package.get_symm_buffer_for_mega_moe(
            world, EXPERTS, TOKENS, K, HIDDEN, INNER, dispatch_quant_mode=2 - mode
        )
        error = str(caught(lambda: package.mega_moe(*tokens, *lists, other, **options)))
        assert f"dispatch_quant_mode is {2 - mode}; the emulator expects {mode}, for these weights" in error


def _blocks(x: Tensor, code: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of mx as they are given, their scales, and what both mean in float64."""
    numbers, scales = mx(x.double().numpy(), code)
    dtype = {291: torch.float8_e5m2, 292: torch.float8_e4m3fn}.get(code)
    codes = torch.from_numpy(pairs(numbers, code)) if dtype is None else torch.from_numpy(numbers).to(dtype)
    factors = (2.0 ** torch.from_numpy(scales.astype(float) - 127)).flatten(-2).repeat_interleave(32, -1)
    return codes, torch.from_numpy(scales), torch.from_numpy(numbers) * factors[..., : x.size(-1)]


@pytest.mark.parametrize("back", [0, 3, 4])
@pytest.mark.parametrize(("rows", "weights"), [(291, 291), (292, 292), (292, 291), (292, 296), (296, 296)])
@on_ranks(2, communicator=False, env=WITH | {"ALLTOALLV_NPU_PRODUCT": "950"})
def test_layers_in_mx(rank: int, size: int, rows: int, weights: int, back: int, file: str) -> None:
    hidden, inner = 96, 32
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        made = torch.Generator().manual_seed(9)
        shapes = (EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)
        (first, first_scales, wide), (second, second_scales, narrow) = (
            _blocks(torch.randn(shape, generator=made), weights) for shape in shapes
        )
        _, ids, probs = _tokens(rank)
        x = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(rank)).bfloat16()
        wanted = torch.zeros(TOKENS, hidden).double()
        for token in range(TOKENS):
            for place, expert in enumerate(ids[token].tolist()):
                gate, up = (_blocks(x[token : token + 1], rows)[2] @ wide[expert].T).chunk(2, -1)
                activated = gate / (1 + (-gate).exp()) * up
                y = _blocks(activated, 292 if rows == 296 else rows)[2] @ narrow[expert].T
                y = _blocks(y, {3: 291, 4: 292}[back])[2] if back else y
                wanted[token] += probs[token, place] * y[0]
        buffer = package.get_symm_buffer_for_mega_moe(
            world, EXPERTS, TOKENS, K, hidden, inner, dispatch_quant_mode=4, dispatch_quant_out_dtype=rows,
            combine_quant_mode=back,
        )  # fmt: skip
        own = slice(2 * rank, 2 * rank + 2)
        lists = [[part[own].to(device)] for part in (first, second)]
        scales = [[part[own].to(device)] for part in (first_scales, second_scales)]
        given = [each.to(device) for each in (x, ids, probs)]
        kinds = {"weight1_type": weights, "weight2_type": weights} if weights == 296 else {}
        options = {"l1_weights_sf": scales[0], "l2_weights_sf": scales[1], **kinds}
        y, numbers = package.mega_moe(*given, *lists, buffer, **options)
        torch.testing.assert_close(y.cpu().double(), wanted, rtol=2e-2, atol=1e-2 * float(wanted.abs().max()))
        chosen = torch.cat([_tokens(other)[1].flatten() for other in range(size)])
        assert numbers.tolist() == chosen.bincount(minlength=EXPERTS)[own].tolist()

        def refused(**more: Any) -> str:
            return str(caught(lambda: package.mega_moe(*given, *lists, buffer, **(options | more))))

        assert "weight1_type 297" in refused(weight1_type=297)
        assert "one of (2, 64, 2, 2), float8_e8m0fnu" in refused(l1_weights_sf=scales[1])
        assert "None, for weights of mx" in refused(x_active_mask=torch.ones(TOKENS, dtype=torch.int8, device=device))
        os.environ["ALLTOALLV_NPU_LIMITS"] = "keep"
        assert "hidden is 96, expected a multiple of 1024 up to 8192 on 950" in refused()
        os.environ["ALLTOALLV_NPU_PRODUCT"] = "A3"
        assert "ALLTOALLV_NPU_PRODUCT is A3, expected 950" in refused()


# Numbers of hifloat8 at the ends of its fields, and what they mean (Huawei's en_dtypes 0.0.4).
HIFLOAT8 = {
    0x00: 0.0, 0x01: 2.0**-22, 0x07: 2.0**-16, 0x08: 1.0, 0x0F: 1.875, 0x10: 2.0, 0x1F: 0.9375, 0x20: 4.0, 0x2F: 15.0,
    0x30: 0.25, 0x3F: 0.234375, 0x40: 16.0, 0x5F: 0.013671875, 0x60: 256.0, 0x6E: 2.0**15, 0x7F: 1.5 * 2.0**-15,
    0x88: -1.0,
}  # fmt: skip


def _quantized(
    rank: int, kind: str, rows: tuple[int, ...], hidden: int
) -> tuple[Tensor, Tensor, dict[str, int], Tensor]:
    """Numbers of a rank, their scales, what names their dtypes, and the values in float64."""
    made = torch.Generator().manual_seed(rank)
    if kind == "hifloat8":
        x = torch.tensor(list(HIFLOAT8), dtype=torch.uint8)[
            torch.randint(len(HIFLOAT8), (*rows, hidden), generator=made)
        ]
        numbers = torch.tensor([HIFLOAT8.get(code, 0.0) for code in range(256)]).double()[x.long()]
    else:
        dtype = getattr(torch, kind.removeprefix("mx_"))
        x = (torch.randn(*rows, hidden, generator=made) * 20).to(dtype)
        numbers = x.double()
    if kind.startswith("mx_"):
        exponents = torch.randint(117, 137, (*rows, hidden // 64, 2), generator=made, dtype=torch.uint8)
        values = numbers * (2.0 ** (exponents.double() - 127)).flatten(-2).repeat_interleave(32, -1)
        return x, exponents, {"scales_dtype": 293}, values
    scales = torch.rand(*rows, hidden // 128, generator=made)
    values = numbers * scales.double().repeat_interleave(128, -1)
    return x, scales, {"x_dtype": 290} if kind == "hifloat8" else {}, values


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "kind", ["int8", "float8_e5m2", "float8_e4m3fn", "hifloat8", "mx_float8_e5m2", "mx_float8_e4m3fn"]
)
@on_ranks(communicator=False, env=WITH | {"ALLTOALLV_NPU_PRODUCT": "950", "ALLTOALLV_NPU_LIMITS": "keep"})
def test_sums_of_quantized_numbers(rank: int, size: int, kind: str, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        hcom = world._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
        for rows in ((8,), (2, 4)):
            every = [_quantized(other, kind, rows, 1024) for other in range(size)]
            total = torch.stack([values for *_, values in every]).sum(0)
            magnitude = torch.stack([values.abs() for *_, values in every]).sum(0).max()
            x, scales, dtypes, _ = every[rank]
            given = x.to(device), scales.to(device), hcom, size
            for code, dtype in ((None, torch.bfloat16), (5, torch.float16), (6, torch.float32)):
                scale = torch.finfo(dtype).eps
                close = {"rtol": scale, "atol": float(magnitude) * 2.0**-22}
                if dtype == torch.float16 and magnitude > 65504:
                    continue
                y = package.quant_all_reduce(*given, output_dtype=code, **dtypes)
                assert y.dtype == dtype
                torch.testing.assert_close(y.cpu().double(), total, **close)
                part = package.quant_reduce_scatter(*given, output_dtype=code, **dtypes)
                own = total.flatten(0, -2).chunk(size)[rank]
                torch.testing.assert_close(part.cpu().double(), own, **close)


@on_ranks(2, communicator=False, env=WITH | {"ALLTOALLV_NPU_LIMITS": "keep"})
def test_sums_of_quantized_numbers_that_are_refused(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        package: Any = importlib.import_module("cann_ops_transformer")
        hcom = world._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
        x, scales = torch.ones(4, 1024, dtype=torch.int8, device=device), torch.ones(4, 8, device=device)
        halves, wide = torch.ones(4, 16, device=device), torch.ones(4, 2048 * 8, dtype=torch.int8, device=device)
        bytes_of, mx = (
            torch.ones(4, 1024, dtype=torch.uint8, device=device),
            scales.byte().view(4, 4, 2).expand(4, 4, 2),
        )

        def refused(*given: Any, **options: Any) -> str:
            return str(caught(lambda: package.quant_all_reduce(*given, hcom, 2, **options)))

        assert "ALLTOALLV_NPU_PRODUCT is A3, expected 950" in refused(x, scales)
        os.environ["ALLTOALLV_NPU_PRODUCT"] = "950"
        assert "reduce_op is 'max'; the emulator expects 'sum'" in refused(x, scales, reduce_op="max")
        assert "output_dtype is" in refused(x, scales, output_dtype=1)
        assert "a scale for 128 numbers" in refused(x, halves)
        assert "uint8 where x_dtype is hifloat8" in refused(bytes_of, scales)
        assert "torch.int8, as x_dtype says" in refused(bytes_of, scales, x_dtype=1)
        assert "float8_e4m3fn or float8_e5m2, for scales of float8_e8m0fnu" in refused(x, mx, scales_dtype=293)
        assert "rows of 16384, expected 1024 to 8192 on 950" in refused(wide, torch.ones(4, 128, device=device))
        part = caught(lambda: package.quant_reduce_scatter(x[:3], scales[:3], hcom, 2))
        assert "rows that 2 ranks share equally" in str(part)
        other = x if rank else x.view(2, 2, 1024)
        differ = refused(other, scales.view(*other.shape[:-1], 8))
        assert "x's shape is [2, 2, 1024] on rank 0 and [4, 1024] on rank 1" in differ


def test_programs_find_the_package_where_they_ask_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    find = "import importlib.util; print(importlib.util.find_spec('cann_ops_transformer'))"
    for packages, found in (((), False), (emulator.PACKAGES, True)):
        env = emulator.environment(packages=packages)
        printed = subprocess.run([sys.executable, "-c", find], env=env, check=True, capture_output=True, text=True)
        assert ("alltoallv_emulator" in printed.stdout) == found
    program = tmp_path / "program.py"
    program.touch()
    for options, error in (
        (["--emulate-npu", "--with", "numpy"], "--with is 'numpy', expected one of cann_ops_transformer"),
        (["--with", "cann_ops_transformer"], "--with is given without --emulate-npu"),
    ):
        assert main(["run", "-n", "1", *options, str(program)]) == 2
        assert error in capsys.readouterr().err
