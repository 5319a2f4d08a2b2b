"""Triton kernels on emulated NPUs, by what `alltoallv_emulator.triton` puts behind triton.runtime's driver."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

import npu_triton_kernels as kernels
import triton
from npu_ranks import caught, use_device
from on_ranks import on_ranks

import alltoallv_emulator as emulator


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@on_ranks(1, communicator=False)
def test_the_driver_is_an_npus(rank: int, size: int) -> None:
    use_device(rank)
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    assert (target.backend, target.arch) == ("npu", torch.npu.get_device_name())
    assert driver.get_current_stream(0) == torch.npu.current_stream().npu_stream
    properties = driver.utils.get_device_properties(torch.npu.current_device())
    seen = torch.npu.get_device_properties(0)
    assert (properties["num_aicore"], properties["num_vectorcore"]) == (seen.cube_core_num, seen.vector_core_num)


@on_ranks(1, communicator=False)
def test_a_launch_comes_after_the_work_of_the_stream(rank: int, size: int) -> None:
    device = use_device(rank)
    x, y, out = _normal(1000).pin_memory(), _normal(1000).to(device), torch.zeros(1000, device=device)
    there = torch.zeros(1000, device=device)
    torch.npu.synchronize()
    emulator.set_option("task_delay_us", 50_000)
    there.copy_(x, non_blocking=True)
    kernels.add[lambda meta: (triton.cdiv(1000, meta["BLOCK"]) // 2,)](there, y, out, 1000, BLOCK=128)
    emulator.set_option("task_delay_us", 0)
    assert torch.equal(out.cpu(), x + y.cpu())


@on_ranks(1, communicator=False)
def test_arguments_that_become_constants(rank: int, size: int) -> None:
    """Triton compiles None and 1 into a kernel, and each of its releases passes them on in its own way."""
    device = use_device(rank)
    x, out = _normal(100).to(device), torch.zeros(100, device=device)
    kernels.scaled[(1,)](x, None, 1, out, 100, BLOCK=128, TWICE=True)
    assert torch.equal(out.cpu(), 2 * x.cpu())
    kernels.scaled[(1,)](x, x, 1, out, 100, BLOCK=128, TWICE=False)
    assert torch.equal(out.cpu(), 2 * x.cpu())


@on_ranks(1, communicator=False)
def test_a_graph_replays_what_it_has_captured(rank: int, size: int) -> None:
    device = use_device(rank)
    x, out = torch.ones(100, device=device), torch.zeros(100, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        kernels.add[(1,)](x, x, out, 100, BLOCK=128)
        y = out + 1
    assert out.sum().item() == 0  # a capture runs nothing
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 1] * 100


@on_ranks(1, communicator=False)
def test_a_replay_asks_the_program_nothing(rank: int, size: int) -> None:
    """Not for the address of what it gave a kernel either, as a device has that from the capture."""
    device, asked = use_device(rank), [0]

    class Wrapper:
        dtype = torch.float32

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def data_ptr(self) -> int:
            asked[0] += 1
            return self.tensor.data_ptr()

    x, out = torch.ones(100, device=device), torch.zeros(100, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        kernels.add[(1,)](Wrapper(x), x, out, 100, BLOCK=128)
    before = asked[0]
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [8.0] * 100
    assert asked[0] == before


@on_ranks(1, communicator=False)
def test_arithmetic_has_the_bits_of_its_dtype(rank: int, size: int) -> None:
    device = use_device(rank)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, y = (100 * _normal(2, 4096)).to(dtype)
        x[:3] = torch.tensor([float("inf"), float("nan"), 65504.0])
        out = torch.empty(3, 4096, dtype=dtype, device=device)
        kernels.arithmetic[(8,)](x.to(device), y.to(device), out, 4096, BLOCK=512)
        expected = torch.stack([x + y, x * y, torch.where(x > y, x, y) - 1])
        assert torch.equal(out.cpu().nan_to_num(7.0), expected.nan_to_num(7.0)), dtype
    x = torch.randint(-(2**31), 2**31, (256,), generator=torch.Generator().manual_seed(2)).int()
    out = torch.empty(5, 256, dtype=torch.int32, device=device)
    kernels.integers[(1,)](x.to(device), out, -7, BLOCK=256)
    wide, unsigned = x.long(), x.long() & 0xFFFFFFFF
    quotient = torch.div(wide, -7, rounding_mode="trunc")
    high = torch.tensor([(one * one) >> 32 for one in unsigned.tolist()])
    expected = torch.stack([quotient, wide + 7 * quotient, unsigned // 7, unsigned >> 3, high]).int()
    assert torch.equal(out.cpu(), expected)


@on_ranks(1, communicator=False)
def test_reductions_and_products(rank: int, size: int) -> None:
    device = use_device(rank)
    x = _normal(6, 100)
    y = torch.empty(6, 100, device=device)
    kernels.softmax[(6,)](x.to(device), y, 100)
    torch.testing.assert_close(y.cpu(), torch.softmax(x, 1))
    a, b = _normal(50, 70), _normal(70, 40)
    c = torch.empty(50, 40, device=device)
    kernels.tuned_matmul()[lambda meta: (triton.cdiv(50, meta["ROWS"]), triton.cdiv(40, meta["COLUMNS"]))](
        a.to(device), b.to(device), c, 50, 40, 70, INNER=32
    )
    torch.testing.assert_close(c.cpu(), a @ b)
    x, out = _normal(20, 16), torch.zeros(20, 16, device=device)
    # triton-ascend 3.2 has the older pointers to blocks.
    double = kernels.double_block if find_spec("triton.backends.ascend") is None else kernels.double_pointed
    double[(3,)](x.to(device), out, 20, 16, ROWS=8, COLUMNS=16)
    assert torch.equal(out.cpu(), 2 * x)
    x = _normal(64)
    ordered, sums, places = torch.empty(2, 64), torch.empty(64), torch.empty(2, dtype=torch.int32)
    ordered, sums, places = ordered.to(device), sums.to(device), places.to(device)
    kernels.order[(1,)](x.to(device), ordered, sums, places, BLOCK=64)
    assert torch.equal(ordered.cpu(), torch.stack([x.sort()[0], x.sort(descending=True)[0]]))
    torch.testing.assert_close(sums.cpu(), x.flip(0).cumsum(0).flip(0))
    assert places.tolist() == [x.argmax().item(), x.argmin().item()]


@on_ranks(1, communicator=False)
def test_branches_loops_calls_and_atomics(rank: int, size: int) -> None:
    device = use_device(rank)
    out = torch.zeros(12, dtype=torch.int32, device=device)
    kernels.steps[(10,)](out, 27, 9)

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    counts = [steps(27 + i) for i in range(9)]  # the last program returns at once
    assert out.tolist() == [*counts, 0, sum(counts), max(counts)]


@on_ranks(1, communicator=False)
def test_slices_of_ascend(rank: int, size: int) -> None:
    device = use_device(rank)
    x = _normal(32)
    y, z = torch.empty(32, device=device), torch.empty(8, device=device)
    kernels.slices[(1,)](x.to(device), y, z, 3, BLOCK=32)
    assert torch.equal(y.cpu(), torch.cat([2 * x[16:], x[16:]]) + x[5])
    assert torch.equal(z.cpu(), x[24:])


def _add(*tensors: torch.Tensor, n: int = 4, block: int = 4) -> None:
    kernels.add[(1,)](*tensors, n, BLOCK=block)


@on_ranks(1, communicator=False)
def test_what_cannot_be_is_refused_by_name(rank: int, size: int) -> None:
    device = use_device(rank)
    x = torch.ones(4, device=device)

    def refusal(call: Any) -> str:
        error = caught(call)
        return " ".join([str(error), *getattr(error, "__notes__", [])])

    assert refusal(lambda: _add(x.cpu(), x, x)) == (
        "argument 0 of the Triton kernel add is a tensor on cpu, expected on an NPU"
    )
    message = refusal(lambda: _add(x, x, x, n=1 << 30, block=1 << 20))
    assert "tl.load has the address" in message
    assert "not in the memory of a device" in message
    assert "in the Triton kernel add" in message
    assert "tt.elementwise_inline_asm is not among what the emulator has" in refusal(lambda: kernels.assembler[(1,)](x))
    _add(x, x, x)
    assert x.tolist() == [2.0] * 4
