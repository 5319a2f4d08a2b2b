"""Triton kernels as programs have them, for test_npu_triton.py."""
# mypy: ignore-errors

import importlib.util

import triton
import triton.language as tl

if importlib.util.find_spec("triton.backends.ascend") is None:
    try:
        from triton.language.extra.cann.extension import extract_slice, get_element, insert_slice
    except ModuleNotFoundError:  # the process that starts the ranks has no emulator
        extract_slice = get_element = insert_slice = None
else:
    import triton.testing

    extract_slice, insert_slice = tl.extract_slice, tl.insert_slice
    get_element = tl.get_element


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        if block >= 0:
            tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def arithmetic(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + n + at, a * b)
    tl.store(out + 2 * n + at, tl.where(a > b, a, b) - 1)


@triton.jit
def integers(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    unsigned = a.to(tl.uint32, bitcast=True)
    tl.store(out + at, a // n)
    tl.store(out + BLOCK + at, a % n)
    tl.store(out + 2 * BLOCK + at, (unsigned // 7).to(tl.int32, bitcast=True))
    tl.store(out + 3 * BLOCK + at, (unsigned >> 3).to(tl.int32, bitcast=True))
    tl.store(out + 4 * BLOCK + at, tl.umulhi(unsigned, unsigned).to(tl.int32, bitcast=True))


@triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["n"])})
@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * n
    values = tl.load(x + row + at, mask=at < n, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row + at, powers / tl.sum(powers, 0), mask=at < n)


@triton.jit
def matmul(a, b, c, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, k, INNER):
        inner = begin + tl.arange(0, INNER)
        left = tl.load(a + i * k + inner[None, :], mask=(i < m) & (inner[None, :] < k), other=0.0)
        right = tl.load(b + inner[:, None] * n + j, mask=(inner[:, None] < k) & (j < n), other=0.0)
        total += tl.dot(left, right)
    tl.store(c + i * n + j, total, mask=(i < m) & (j < n))


def tuned_matmul() -> triton.runtime.Autotuner:
    """Made where there is a device: triton-ascend's autotune asks for its driver."""
    configurations = [triton.Config({"ROWS": 16, "COLUMNS": n}) for n in (16, 32)]
    return triton.autotune(configurations, key=["m", "n"])(matmul)


@triton.jit
def double_block(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    place = [tl.program_id(0) * ROWS, 0]
    target.store(place, source.load(place) * 2)


@triton.jit
def double_pointed(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (row, 0), (ROWS, COLUMNS), (1, 0))
    target = tl.make_block_ptr(out, (rows, columns), (columns, 1), (row, 0), (ROWS, COLUMNS), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0,)) * 2, boundary_check=(0,))


@triton.jit
def order(x, ordered, sums, places, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(ordered + at, tl.sort(values))
    tl.store(ordered + BLOCK + at, tl.sort(values, descending=True))
    tl.store(sums + at, tl.cumsum(values, 0, reverse=True))
    tl.store(places, tl.argmax(values, 0))
    tl.store(places + 1, tl.argmin(values, 0))


@triton.jit(noinline=True)
def _next(n):
    if n % 2 == 0:
        return n // 2
    return 3 * n + 1


@triton.jit
def steps(out, first, programs):
    """Counts Collatz's steps from first + i, for every program; and their sum and maximum."""
    i = tl.program_id(0)
    if i >= programs:
        return
    n = first + i
    count = 0
    while n != 1:
        n = _next(n)
        count += 1
    tl.store(out + i, count)
    tl.atomic_add(out + 10, count)
    tl.atomic_max(out + 11, count)


@triton.jit
def slices(x, y, z, row, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    half = extract_slice(values, (BLOCK // 2,), (BLOCK // 2,), (1,))
    mixed = insert_slice(values, half * 2, (0,), (BLOCK // 2,), (1,))
    mixed = insert_slice(mixed, half, (BLOCK // 2,), (BLOCK // 2,), (1,))
    tl.store(y + at, mixed + get_element(values, (row + 2,)))
    rows = tl.reshape(values, (4, BLOCK // 4))
    chosen = extract_slice(rows, (row, 0), (1, BLOCK // 4), (1, 1))
    tl.store(z + tl.arange(0, BLOCK // 4), tl.reshape(chosen, (BLOCK // 4,)))


@triton.jit
def assembler(x):
    at = tl.arange(0, 4)
    values = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x + at)], tl.float32, True, 1)
    tl.store(x + at, values)


@triton.jit
def scaled(x, none, stride, out, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at * stride, mask=at < n)
    if none is not None:
        values += tl.load(none + at, mask=at < n)
    tl.store(out + at, values * 2 if TWICE else values, mask=at < n)
