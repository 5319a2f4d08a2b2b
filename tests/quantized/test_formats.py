"""Every format: the kernels on every instruction set, and the collectives, have the bits of the NumPy reference.

The golden file holds inputs, codes, scales and values of every format for other projects to compare themselves with;
``python tests/quantized/test_formats.py`` writes it, from the reference.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import mostly_slow
from quantized_cases import Array, Launch, check_all_reduce, expected_all_reduce, normal

from alltoallv import Communicator, _core
from alltoallv import numpy as av
from alltoallv.quantization.spec import Format, Quantization
from alltoallv.testing import Ranks, run_ranks
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal
from alltoallv.testing.quantized_formats import FORMATS

F32 = np.float32
FILE = Path(__file__).with_name("golden_formats.json")
GROUPS = {
    name: [how.group_size] if how.group_size else [128, 96, 7, 1024] if how.shaped else [128, 32, 7, 5000]
    for name, how in FORMATS.items()
}
LONG = ("fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "int5_rotated_spikes")
QUICK = ("fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "int6", "int3", "int2_rotated_spikes", "int5_rotated_spikes")
BETWEEN_RANKS = [
    *(name for name, how in FORMATS.items() if not how.is_integer),
    *("int6", "int3", "int2", "int4_rotated", "int4_spikes", "int5_rotated_spikes", "int2_rotated_spikes"),
]


def awkward(n: int, seed: int = 0) -> Array:
    """Ties of every code, zeros of both signs, subnormals, values of all magnitudes; now and then inf and NaN."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=n) * np.exp(3 * rng.normal(size=n))).astype(F32)
    x[::5] = rng.integers(-64, 64, x[::5].size) / F32(32)
    x[3::29] = rng.integers(0, 1 << 32, x[3::29].size, np.uint32).view(F32)
    x[200:264] = 0
    x[264:300] = np.copysign(F32(1e-40), x[264:300])
    with np.errstate(over="ignore"):
        x[300:340] *= F32(1e30)
    for first, value in ((700, np.inf), (900, -np.inf), (1100, np.nan)):
        x[first : first + 1] = value
    if n > 1300:
        x[1300:1302] = np.inf, np.nan
    return x


