"""Run by ``alltoallv run``: exchanges through MindSpore's own queue, with consumers right behind.

Arguments: the folder of the compiled operator, and whether "all" graphs are compiled or "some", a few of each kind.
"""

import ctypes
import itertools
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mint_calls import CALLS
from mint_page import ON_ASCEND
from on_device import acl, on_device

import alltoallv.mindspore as am
from alltoallv import (
    AllToAllVOperation,
    AllToAllVParam,
    Communicator,
    QuantAllReduceOperation,
    QuantAllReduceParam,
    QuantType,
    _core,
)
from alltoallv._calls.collectives import Reduction, gathering
from alltoallv.errors import InvalidParamError, PeerMismatchError, ValueOverflowError
from alltoallv.mindspore import device_op, device_quantized, distributed, front_end, tensors
from alltoallv.mindspore.device_op import build
from alltoallv.mindspore.device_quantized import launch_kernel, plan_of
from alltoallv.mindspore.front_end import LATE

comm = am.init(timeout=800)
module, thorough = build(folder=sys.argv[1]), sys.argv[2] == "all"  # compiled already
device_op.build = lambda *_: module
tensors.queued = True  # the functions as they go on Ascend
halves = [2000, 2000]
for dtype, name in ((ms.float32, "float32"), (ms.bfloat16, "bfloat16")):
    ones = Tensor(np.ones(4000, np.float32)).astype(dtype)
    wrong = 0
    for step in range(100):
        came = am.all_to_all_v(ones * float(step % 50 + comm.rank), halves, halves) + 1
        got = came.asnumpy().astype(np.float32).reshape(2, -1)
        wrong += not (got == [[step % 50 + 1], [step % 50 + 2]]).all()
    print(name, "wrong", wrong, flush=True)
square = Tensor(np.arange(4000, dtype=np.float32).reshape(40, 100) + comm.rank)
turned = [(np.arange(4000).reshape(40, 100) + j).T.reshape(-1)[2000 * comm.rank :][:2000] for j in range(2)]
view = am.all_to_all_v(square.T, halves, halves, unit="element").asnumpy()
print("view", bool((view == np.concatenate(turned)).all()), flush=True)


def both(call):
    """What a function gives through the queue, and without."""
    results = []
    for tensors.queued in (True, False):
        results.append([value.asnumpy().view(np.uint8) if value.size else value.asnumpy() for value in call()])
    tensors.queued = True
    return all((a.shape == b.shape) and (a == b).all() for a, b in zip(*results, strict=True))


sends, recvs = [[3, 4], [3, 3]][comm.rank], [[3, 3], [4, 3]][comm.rank]


def gradient():
    weights = Tensor(np.arange(sum(recvs), dtype=np.float32))
    x = Tensor(np.arange(sum(sends), dtype=np.float32))
    return (ms.grad(lambda x: (am.all_to_all_v(x * x, sends, recvs) * weights).sum())(x),)


def into_outputs():
    x = Tensor(np.arange(6, dtype=np.float32) + comm.rank)

    def summed(x):
        y = x * x
        am.all_reduce(y)
        return y

    def gathered(x):
        am.all_gather_into_tensor(out := ms.ops.zeros(12), x * x)
        return out

    def with_gaps(x):
        return am.all_to_all_v(x * x, [2, 2], [2, 2], sdispls=[0, 2], rdispls=[4, 1], out=ms.ops.ones(7))

    return [ms.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (summed, gathered, with_gaps)]


def gaps():
    x = Tensor(np.arange(10, dtype=np.float32) + 100 * comm.rank)
    out = Tensor(np.full(12, -1, np.float32))
    layout = {"sdispls": [6, 1], "rdispls": [7, 2]}
    given = am.all_to_all_v(x, [2, 2], [2, 2], out=out, **layout)
    return am.all_to_all_v(x, [2, 2], [2, 2], **layout), given + 0


def learnt():
    x = Tensor(np.arange(3 * sum(sends), dtype=np.float32).reshape(-1, 3) + 100 * comm.rank)
    y, handle = am.all_to_all_v(x, sends, recvs, unit="row", async_op=True)
    handle.wait()
    return am.all_to_all_v(x, sends, unit="row"), y


