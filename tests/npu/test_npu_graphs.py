"""torch.npu.graph on emulated NPUs: what is captured runs again by replay, on the same memory."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from npu_ranks import caught, group, use_device
from on_ranks import on_ranks


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