def test_one_table() -> None:
    """The reference's rows are the core's."""
    assert list(FORMATS) == list(_core.code_formats) == list(Format.__args__)  # type: ignore[attr-defined]
    for name, row in _core.code_formats.items():
        how = FORMATS[name]
        scale = {"float32": "float32", "float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}[how.scale]
        assert (row.bits, row.most, row.scale, row.group_size) == (how.bits, how.most, scale, how.group_size)
        assert (row.rounds_up, row.rotated, row.spikes) == (how.rounds_up, how.rotated, how.spikes)


def test_documented() -> None:
    """docs/quantization.md has a row for every format, with its scale and its groups."""
    page = Path(__file__).parents[2].joinpath("docs", "quantization.md").read_text()
    rows = [row.split("|")[1:5] for row in page.split("| format | codes |")[1].split("\n\n")[0].splitlines()[2:]]
    documented = {
        name: (scale, group.strip()) for names, _, scale, group in rows for name in re.findall("`(.*?)`", names)
    }
    assert sorted(documented) == sorted(_core.code_formats)
    for name, row in _core.code_formats.items():
        scale, group = documented[name]
        anything = f"1 to {row.longest_group}, default 128" if row.longest_group else "any number, default 128"
        assert row.scale in scale, name
        assert group == (str(row.group_size) if row.group_size else anything), name


@pytest.mark.parametrize("name", [name for name, how in FORMATS.items() if how.scale == "float8_e8m0fnu"])
def test_powers_of_two(name: str) -> None:
    """Up: the least power whose product with the largest code is not below the magnitude. Down: a quotient of powers.

    In exact numbers, at every power of two, at its products with the largest code, and beside both.
    """
    how = FORMATS[name]
    powers = np.ldexp(np.ones(254, F32), np.arange(-126, 128))
    with np.errstate(over="ignore"):
        centres = np.concatenate([powers, powers * F32(how.most / 2 ** np.floor(np.log2(how.most)))])
    finite = centres[np.isfinite(centres)]
    a = np.concatenate([finite, np.nextafter(finite, F32(0)), np.nextafter(finite, F32(np.inf)), [F32(0), F32(1e-40)]])
    a = a[np.isfinite(a)]
    x = np.zeros((a.size, 32), F32)
    x[:, 5] = -a
    codes, scales = np.empty(x.size, np.uint8), np.empty(a.size, np.uint8)
    _core.kernel_quantize(name, 32, "float32", x.ctypes.data, x.size, codes.ctypes.data, scales.ctypes.data)
    largest = 127 - int(np.log2(how.most))  # of the exponents: with the largest code it is finite
    most = Fraction(how.most) if how.rounds_up else Fraction(2) ** int(np.log2(how.most))
    steps = [most * Fraction(2) ** e for e in range(-127, largest + 1)]
    find = bisect_left if how.rounds_up else bisect_right
    for magnitude, byte in zip(a.tolist(), scales.tolist(), strict=True):
        exact = Fraction(magnitude) if magnitude >= 2.0**-126 else Fraction(0)
        at = find(steps, exact)  # the first that is not below it, or the number of those that are not above
        wanted = min(at - 127, largest) if how.rounds_up else max(at - 128, -127)
        assert byte - 127 == wanted, f"{magnitude.hex()}: 2**{byte - 127}, expected 2**{wanted}"


def test_which_rounding_is_the_better() -> None:
    """Of scales, with outliers: up for codes of 8 bits, down for the median error of 4."""
    rng = np.random.default_rng(0)
    spread = np.where(rng.random((8, 1 << 14)) < 0.01, np.exp(2 * np.abs(rng.normal(size=(8, 1 << 14)))), 1)
    xs = (rng.normal(size=spread.shape) * spread).astype(F32)
    exact = xs.sum(0, dtype=np.float64)

    def errors(name: str) -> tuple[float, float]:
        off = reference.dequantize_sum([reference.quantize(x, format=name) for x in xs]) - exact
        return float(np.linalg.norm(off) / np.linalg.norm(exact)), float(np.median(np.abs(off)))

    assert errors("mxfp8")[0] < 0.75 * errors("mxfp8_down")[0]
    assert errors("mxfp8_e5m2") < errors("mxfp8_e5m2_down")
    assert errors("mxfp4")[1] < errors("mxfp4_up")[1]


@pytest.mark.parametrize("isa", _core.kernel_isas())
@pytest.mark.parametrize("name", FORMATS)
def test_kernels(name: str, isa: str) -> None:
    for group in GROUPS[name]:
        for n in (0, 1, 15, 33, 2048, 7001):
            x, how = awkward(n, n + group), Quantization(name, group)
            want = reference.quantize(x, group, format=name)
            codes, scales = np.empty(how.code_bytes(n), np.uint8), np.empty(how.scale_bytes(n), np.uint8)
            assert _core.quantized_row_bytes(n, name, group) == (scales.size + codes.size + 3) // 4 * 4
            where = codes.ctypes.data, scales.ctypes.data
            _core.kernel_quantize(name, group, "float32", x.ctypes.data, n, *where, 0, isa)
            at = f"{name}, groups of {group}, {n} elements"
            if n:
                assert_bits_equal(scales, want.record(), f"scales, {at}")
            assert_bits_equal(codes, want.codes, f"codes, {at}")
            out = np.empty(n, F32)
            _core.kernel_dequantize(name, group, "float32", *where, n, "infinity", out.ctypes.data, isa)
            assert_bits_equal(out, reference.dequantize(want, overflow="infinity"), f"values, {at}")


@pytest.mark.parametrize("name", FORMATS)
def test_every_code(name: str) -> None:
    """What no encoder makes is read as the types define it."""
    how, group = FORMATS[name], FORMATS[name].group_size or 512
    n, one = 256 * 8 // how.bits // 8 * 8, np.ones(1, F32)
    codes = np.arange(Quantization(name, group).code_bytes(n), dtype=np.uint8)
    groups = -(-n // group)
    tensor = one[0] if name == "nvfp4" else F32(0)
    byte = {"float32": one.view(np.uint8), "float8_e8m0fnu": [127], "float8_e4m3fn": [0x38]}[how.scale]
    stored = np.tile(np.array(byte, np.uint8), groups)
    made = reference.Quantized(codes, stored.view(F32) if how.scale == "float32" else stored, n, group, name, tensor)
    out, record = np.empty(n, F32), made.record()
    _core.kernel_dequantize(
        name, group, "float32", codes.ctypes.data, record.ctypes.data, n, "infinity", out.ctypes.data
    )
    assert_bits_equal(out, reference.dequantize(made, overflow="infinity"), name)


@pytest.mark.parametrize("isa", _core.kernel_isas())
@pytest.mark.parametrize("name", FORMATS)
def test_sums_of_infinite_products(name: str, isa: str) -> None:
    """Codes times scales that no encoder makes: inf less inf is the one NaN, whose sign a processor would choose."""
    group = FORMATS[name].group_size or 64
    n = 3 * group
    codes = np.random.default_rng(3).integers(0, 256, (2, Quantization(name, group).code_bytes(n)), np.uint8)
    largest = {"float32": F32(3e38).tobytes(), "float8_e8m0fnu": b"\xfe", "float8_e4m3fn": b"\x7e"}[FORMATS[name].scale]
    stored = np.frombuffer(3 * largest, F32 if len(largest) == 4 else np.uint8)
    made = [reference.Quantized(row, stored, n, group, name, F32(3e38)) for row in codes]
    records = [one.record().copy() for one in made]
    out = np.empty(n, F32)
    addresses = [[array.ctypes.data for array in arrays] for arrays in ([one.codes for one in made], records)]
    _core.kernel_dequantize_sum(name, group, *addresses, n, False, out.ctypes.data, isa)
    assert np.isnan(out).any() or FORMATS[name].most == 1  # +inf is out of reach of codes of 2 bits
    assert_bits_equal(out, reference.dequantize_sum(made), name)


VALUES = st.one_of(
    st.floats(width=32),  # also inf and NaN
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-126, 2.0**-100, 2.0**-60, 2.0**117, float(np.finfo(F32).max)]),
)