def others():
    x = Tensor(np.arange(8, dtype=np.float32).reshape(4, 2) + 100 * comm.rank)
    split, gathered = (Tensor(np.zeros((n, 2), np.float32)) for n in (4, 8))
    am.all_to_all_single(split, x)
    am.all_gather_into_tensor(gathered, x)
    local = [1, 1, 2, 0] if comm.rank == 0 else [0, 2, 1, 1]  # rows for expert e of card j
    received = [1, 1, 0, 2] if comm.rank == 0 else [2, 0, 1, 1]
    scattered = am.global_scatter(x, local, received)
    with pytest.raises(InvalidParamError, match="dst is 2, expected 0 <= dst < 2"):
        am.reduce(x, 2)
    if tensors.queued:
        with pytest.raises(RuntimeError, match="timeout is 5, expected None on Ascend"):
            am.all_to_all([x[:2] + 0, x[2:] + 0], [x[:2], x[2:]], timeout=5 if comm.rank else None)
    return split + 0, gathered + 0, scattered, am.global_gather(scattered, local, received), am.exchange_counts([1, 2])


def sums():
    """Gradients of a list exchange, of gathers and of reductions, into new tensors."""
    x = Tensor(np.arange(6, dtype=np.float32) + comm.rank)
    total, largest = x * 1, x * 1
    am.all_reduce(total)
    am.reduce_scatter(part := Tensor(np.zeros(2, np.float32)), [x[:2], x[2:4]], "max")
    am.all_reduce(largest, "max", async_op=True).wait()
    sizes = [(2 + 2 * comm.rank,)] * 2
    made = (
        lambda x: front_end.summed(x, comm),
        lambda x: front_end.apply(x, Reduction(LATE, comm, "reduce_scatter", (6,), (3,), "sum", [3, 3])),
        lambda x: front_end.ListExchange.apply(comm, sizes, x[:2], x[2:])[1],
        lambda x: front_end.apply(x, gathering(LATE, comm, (6,), (12,))),
        lambda x: front_end.Broadcast.apply(x, comm, 1),
    )
    return total + 0, part + 0, largest + 0, *(ms.grad(lambda x, f=f: (f(x * x) * 3).sum())(x) for f in made)


def quantized():
    """Each mode of the quantized collectives, with error feedback, gradients and values that do not fit."""
    x = Tensor(np.random.default_rng(comm.rank).normal(size=(5, 60)).astype(np.float32))
    whole, halves = Tensor(np.arange(-48, 48).reshape(6, 16).astype(np.int8)), x.astype(ms.float16)
    reduced = am.quantized_all_reduce
    for bits in (8, 4) if thorough else (4,):
        for gather in ("full", "quantized"):
            yield reduced(x, bits=bits, gather=gather, op="avg")
            yield reduced(x, bits=bits, gather=gather, group_size=7, out_dtype=ms.float16)
            yield from reduced(x, bits=bits, gather=gather, op="avg", out_dtype=ms.float16, bound=True)[:2]
        state = am.ErrorFeedback()
        for _ in range(2):
            yield reduced(x, bits=bits, gather="quantized", error_feedback=state)
        yield from (Tensor(array) for array in state.state_dict().values())
        yield from am.quantized_reduce_scatter(x, [4, 1], bits=bits, group_size=50, bound=True)[:2]
        yield from am.quantized_all_to_all(x, [1, 4], bits=bits, group_size=50, out_dtype=ms.bfloat16, bound=True)[:2]
        yield am.quantized_reduce_scatter(x, [4, 1], bits=bits, group_size=50)
        yield am.quantized_reduce_scatter(x, [5, 0], bits=bits)
        yield am.quantized_all_to_all(x, [1, 4], [1, 1] if comm.rank == 0 else [4, 4], bits=bits)
        yield am.quantized_all_to_all(x, [5, 0], bits=bits, out_dtype=ms.bfloat16)
    yield from reduced(x, max_error=1.0, group_size=7)[:2]
    vectors = x.reshape(2, 150)
    yield from reduced(vectors, leaves=4, group_size=32, op="avg", bound=True)[:2]
    yield reduced(vectors, leaves=4, bits=4, gather="quantized", out_dtype=ms.float16)
    yield am.quantized_linear_all_reduce(vectors, vectors[:1] + 1, leaves=4)
    yield ms.grad(lambda x: (reduced(x, op="avg", leaves=4) ** 2).sum())(vectors)
    yield reduced(halves, group_size="tensor")
    yield reduced(Tensor(np.zeros((0, 3), np.float32)))
    yield reduced(whole, scale=0.25, offset=1.5)
    yield reduced(whole, scale=Tensor(np.linspace(0.1, 1, 16, dtype=np.float16)), out_dtype=ms.float32)
    yield reduced(x, comm_quant_scale_1=0.02, comm_quant_scale_2=0.03)
    out, handle = reduced(x, out=ms.ops.zeros((5, 60)), async_op=True)
    handle.wait()
    yield out
    for overflow in ("saturate", "infinity"):
        yield reduced(x * 1e6, overflow=overflow, out_dtype=ms.float16)
    yield ms.grad(lambda x: (reduced(x, op="avg") ** 2).sum())(x)
    yield ms.grad(lambda x: (am.quantized_reduce_scatter(x, [4, 1]) ** 2).sum())(x)
    yield ms.grad(lambda x: (am.quantized_all_to_all(x, [1, 4]) ** 2).sum())(x)
    for call, who, *counts in ((reduced, 0), (am.quantized_reduce_scatter, 1, [4, 1])):
        with pytest.raises(ValueOverflowError):
            call(x * (1e6 if comm.rank == who else 1), *counts, overflow="raise", out_dtype=ms.float16)


