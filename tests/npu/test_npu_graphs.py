"""torch.npu.graph on emulated NPUs: what is captured runs again by replay, on the same memory."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from npu_ranks import caught, group, use_device
from on_ranks import on_ranks
from torch import Tensor

import alltoallv.torch as at
import alltoallv_emulator as emulator
from alltoallv import AllToAllVParam, QuantAllReduceParam, QuantType
from alltoallv.torch.engines.device import Call


@on_ranks(1, communicator=False)
def test_replay_computes_from_what_its_memory_holds_then(rank: int, size: int) -> None:
    import torch_npu

    device = use_device(rank)
    x, count = torch.ones(1, 4, device=device), torch.zeros(3, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        count.add_(1)
        y = torch_npu.npu_swiglu((x * 2).view(1, 4)).unsqueeze_(0)
        z = y[0].t().contiguous()
    assert not torch.npu.is_current_stream_capturing()
    assert count.tolist() == [0, 0, 0]  # a capture runs nothing
    for number in (1, 2):
        x.copy_(torch.arange(4.0).view(1, 4) * number)
        graph.replay()
        expected = torch_npu.npu_swiglu(x * 2)
        assert torch.equal(y[0], expected)
        assert torch.equal(z, expected.t())
        assert count.tolist() == [number] * 3
    graph.reset()
    assert "expected a capture before" in str(caught(graph.replay))


@on_ranks(1, communicator=False)
def test_operators_of_a_higher_order_operator_are_replayed(rank: int, size: int) -> None:
    """As torch.compile leaves a program's own operator that writes into its argument."""
    import torch._higher_order_ops.auto_functionalize as higher

    device = use_device(rank)

    @torch.library.custom_op("alltoallv_tests::add_into", mutates_args=("x",), schema="(Tensor(a!) x, Tensor y) -> ()")
    def add_into(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    x, y = torch.zeros(4, device=device), torch.ones(4, device=device)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        _, z = higher.auto_functionalized(add_into._opoverload, x=x, y=y)
    for number in (1.0, 2.0):
        y.fill_(number)
        graph.replay()
        assert z.tolist() == [number] * 4
        assert x.tolist() == [0.0] * 4


@on_ranks(1, communicator=False)
def test_memory_of_a_capture_stays_the_graphs(rank: int, size: int) -> None:
    """Also what it has only allocated: programs need no tensors of a graph's outputs, which lie in its pool."""
    device = use_device(rank)
    graph, elements = torch.npu.NPUGraph(), 3_000_000

    def addresses(tensors: int) -> set[int]:
        """Of tensors made on the stream of the capture, which no other stream's memory is for."""
        with torch.npu.stream(stream):
            return {tensor.data_ptr() for tensor in [torch.empty(elements, device=device) for _ in range(tensors)]}

    stream = torch.npu.Stream()
    with torch.npu.graph(graph, stream=stream):
        made = addresses(3)
    assert not made & addresses(8)
    torch.npu.empty_cache()
    reserved = torch.npu.memory_reserved()
    graph.reset()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() <= reserved - 3 * 4 * elements


@on_ranks(1, communicator=False)
def test_graphs_of_one_pool_use_its_memory_one_after_the_other(rank: int, size: int) -> None:
    """As on a device: what a capture has freed is there for what it does later, and for the next graph."""
    device = use_device(rank)
    graphs, stream = [torch.npu.NPUGraph() for _ in range(2)], torch.npu.Stream()
    x, results, places = torch.arange(1024.0, device=device), [], []
    for graph in graphs:
        with torch.npu.graph(graph, stream=stream, pool=graphs[0].pool() if results else None):
            places.append({(middle := x + 1).data_ptr()})
            results.append(middle * 2)
            del middle
            places[-1].add((x + 3).data_ptr())
    assert places[0] == places[1]
    assert len(places[0]) == 1
    assert results[0].data_ptr() != results[1].data_ptr()
    assert graphs[0].pool() == graphs[1].pool() != torch.npu.graph_pool_handle()
    x.fill_(5)
    for graph, result in zip(graphs, results, strict=True):
        graph.replay()
        assert result.tolist() == [12] * 1024
    graphs[0].reset()
    assert "expected a capture before" in str(caught(graphs[0].pool))
    x.fill_(6)
    graphs[1].replay()
    assert results[1].tolist() == [14] * 1024


@on_ranks(1, communicator=False)
def test_values_may_come_after_the_capture(rank: int, size: int) -> None:
    """As where torch_npu's backends for torch.compile copy a graph's inputs to memory that the capture made."""
    device = use_device(rank)
    table, graph = torch.arange(12.0, device=device).view(4, 3), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        places = torch.empty(2, dtype=torch.int64, device=device)
        rows = torch.nn.functional.embedding(places, table) * 2
        table.index_add_(0, places, torch.ones(2, 3, device=device))
    places.copy_(torch.tensor([3, 1]))
    graph.replay()
    assert rows.tolist() == [[18, 20, 22], [6, 8, 10]]
    assert table.tolist() == [[0, 1, 2], [4, 5, 6], [6, 7, 8], [10, 11, 12]]
    places.fill_(4)
    assert isinstance(caught(graph.replay), IndexError)


@on_ranks(1, communicator=False)
def test_memory_of_a_pool_is_as_it_was_at_a_checkpoint(rank: int, size: int) -> None:
    """As torch_npu's backends for torch.compile set it, so that graphs of several sizes have one memory."""
    device = use_device(rank)
    native, graphs = importlib.import_module("torch_npu._C"), [torch.npu.NPUGraph() for _ in range(3)]
    number, stream, x = torch.npu.graph_pool_handle(), torch.npu.Stream(), torch.ones(4096, device=device)
    results, states = [], []
    for graph in graphs:
        if len(states) > 1:
            stale = results.pop()
            native._npu_setCheckpointPoolState(device.index, states[0], [stale.untyped_storage()._cdata], [])
        with torch.npu.graph(graph, stream=stream, pool=number):
            if states:
                results.append((x + 1) * 2)
        states.append(native._npu_getCheckpointState(device.index, number))
    x.fill_(2)
    graphs[2].replay()
    assert results[0].tolist() == [6] * 4096


@on_ranks(1, communicator=False)
def test_what_cannot_be_replayed_is_refused_by_name(rank: int, size: int) -> None:
    device = use_device(rank)
    x = torch.ones(4, device=device)

    def capture(call: object) -> None:
        with torch.npu.graph(torch.npu.NPUGraph()):
            call()  # type: ignore[operator]

    for call, name in (
        (lambda: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda: x.cpu(), "aten::_to_copy"),
        (lambda: x.nonzero(), "aten::nonzero"),
    ):
        assert f"{name} cannot be captured in an NPUGraph" in str(caught(lambda call=call: capture(call)))
        assert (x + 1).sum().item() == 8
    assert "on the default stream" in str(caught(torch.npu.NPUGraph().capture_begin))
    stream = torch.npu.current_stream()
    for call, name in (
        (torch.npu.NPUGraph().capture_end, "capture_end"),
        (lambda: torch.npu.graph_task_group_begin(stream), "graph_task_group_begin"),
        (lambda: torch.npu.graph_task_group_end(stream), "graph_task_group_end"),
    ):
        assert f"{name} is called outside of a capture of an NPUGraph" in str(caught(call))
    assert isinstance(caught(lambda: torch.npu.NPUGraph().debug_dump("graph.json")), NotImplementedError)


@on_ranks(1, communicator=False)
def test_modules_with_gradients(rank: int, size: int) -> None:
    device = use_device(rank)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    captured = copy.deepcopy(plain)
    call = torch.npu.make_graphed_callables(captured, (torch.randn(3, 4, device=device),))
    for _ in range(2):
        x = torch.randn(3, 4, device=device)
        plain(x).square().sum().backward()
        call(x).square().sum().backward()
        for one, other in zip(plain.parameters(), captured.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
            one.grad = other.grad = None  # a captured backward pass writes its gradients anew


@on_ranks(1, communicator=False)
def test_a_group_of_operators_gets_other_arguments(rank: int, size: int) -> None:
    device = use_device(rank)
    stream, graph, x = torch.npu.Stream(), torch.npu.NPUGraph(), torch.arange(4.0, device=device)
    with torch.npu.graph(graph):
        before = x + 1
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        shifted = torch.roll(before, 1)
        handle = torch.npu.graph_task_group_end(torch.npu.current_stream())
        after = shifted * 10
    graph.replay()
    assert after.tolist() == [40, 10, 20, 30]
    torch.npu.graph_task_update_begin(stream, handle)
    torch.roll(before, 2)
    torch.npu.graph_task_update_end(stream)
    graph.replay()
    assert after.tolist() == [30, 40, 10, 20]


@on_ranks(1, communicator=False)
def test_an_operator_of_the_program_is_seen_inside(rank: int, size: int) -> None:
    """A replay runs no Python of it; a group that it makes gets other arguments; work on the host is done once."""
    import torch_npu

    device, calls, handles = use_device(rank), [0], []
    score, stream = torch_npu.npu_fused_infer_attention_score, torch.npu.Stream()
    x, out = torch.randn(1, 4, 16, device=device).half(), torch.zeros(1, 4, 16, device=device).half()
    library = torch.library.Library("program", "DEF")
    library.define("attend(Tensor x, Tensor(a!) out) -> Tensor")
    library.define("both(Tensor x, Tensor(a!) out) -> Tensor")

    def write(x: Tensor, scale: float) -> None:
        memory = torch.empty(64, device=device)
        options = {"num_heads": 1, "input_layout": "BSH", "scale": scale}
        score.out(x, x, x, **options, workspace=memory, out=[out, torch.empty(1, device=device)])

    def attend(x: Tensor, out: Tensor) -> Tensor:
        calls[0] += 1
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        write(x, float(torch.tensor([1.0, 3.0]).min()))  # on the host
        handles.append(torch.npu.graph_task_group_end(torch.npu.current_stream()))
        return out * 2

    library.impl("attend", attend, "PrivateUse1")
    program = importlib.import_module("torch.ops").program
    library.impl("both", lambda x, out: program.attend(x, out) + 1, "PrivateUse1")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = program.both(x + 1, out)
    (handle,) = handles
    assert [call.operator.name() for call in handle] == ["npu::npu_fused_infer_attention_score.out"]
    for scale in (1.0, 0.5):
        if scale != 1.0:
            with torch.npu.stream(stream):
                torch.npu.graph_task_update_begin(stream, handle)
                write(handle[0].args[0], scale)
                torch.npu.graph_task_update_end(stream)
        x.normal_()
        graph.replay()
        expected = score(x + 1, x + 1, x + 1, num_heads=1, input_layout="BSH", scale=scale)[0]
        assert torch.equal(out, expected)
        assert torch.equal(y, expected * 2 + 1)
    assert calls == [1]


@on_ranks(1, communicator=False)
def test_what_may_be_a_view_is_replayed_where_it_copies(rank: int, size: int) -> None:
    """Inside a program's operator they come as they are written, not as what they are made of."""
    device, operators = use_device(rank), importlib.import_module("torch.ops")
    library, aten = torch.library.Library("program_views", "DEF"), operators.aten
    library.define("copies(Tensor x) -> Tensor[]")

    def copies(x: Tensor) -> list[Tensor]:
        kinds = [x.to(torch.float16), x.t().contiguous(), x.t().reshape(-1), aten.to.dtype(x, torch.float64)]
        return [*kinds, aten.contiguous(x.t()), aten.reshape(x.t(), [-1]), x.t().flatten(), x.view(-1) + 0]

    library.impl("copies", copies, "PrivateUse1")
    x, graph = torch.zeros(2, 3, device=device), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = operators.program_views.copies(x)
    x.copy_(torch.arange(6.0).view(2, 3))
    graph.replay()
    for result, expected in zip(results, copies(x), strict=True):
        assert torch.equal(result, expected)


@on_ranks(1, communicator=False)
def test_an_operator_of_the_program_that_has_done_nothing_is_not_replayed(rank: int, size: int) -> None:
    """What it does may hang on the program's state, as a sum over ranks that only some layouts of experts need."""
    device, adds = use_device(rank), [False]
    library = torch.library.Library("program_state", "DEF")
    library.define("may_add(Tensor x) -> Tensor")
    library.impl("may_add", lambda x: x.add_(1) if adds[0] else x, "PrivateUse1")
    x, graph = torch.zeros(4, device=device), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = importlib.import_module("torch.ops").program_state.may_add(x * 2) + 1
    adds[0] = True
    graph.replay()
    assert y.tolist() == [1.0] * 4


@on_ranks(1, communicator=False)
def test_attention_gets_other_lengths_while_a_replay_waits_for_them(rank: int, size: int) -> None:
    """As serving does: replay, and then the update, each of whose events lets the replay go on."""
    import torch_npu

    device = use_device(rank)
    query, key, value = (torch.randn(2, 4, length, 8, device=device) for length in (1, 6, 6))
    options = {"num_heads": 4, "input_layout": "BNSD", "scale": 0.3}
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        result, _ = torch_npu.npu_fused_infer_attention_score(
            query, key, value, actual_seq_lengths_kv=[3, 6], **options
        )
        doubled = result * 2
    for lengths in ([3, 6], [2, 5]):
        graph.replay()
        assert "waits in a replay of an NPUGraph for an ExternalEvent" in str(caught(doubled.cpu))
        graph.update([{"actual_seq_lengths_kv": lengths}])
        expected = torch_npu.npu_fused_infer_attention_score(
            query, key, value, actual_seq_lengths_kv=lengths, **options
        )
        assert torch.equal(doubled, expected[0] * 2)


@on_ranks(2, communicator=False)
def test_collectives_are_replayed(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (_, device):
        x, whole = torch.zeros(2, device=device), torch.zeros(2 * size, device=device)
        dist.all_reduce(x)  # makes the communicator
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x + rank
            dist.all_reduce(y)
            dist.all_gather_into_tensor(whole, y * (rank + 1))
        for number in (1.0, 2.0):
            x.fill_(number)
            graph.replay()
            total = number * size + sum(range(size))
            assert y.tolist() == [total] * 2
            assert whole.tolist() == [total * (other + 1) for other in range(size) for _ in range(2)]


Way = tuple[Callable[[Tensor], Tensor], Callable[[list[Tensor]], Tensor]]


def ways(rank: int, device: torch.device) -> dict[str, Way]:
    """Calls of alltoallv by name, on 8 floats of two ranks, and what they give, of all ranks' inputs."""
    zeros = partial(torch.zeros, device=device)
    outs = {n: zeros(n) for n in (4, 8, 16)}
    param = AllToAllVParam(
        rank=rank, rank_size=2, send_counts=[4, 4], sdispls=[0, 4], recv_counts=[4, 4], rdispls=[0, 4]
    )
    operation, plan = at.AllToAllVOperation(param), at.Plan([4, 4], [4, 4], device="npu")

    def into(call: Callable[[Tensor], object], out: Tensor) -> Tensor:
        call(out)
        return out

    def filled(x: Tensor, call: Callable[[Tensor], object]) -> Tensor:
        return into(call, torch.empty_like(x).copy_(x))

    def parts(each: list[Tensor]) -> Tensor:
        return torch.cat([x[4 * rank : 4 * rank + 4] for x in each])

    def own_part(each: list[Tensor]) -> Tensor:
        return sum(each)[4 * rank : 4 * rank + 4]

    def only(root: int, there: Callable[[list[Tensor]], Tensor]) -> Callable[[list[Tensor]], Tensor]:
        return lambda each: there(each) if rank == root else each[rank]

    def gathered(x: Tensor) -> Tensor:
        at.gather(x[:4], list(outs[8].view(2, 4)) if rank == 0 else None)
        return outs[8] if rank == 0 else x

    def later(x: Tensor) -> Tensor:
        y, work = at.all_to_all_v(x, [4, 4], [4, 4], async_op=True)
        work.wait()
        return y

    even = [4, 4], [4, 4]
    return {
        "all_to_all_v": (lambda x: at.all_to_all_v(x, *even), parts),
        "all_to_all_v of rows": (lambda x: at.all_to_all_v(x.view(4, 2), [2, 2], [2, 2]).view(-1), parts),
        "all_to_all_v into": (lambda x: into(lambda out: at.all_to_all_v(x, *even, out=out), outs[8]), parts),
        "all_to_all_v later": (later, parts),
        "all_to_all_single": (lambda x: into(lambda out: at.all_to_all_single(out, x), outs[8]), parts),
        "all_to_all": (
            lambda x: into(lambda out: at.all_to_all(list(out.view(2, 4)), list(x.view(2, 4))), outs[8]), parts,
        ),
        "all_gather": (lambda x: into(lambda out: at.all_gather(list(out.view(2, 8)), x), outs[16]), torch.cat),
        "all_gather_into_tensor": (lambda x: into(lambda out: at.all_gather_into_tensor(out, x), outs[16]), torch.cat),
        "all_reduce": (lambda x: filled(x, at.all_reduce), sum),
        "reduce": (lambda x: filled(x, lambda y: at.reduce(y, 1)), only(1, sum)),
        "reduce_scatter": (
            lambda x: into(lambda out: at.reduce_scatter(out, list(x.view(2, 4))), outs[4]), own_part,
        ),
        "reduce_scatter_tensor": (lambda x: into(lambda out: at.reduce_scatter_tensor(out, x), outs[4]), own_part),
        "broadcast": (lambda x: filled(x, lambda y: at.broadcast(y, 1)), lambda each: each[1]),
        "gather": (gathered, only(0, lambda each: torch.cat([x[:4] for x in each]))),
        "scatter": (
            lambda x: into(lambda out: at.scatter(out, list(x.view(2, 4)) if rank == 0 else None), outs[4]),
            lambda each: each[0][4 * rank : 4 * rank + 4],
        ),
        "functional.all_reduce": (at.functional.all_reduce, sum),
        "quantized_all_reduce": (lambda x: at.quantized_all_reduce(x, group_size=8), sum),
        "quantized_all_reduce into": (
            lambda x: into(lambda out: at.quantized_all_reduce(x, group_size=8, out=out), outs[8]), sum,
        ),
        "barrier": (lambda x: filled(x, lambda y: at.barrier()), lambda each: each[rank]),
        "AllToAllVOperation": (operation, lambda each: parts(each)[None]),
        "Plan": (plan, parts),
    }  # fmt: skip


@on_ranks(2, communicator=False)
def test_calls_of_alltoallv_are_replayed(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (_, device):
        for name, (call, want) in ways(rank, device).items():
            x, graph = torch.full((8,), -7.0, device=device), torch.npu.NPUGraph()
            call(x)  # makes the communicator
            with torch.npu.graph(graph):
                y = call(x)
            for number in (1, 2):
                inputs = [torch.arange(8.0) + 100 * number + 10 * other for other in range(size)]
                x.copy_(inputs[rank])
                graph.replay()
                close = 2.0 if "quantized" in name else 0.0
                assert torch.allclose(y.cpu(), want(inputs), rtol=0, atol=close), (name, y, want(inputs))


@on_ranks(2, communicator=False)
def test_calls_that_a_graph_cannot_have_are_refused_by_name(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        x = torch.ones(8, device=device)
        feedback = at.ErrorFeedback()
        param = QuantAllReduceParam(rank=rank, rank_size=size, quant_type=QuantType.DYNAMIC)
        member = at.from_group(world, device="npu")
        quantized = at.QuantAllReduceOperation(param, member)
        at.all_reduce(x)
        quantized(x)
        at.barrier()

        def capture(call: Callable[[], object]) -> None:
            with torch.npu.graph(torch.npu.NPUGraph()):
                call()

        for call, name in (
            (lambda: at.all_to_all_v(x, [4, 4]), "alltoallv::all_to_all_v_learn"),
            (lambda: at.all_to_all_v(x, torch.tensor([4, 4], device=device), [4, 4]), "aten::_to_copy"),
            (lambda: at.quantized_all_to_all(x.view(4, 2), [2, 2]), "alltoallv::quantized_all_to_all"),
            (lambda: at.quantized_all_reduce(x, error_feedback=feedback), "quantized_all_reduce"),
            (lambda: at.quantized_all_reduce(x, async_op=True), "quantized_all_reduce"),
            (lambda: at.quantized_reduce_scatter(x, async_op=True), "quantized_reduce_scatter"),
            (lambda: at.quantized_all_to_all(x.view(4, 2), [2, 2], [2, 2], async_op=True), "quantized_all_to_all"),
            (lambda: at.all_to_all_v(x, [4, 4], async_op=True), "all_to_all_v"),
            (lambda: quantized(x), "quantized_all_reduce"),
            (lambda: at.send(torch.ones(2), 1 - rank), "send"),
            (lambda: at.irecv(torch.ones(2), 1 - rank), "recv"),
        ):
            error = str(caught(lambda call=call: capture(call)))
            assert f"{name} cannot be captured in an NPUGraph" in error, error
            at.all_reduce(y := x.clone())
            assert y.tolist() == [v * size for v in x.tolist()]
        # A call into HCCL that goes past torch. Where it fails the communicator ends, also for a peer that has not yet
        # seen the end of the call before.
        dist.barrier()
        out = torch.empty_like(x)
        raw = Call("all_to_all_v", "float32", ([4, 4], [0, 4], [4, 4], [0, 4]))
        error = str(caught(lambda: capture(lambda: member._launch_exchange(raw, out, x, True))))
        assert "HCCL_E_NOT_SUPPORT" in error


@on_ranks(1, communicator=False)
def test_another_stream_is_joined_before_a_capture_ends(rank: int, size: int) -> None:
    device = use_device(rank)
    x, side = torch.ones(4, device=device), torch.npu.Stream()

    def capture(graph: torch.npu.NPUGraph, *, joins: bool) -> Tensor:
        with torch.npu.graph(graph):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                y = x * 2
                done = side.record_event()
                z = None if joins else y + 1
            torch.npu.current_stream().wait_event(done)
        del z
        return y

    graph = torch.npu.NPUGraph()
    assert "107025" in str(caught(lambda: capture(graph, joins=False)))
    assert "expected a capture before" in str(caught(graph.replay))
    y = capture(graph, joins=True)
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [6] * 4


def test_a_graph_that_lives_at_exit(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch_npu\n"
        "torch.npu.set_device(0)\n"
        "x, graph = torch.ones(2, device='npu'), torch.npu.NPUGraph()\n"
        "with torch.npu.graph(graph):\n    y = x + 1\n"
        "torch.kept = graph\n"  # beyond the modules of the emulator
    )
    run = subprocess.run(
        [sys.executable, program], env=emulator.environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Exception ignored" not in run.stderr
    assert "leaked" not in run.stderr  # by nanobind, of Triton's objects