@pytest.mark.parametrize("name", [name for name, how in FORMATS.items() if how.is_integer])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_groups_of_any_kind(name: str, data: st.DataObject) -> None:
    """Codes, scales, spikes, values and error feedback are the reference's, and no error exceeds what the docs say."""
    group, how = data.draw(st.integers(1, 70)), FORMATS[name]
    pattern = data.draw(st.lists(VALUES, min_size=1, max_size=150))
    x = np.array(pattern, F32)
    error = np.zeros(x.size, F32)
    lost = error.copy()
    want = reference.quantize(x, group, error=lost, format=name)
    how_sent = Quantization(name, group)
    codes, scales = np.empty(how_sent.code_bytes(x.size), np.uint8), np.empty(how_sent.scale_bytes(x.size), np.uint8)
    where = codes.ctypes.data, scales.ctypes.data
    isa = data.draw(st.sampled_from(_core.kernel_isas()))
    _core.kernel_quantize(name, group, "float32", x.ctypes.data, x.size, *where, error.ctypes.data, isa)
    assert_bits_equal(scales, want.record(), "scales")
    assert_bits_equal(codes, want.codes, "codes")
    usual = np.isfinite(x) & ((np.abs(x) >= 2.0**-126) | (x == 0))  # what else is lost may be flushed
    assert_bits_equal(error[usual], lost[usual], "error feedback")
    out = np.empty(x.size, F32)
    _core.kernel_dequantize(name, group, "float32", *where, x.size, "infinity", out.ctypes.data, isa)
    assert_bits_equal(out, reference.dequantize(want, overflow="infinity"), "values")
    for g, scale in enumerate(want.scales):
        part, made = (a[g * group : (g + 1) * group].astype(np.float64) for a in (x, out))
        if not np.isfinite(part).all() or np.abs(part).max() > 2.0**100:
            continue
        bound = abs(float(scale)) / 2 * (np.sqrt(part.size) if scale < 0 else 1) * (1 + 2.0**-12)
        spikes = np.sort(np.abs(part))[-2:].min(initial=np.inf) if how.spikes else np.inf
        allowed = np.where(np.abs(part) >= spikes, np.maximum(np.abs(part) * 2.0**-8, bound), bound)
        assert (np.abs(made - part) <= np.maximum(allowed, 2.0**-99)).all()


def reductions(size: int, name: str) -> list[dict[str, Any]]:
    """Arguments of `check_all_reduce`, with what is expected: made once for all ranks."""
    rng, made = np.random.default_rng(5), []
    for i, n in enumerate((0, 5, 1000, 300_001 if name in LONG else 20_001)):
        inputs = normal(rng, size, n)
        if n > 1000:
            inputs[0][37], inputs[-1][500] = np.inf, np.nan
        for gather in ("full", "quantized"):
            for op in ("sum", "avg"):
                how = {"feedback": (i + len(op)) % 2 == 0, "format": name, "gather": gather, "op": op}
                made.append({"inputs": inputs, "expected": expected_all_reduce(inputs, **how), **how})
    return made