def operations():
    """ATB's operations, and their cells with gradients."""
    counts = [[2, 3], [1, 2]]
    fields = {"rank": comm.rank, "rank_size": 2}
    layout = {"send_counts": counts[comm.rank], "recv_counts": [row[comm.rank] for row in counts]}
    exchanges = AllToAllVParam(**fields, **layout, sdispls=[1, 0], rdispls=[0, layout["recv_counts"][0]])
    dynamic, scaled = (
        QuantAllReduceParam(**fields, quant_type=kind) for kind in (QuantType.DYNAMIC, QuantType.PER_TENSOR)
    )
    x = Tensor(np.arange(6, dtype=np.float32) + 10 * comm.rank)
    whole, scale, offset = Tensor(np.arange(32, dtype=np.int8)), Tensor([0.5], ms.float16), Tensor([1.0], ms.float16)
    yield AllToAllVOperation(exchanges, comm)(x)
    yield am.AllToAllVCell(exchanges, comm)(x)
    yield QuantAllReduceOperation(dynamic, comm)(x)
    yield QuantAllReduceOperation(scaled, comm)(whole, scale, offset)
    yield am.QuantAllReduceCell(dynamic, comm)(x)
    yield from (ms.grad(lambda x, c=c: (c(x) ** 2).sum())(x) for c in (am.QuantAllReduceCell(dynamic, comm),))


def of_any_rows(function, columns):
    return ms.enable_dynamic(x=Tensor(shape=[None, columns], dtype=ms.float32))(function)


def graphs():
    """The cells in graphs: rows, gaps, counts as tensors, ATB's operator, and the gradients of several exchanges."""
    x = Tensor(np.arange(18, dtype=np.float32).reshape(6, 3) + 100 * comm.rank)
    rows = am.AllToAllV(sends, recvs)
    gaps = am.AllToAllV([2, 2], [2, 2], sdispls=[6, 1], rdispls=[7, 2], unit="element")
    dynamic = am.DynamicAllToAllV(8)
    counts = [[2, 3], [1, 2]]
    param = {"rank": comm.rank, "rank_size": 2, "send_counts": counts[comm.rank]}
    parts = [row[comm.rank] for row in counts]
    places = {"recv_counts": parts, "sdispls": [0, counts[comm.rank][0]], "rdispls": [parts[1], 0]}
    atb = am.AllToAllVCell(AllToAllVParam(**param, **places), comm)
    tensors_of = [Tensor(values) for values in (sends, recvs)]

    def by_rows(x):
        return rows(x * x)

    def with_gaps(x):
        return gaps(x * 2)

    def with_counts(x, sends, recvs):
        return dynamic(x * 2, sends, recvs + 0)

    def of_atb(x):
        return atb(x + 1)

    def twice(x):
        return gaps(rows(x)).sum() + (rows(x * 3) ** 2).sum()

    given = x if sum(sends) == 6 else ms.ops.cat((x, x[:1]))
    functions = ((by_rows,), (with_gaps,), (with_counts, *tensors_of), (of_atb,))
    for function, *more in functions if thorough else functions[2:]:
        yield ms.jit(function)(given, *more)
    cells = ((rows,), (gaps,), (atb,), (dynamic, *tensors_of))
    for cell, *more in cells if thorough else cells[3:]:
        yield ms.grad(ms.jit(squares_of(cell)))(given, *more)
    yield ms.jit(ms.grad(twice))(given)
    yield (ms.jit(of_any_rows(by_rows, 3)) if tensors.queued else by_rows)(given)
    yield with_counts(given, *tensors_of)
    yield rows(given.astype(ms.bfloat16)).astype(ms.float32)


def quantized_graphs(group=None):
    """The cells of quantized collectives in graphs, and their gradients; without the queue in PyNative.

    In a ``group`` over HCCL one cell for each way in which its codes travel.
    """
    made = ms.jit if tensors.queued else lambda function: function
    x = Tensor(np.random.default_rng(comm.rank).normal(size=(5, 64)).astype(np.float32))
    whole = Tensor(np.arange(-48, 48).reshape(6, 16).astype(np.int8))
    scales, offset = Tensor(np.linspace(0.1, 1, 16, dtype=np.float16)), Tensor([1.0], ms.float16)
    counts = [1, 4], [1, 1] if comm.rank == 0 else [4, 4]
    fields = {"rank": comm.rank, "rank_size": 2}
    dynamic, shared = (
        QuantAllReduceParam(**fields, quant_type=kind) for kind in (QuantType.DYNAMIC, QuantType.PER_CHANNEL)
    )
    cells = [
        am.QuantAllReduceCell(dynamic, group or comm),
        am.QuantizedAllReduce(op="avg", group=group),
        am.QuantizedReduceScatter(5, [4, 1], group_size=50, group=group),
        am.QuantizedAllToAll(*counts, bits=4, out_dtype=ms.float16, overflow="raise", group=group),
        am.QuantizedAllReduce(bits=4, gather="quantized", group_size=7, out_dtype=ms.float16, group=group),
    ]

    def disagree():
        disagreeing = am.QuantizedAllReduce(bits=8 - 4 * comm.rank)
        with pytest.raises((RuntimeError, PeerMismatchError), match="rank 0 has format int8, rank 1 has format int4"):
            made(disagreeing)(x).asnumpy()

    for cell in cells[1 : None if thorough else 3] if group else cells[4:]:
        yield made(cell)(x)
    if not thorough:
        if not group:
            yield ms.grad(made(squares_of(cells[3])))(x)
            disagree()
        return
    vectors = x.reshape(2, 160)
    of_leaves = [am.AllReduceLeaves(4, group=group), am.QuantizedAllReduce(leaves=4, op="avg", group=group)]
    by_leaves = (*of_leaves, am.QuantizedAllReduce(leaves=4, bits=4, gather="quantized", group=group))
    for cell in by_leaves:
        yield made(cell)(vectors)
    yield made(am.QuantAllReduceCell(shared, group or comm))(whole, scales, offset)
    yield made(of_leaves[0])(vectors.astype(ms.float16)).astype(ms.float32)
    if group:
        yield made(am.QuantizedAllReduce(bits=4, out_dtype=ms.float16, group=group))(x)
        yield made(am.QuantizedAllReduce(scale=0.25, offset=1.5, group=group))(whole)
        return
    for cell in cells[:4]:
        yield ms.grad(made(squares_of(cell)))(x)
    for cell in of_leaves:
        yield ms.grad(made(squares_of(cell)))(vectors)
    yield made(am.QuantizedAllReduce(scale=0.25, offset=1.5))(whole)
    yield made(am.QuantizedAllReduce(comm_quant_scale_1=0.02, comm_quant_scale_2=0.03))(x)
    if tensors.queued:
        with pytest.raises((RuntimeError, InvalidParamError), match=r"the input's shape is \[\?, 64\]"):
            ms.jit(of_any_rows(squares_of(cells[1]), 64))(x)
    overflowing = (
        am.QuantizedReduceScatter(5, [4, 1], overflow="raise", out_dtype=ms.float16),
        am.QuantizedAllReduce(overflow="raise", out_dtype=ms.float16),
    )
    for cell in overflowing:
        with pytest.raises((RuntimeError, ValueOverflowError), match="float16"):
            made(cell)(x * (1e6 if comm.rank else 1)).asnumpy()
    disagree()
    unequal = am.QuantAllReduceCell(shared, comm)
    with pytest.raises((RuntimeError, PeerMismatchError), match="offset"):
        made(unequal)(whole, scales, offset * (1.0 + comm.rank)).asnumpy()