def reduce_all(communicator: Communicator, made: list[dict[str, Any]]) -> list[str]:
    return [check_all_reduce(communicator, **arguments) for arguments in made]


@pytest.mark.parametrize("name", mostly_slow(BETWEEN_RANKS, QUICK))
def test_all_reduce(ranks: Ranks, name: str) -> None:
    """Small and in pieces; the same bits on all ranks."""
    for size in (2, 3):
        made = reductions(size, name)
        for threads in (False, True):
            for digests in (results := ranks(size, threads=threads)(reduce_all, made)):
                assert digests == results[0]


@pytest.mark.parametrize("name", ["int8", "int4", *BETWEEN_RANKS])
def test_scatter_and_rows(launch: Launch, name: str) -> None:
    rng, size = np.random.default_rng(7), 3
    inputs = [x.reshape(-1, 50) for x in normal(rng, size, 50 * 40 * size)]
    counts = [40 * size - 3 * (size - 1), *[3] * (size - 1)]
    [*wanted] = reference.quantized_reduce_scatter(inputs, counts, format=name)
    sends = rng.integers(0, 9, (size, size))
    rows = [x[: sum(sends[j])] for j, x in enumerate(inputs)]
    [*arrived] = reference.quantized_all_to_all(rows, sends.tolist(), format=name)

    def check(communicator: Communicator) -> None:
        r, how = communicator.rank, {"format": name, "group": communicator}
        assert_bits_equal(av.quantized_reduce_scatter(inputs[r], counts, **how), wanted[r], name)
        assert_bits_equal(av.quantized_all_to_all(rows[r], sends[r], **how), arrived[r], name)

    launch(size, check)


def test_groups_of_tokens_and_tensors() -> None:
    """One scale per entry of the last axis, or one in all; between ranks it is the same as the numbers."""

    def check(communicator: Communicator) -> None:
        x = normal(np.random.default_rng(1), 2, 60 * 700)[communicator.rank].reshape(60, 700)
        for name in ("fp8_e4m3", "fp8_e5m2", "int8"):
            for group_size, n in (("token", 700), ("tensor", 42000)):
                for gather in ("full", "quantized"):
                    how: Any = {"format": name, "gather": gather, "group": communicator}
                    got = av.quantized_all_reduce(x, group_size=group_size, **how)  # type: ignore[arg-type]
                    assert_bits_equal(got, av.quantized_all_reduce(x, group_size=n, **how), f"{name} {group_size}")

    run_ranks(2, check)


def golden() -> dict[str, Any]:
    """Of 96 numbers: ties, zeros, subnormals, all magnitudes; then of two groups with inf and NaN."""
    x = np.concatenate([awkward(32, 1), np.linspace(-8, 8, 33, dtype=F32)[:32], awkward(300, 2)[236:268]])
    y = np.concatenate([np.array([1, np.inf, -2, -np.inf], F32), np.ones(28, F32), x[:32], [F32(np.nan)], x[:31]])
    made: dict[str, Any] = {"input": [_hex(x), _hex(y.astype(F32))], "formats": {}}
    for name in FORMATS:
        rows = []
        for values in (x, y.astype(F32)):
            codes = reference.quantize(values, FORMATS[name].group_size or 32, format=name)
            rows.append({"scales": _hex(codes.record()), "codes": _hex(codes.codes), "values": _hex(_values(codes))})
        made["formats"][name] = {"group_size": codes.group_size, "results": rows}
    return made


def _values(codes: reference.Quantized) -> Array:
    return reference.dequantize(codes, overflow="infinity")


def _hex(array: Array) -> str:
    """Of its bytes, the lowest first."""
    return array.tobytes().hex()


@pytest.mark.parametrize("name", FORMATS)
def test_golden(name: str) -> None:
    """The file is what the reference gives, and the kernels give the file."""
    known = json.loads(FILE.read_text())
    assert known == golden()
    row = known["formats"][name]
    for text, result in zip(known["input"], row["results"], strict=True):
        x = np.frombuffer(bytes.fromhex(text), F32)
        codes, scales = (np.zeros(len(result[key]) // 2, np.uint8) for key in ("codes", "scales"))
        where = x.ctypes.data, x.size, codes.ctypes.data, scales.ctypes.data
        _core.kernel_quantize(name, row["group_size"], "float32", *where)
        assert (_hex(codes), _hex(scales)) == (result["codes"], result["scales"])


if __name__ == "__main__":
    FILE.write_text(json.dumps(golden(), indent=1) + "\n")