def squares_of(cell):
    def squares(x, *counts):
        y = cell(x, *counts)
        return (y * y).sum()

    return squares


def kernel_on_device(plan, regions, stream):
    """Launches the kernel on copies in device memory, as OnDevice does."""
    assert acl.aclrtSetDevice(comm.rank) == 0
    places, sizes = zip(*regions, strict=True)
    there = [ctypes.c_void_p() for _ in places]
    for place, host, size in zip(there, places, sizes, strict=True):
        assert acl.aclrtMalloc(ctypes.byref(place), ctypes.c_size_t(size), 0) == 0
        assert acl.aclrtMemcpy(place, ctypes.c_size_t(size), ctypes.c_void_p(host), ctypes.c_size_t(size), 1) == 0
    at = ctypes.c_void_p()
    assert acl.aclrtCreateStream(ctypes.byref(at)) == 0
    launch_kernel(plan, [(place.value, size) for place, size in zip(there, sizes, strict=True)], at.value)
    assert acl.aclrtSynchronizeStream(at) == 0
    size = ctypes.c_size_t(sizes[0])
    assert acl.aclrtMemcpy(ctypes.c_void_p(places[0]), size, there[0], size, 2) == 0
    assert all(acl.aclrtFree(place) == 0 for place in there)


def counted_on_device(core, dtype, row, x, rows, sends, sdispls, out, capacity, expects, received, status, stream):
    """Launches the exchange on copies in device memory, as OnDevice does."""
    assert acl.aclrtSetDevice(comm.rank) == 0
    assert sdispls == 0
    hosts, sizes = (x, sends, out, received, status), (rows * row * 4, 16, capacity * row * 4, 16, 48 * 8 * 4)
    there = [ctypes.c_void_p() for _ in hosts]
    for place, host, size in zip(there, hosts, map(ctypes.c_size_t, sizes), strict=True):
        assert acl.aclrtMalloc(ctypes.byref(place), size, 0) == 0
        assert acl.aclrtMemcpy(place, size, ctypes.c_void_p(host), size, 1) == 0
    at = ctypes.c_void_p()
    assert acl.aclrtCreateStream(ctypes.byref(at)) == 0
    x, sends, out, received, status = [place.value for place in there]
    exchange(core, dtype, row, x, rows, sends, 0, out, capacity, expects, received, status, at.value)
    assert acl.aclrtSynchronizeStream(at) == 0
    for place, host, size in list(zip(there, hosts, map(ctypes.c_size_t, sizes), strict=True))[2:]:
        assert acl.aclrtMemcpy(ctypes.c_void_p(host), size, place, size, 2) == 0
    assert all(acl.aclrtFree(place) == 0 for place in there)


def with_capacity():
    """ATB's operation with counts that MindSpore has computed, over the emulator's HCCL; and one that is refused."""
    operation = AllToAllVOperation(AllToAllVParam(rank=comm.rank, rank_size=2), hccl, capacity=5)
    x, counts = Tensor(np.arange(6, dtype=np.float32) + 10 * comm.rank), Tensor([1, 2]) + 0
    received = operation(x, send_counts=counts).check()
    begin, count = comm.rank, 1 + comm.rank
    wanted = np.concatenate([np.arange(begin, begin + count) + 10 * j for j in range(2)])
    right = (received.output.asnumpy()[0] == np.append(wanted, np.zeros(5 - wanted.size))).all()
    assert received.recv_counts.asnumpy().tolist() == [count] * 2
    operation(x, send_counts=counts, recv_counts=[count] * 2).check()
    with pytest.raises(InvalidParamError, match="rank 0 receives more than its capacity"):
        operation(x, send_counts=[3, 2]).check()

    rows = Tensor(np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * comm.rank)
    weights = np.arange(10, dtype=np.float32).reshape(5, 2)
    both = am.all_to_all_v(rows, counts, capacity=5, group=hccl).check()
    first = [np.arange(2 * begin, 2 * (begin + count)) + 10 * j for j in range(2)]
    right &= (both.output.asnumpy().reshape(-1)[: 4 * count] == np.concatenate(first)).all()
    right &= both.output.shape == (5, 2) and not both.output.asnumpy()[2 * count :].any()

    def weighed(x):
        y, _, _ = am.all_to_all_v(x * x, counts, [count] * 2, capacity=5, group=hccl)
        return (y * Tensor(weights)).sum()

    back = np.concatenate([weights[comm.rank * (1 + r) :][: 1 + r] for r in range(2)])
    right &= (ms.grad(weighed)(rows).asnumpy() == 2 * rows.asnumpy() * back).all()
    am.all_to_all_v(x, counts, capacity=5, group=hccl).check()
    with pytest.raises(PeerMismatchError, match="rank 1 receives other counts than its recv_counts"):
        am.all_to_all_v(x, counts, [count, count + comm.rank], capacity=5, group=hccl).check()
    return bool(right)


def over_hccl():
    """The quantized collectives over the emulator's HCCL, as over shared memory."""
    x = Tensor(np.random.default_rng(comm.rank).normal(size=(5, 60)).astype(np.float32))
    whole = Tensor(np.arange(-48, 48).reshape(6, 16).astype(np.int8))
    group = hccl if tensors.queued else comm
    for bits, gather in ((8, "full"), (4, "quantized")):
        yield am.quantized_all_reduce(x, bits=bits, gather=gather, op="avg", group=group)
    yield am.quantized_reduce_scatter(x, [4, 1], group=group)
    yield am.quantized_all_to_all(x, [1, 4], [1, 1] if comm.rank == 0 else [4, 4], bits=4, group=group)
    yield am.quantized_all_reduce(whole, scale=0.25, offset=1.5, group=group)
    yield am.quantized_all_reduce(x, comm_quant_scale_1=0.02, comm_quant_scale_2=0.03, group=group)
    yield from quantized_graphs(group)


for call in (gaps, learnt, gradient, into_outputs, others, sums, quantized, operations, graphs, quantized_graphs):
    print(call.__name__, both(call), flush=True)
hccl = Communicator.from_env(domain="hccl", backend="hccl", timeout=800)
device_quantized.plan_of, device_quantized.launch_kernel = on_device, kernel_on_device
print("over_hccl", both(over_hccl), flush=True)
device_quantized.plan_of, device_quantized.launch_kernel = plan_of, launch_kernel
print("kernel_calls", hccl.stats()["kernel_calls"], flush=True)
exchange, _core.exchange_counted_on_device = _core.exchange_counted_on_device, counted_on_device
on_cpu, device_op.device = device_op.device, lambda: "npu"
print("with_capacity", with_capacity(), flush=True)
_core.exchange_counted_on_device, device_op.device = exchange, on_cpu
hccl.destroy()

try:
    am.all_to_all_v(square, halves, [2000 + comm.rank, 2000], unit="element").asnumpy()
except RuntimeError as error:
    print(str(error).splitlines()[0], flush=True)

# Every name of mint.distributed as on Ascend: what runs in the queue, and what on the host.
launches = itertools.count()
device_op.ticket_for = lambda launch, made=device_op.ticket_for: (next(launches), made(launch))[1]
for name, check in sorted(CALLS.items(), key=lambda item: item[0] != "init_process_group"):
    before = next(launches)
    check(distributed, comm.rank, 1 - comm.rank)
    how = "queue" if next(launches) > before + 1 else "host"
    print("mint", name, how == ON_ASCEND.get(name, "host") or how, flush=True)
