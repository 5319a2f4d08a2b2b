"""deep_ep's interface on CPU: what arrives where, the way back, and both versions alike."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import pytest
import torch
from documented import ROOT
from on_ranks import on_ranks

from alltoallv import Communicator, deep_ep
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

EXPERTS, K, TOKENS, WIDTH = 8, 3, 6, 5


def problem(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :K]
    ids[0] = -1  # dropped
    ids[1, 1:] = -1
    x = torch.randint(-8, 8, (TOKENS, WIDTH), generator=generator).to(torch.bfloat16)
    return x, ids, torch.rand(TOKENS, K, generator=generator)


@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_dispatch_and_combine(comm: Communicator, size: int) -> None:
    buffer, local = deep_ep.Buffer(comm), EXPERTS // size
    x, ids, weights = problem(comm.rank)
    per_rank, _, per_expert, there, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    assert per_expert.tolist() == [int((ids == e).sum()) for e in range(EXPERTS)]
    assert per_rank.tolist() == there.sum(0).tolist()
    got, experts, got_weights, counts, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=there,
        num_tokens_per_expert=per_expert, expert_alignment=2, num_worst_tokens=size * TOKENS,
    )  # fmt: skip
    event.current_stream_wait()
    rows: list[Any] = []
    for source in range(size):  # in the order of ranks, then of tokens
        for row in zip(*problem(source), strict=True):
            here = (row[1] >= comm.rank * local) & (row[1] < (comm.rank + 1) * local)
            if here.any():
                rows.append((row[0], torch.where(here, row[1] - comm.rank * local, -1), row[2] * here))
    n = len(rows)
    for ours, expected in zip((got, experts, got_weights), zip(*rows, strict=True), strict=True):
        assert torch.equal(ours[:n], torch.stack(expected))
    assert len(got) == size * TOKENS
    assert (experts[n:] == -1).all()
    received = [int((experts == e).sum()) for e in range(local)]
    assert counts == [c + c % 2 for c in received]

    back, back_weights, _ = buffer.combine(got, handle, topk_weights=got_weights)
    assert torch.equal(back, x * there.sum(1, keepdim=True))  # small integers: exact
    assert torch.equal(back_weights, weights * (ids >= 0))
    again, *nothing, _ = buffer.dispatch(x, handle=handle)
    assert torch.equal(again, got)
    assert nothing[:3] == [None] * 3

    elastic = deep_ep.ElasticBuffer(comm, hidden=WIDTH)
    (codes, scales), found, _, other, _ = elastic.dispatch(
        (x.to(torch.int8), x[:, :1].float()), topk_idx=ids, topk_weights=weights, num_experts=EXPERTS
    )
    assert torch.equal(codes, got[:n].to(torch.int8))
    assert torch.equal(scales, got[:n, :1].float())
    assert torch.equal(found, experts[:n])
    assert other.num_recv_tokens_per_expert_list == received
    assert torch.equal(elastic.combine(got[:n], other, bias=x)[0], back + x)


@on_ranks(2)
def test_a_bad_argument_of_one_rank_fails_on_all(comm: Communicator) -> None:
    x, ids, weights = problem(comm.rank)
    buffer, elastic = deep_ep.Buffer(comm), deep_ep.ElasticBuffer(comm)
    given: dict[str, Any] = {"x": x, "topk_idx": ids, "topk_weights": weights}
    number, counts = {"num_experts": EXPERTS}, {"num_tokens_per_expert": torch.zeros(EXPERTS)}
    got, *_, handle, _ = elastic.dispatch(**given, **number)
    for call, right, wrong, text in (
        (elastic.dispatch, given | number, {"topk_idx": ids + EXPERTS}, "topk_idx holds numbers"),
        (elastic.dispatch, given | number, {"topk_idx": ids[:2]}, "topk_idx has shape"),
        (elastic.dispatch, given | number, {"topk_weights": weights[:, :1]}, "topk_weights has shape"),
        (elastic.dispatch, given | number, {"topk_idx": None}, "topk_idx or num_experts is None"),
        (elastic.dispatch, given | number, {"num_experts": None}, "topk_idx or num_experts is None"),
        (elastic.dispatch, given | number, {"x": None}, "x is NoneType, expected a torch.Tensor"),
        (elastic.dispatch, given | number, {"x": x[0]}, r"x has shape \(5,\), expected \[n, hidden\]"),
        (elastic.dispatch, given | number, {"x": (x, x[:2])}, r"x has shape \(6, 5\) and \(2, 5\), expected"),
        (elastic.dispatch, given | number, {"expert_alignment": 0}, "expert_alignment is 0, expected at least 1"),
        (elastic.dispatch, {"x": x, "handle": handle}, {"x": [x, None]}, "x is list, expected"),
        (buffer.dispatch, given | counts, {"topk_idx": None}, "topk_idx or num_tokens_per_expert is None"),
        (buffer.dispatch, given | counts, {"num_tokens_per_expert": None}, "num_tokens_per_expert is None"),
        (buffer.combine, {"x": got, "handle": handle}, {"x": None}, "x is NoneType, expected"),
        (buffer.combine, {"x": got, "handle": handle}, {"topk_weights": got[:, 0]}, r"has shape \(\d+,\), expected"),
        (buffer.combine, {"x": got, "handle": handle}, {"bias": x[:2]}, r"has shape \(2, 5\), expected \(6, 5\)"),
        (buffer.combine, {"x": got, "handle": handle}, {"bias": (x, x[0])}, r"bias has shape \(5,\), expected"),
    ):  # fmt: skip
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text) as found:
            call(**right | (wrong if comm.rank == 0 else {}))
        assert ("rank 0" in str(found.value)) == (comm.rank == 1)


@on_ranks(2)
def test_ranks_that_disagree(comm: Communicator) -> None:
    buffer, (x, ids, weights) = deep_ep.ElasticBuffer(comm), problem(comm.rank)
    others: tuple[tuple[dict[str, Any], str, object, object], ...] = (
        ({"topk_idx": ids[:, :2], "topk_weights": weights[:, :2]}, "k", K, 2),
        ({"num_experts": 2 * EXPERTS}, "num_experts", EXPERTS, 2 * EXPERTS),
        ({"topk_weights": weights.half()}, "topk_weights", torch.float32, torch.float16),
        ({"topk_weights": None}, "topk_weights", torch.float32, None),
        ({"expert_alignment": 4}, "expert_alignment", 1, 4),
    )
    given = {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS}
    got, _, got_weights, handle, _ = buffer.dispatch(**given)
    for told in (None, got_weights.half()):
        dtype = None if told is None else told.dtype
        words = f"rank 0 has topk_weights torch.float32, rank 1 has topk_weights {dtype}"
        with pytest.raises(PeerMismatchError, match=words):
            buffer.combine(got, handle, topk_weights=told if comm.rank else got_weights)
    for other, name, first, second in others:
        with pytest.raises(
            PeerMismatchError, match=rf"rank 0 has {name} {first}, rank 1 has {name} {second}.*A2A-3028"
        ):
            buffer.dispatch(**given | (other if comm.rank else {}))
    older, all_experts = deep_ep.Buffer(comm), torch.zeros(EXPERTS)
    with pytest.raises(
        PeerMismatchError, match=r"rank 0 has num_worst_tokens 12, rank 1 has num_worst_tokens 14.*A2A-3028"
    ):
        older.dispatch(x, topk_idx=ids, num_tokens_per_expert=all_experts, num_worst_tokens=12 + 2 * comm.rank)
    other_x, other_got = (x.half(), got.half()) if comm.rank else (x, got)
    for call in (
        lambda: buffer.dispatch(**given | {"x": other_x}),
        lambda: buffer.dispatch(other_x, handle=handle),
        lambda: buffer.combine(other_got, handle),
    ):
        with pytest.raises(
            PeerMismatchError, match=r"rank 0 moves .* of bfloat16, rank 1 moves .* of float16.*A2A-3009"
        ):
            call()
    scales = torch.ones(TOKENS, 1, dtype=torch.float16 if comm.rank else torch.bfloat16)
    with pytest.raises(PeerMismatchError, match=r"rank 0 and rank 1 move.*A2A-3009"):
        buffer.dispatch((x.to(torch.int8), scales), handle=handle)
    assert torch.equal(buffer.dispatch(x, handle=handle)[0], got)


@pytest.mark.parametrize("kind", [deep_ep.Buffer, deep_ep.ElasticBuffer])
def test_a_destroyed_buffer_refuses_calls(kind: type[deep_ep.Buffer | deep_ep.ElasticBuffer]) -> None:
    x, ids, weights = problem(0)
    buffer = kind(None)
    given: dict[str, Any] = {"num_experts": EXPERTS}
    if kind is deep_ep.Buffer:
        given = {"num_tokens_per_expert": torch.zeros(EXPERTS)}
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **given)
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(InvalidParamError, match=r"the buffer has been destroyed.*A2A-1226"):
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **given)
    with pytest.raises(InvalidParamError, match=r"the buffer has been destroyed.*A2A-1226"):
        buffer.combine(x, handle)


# DeepEP's arguments: what each does here. "Done" ones have tests of their own; others are given with these values.
DONE, EVENTS = "done", {"previous_event": 1, "async_finish": True, "allocate_on_comm_stream": True}
KERNELS = {"num_sms": 24, "num_qps": 9, "previous_event": 1, "previous_event_before_epilogue": 1}
KERNELS |= {"async_with_compute_stream": True, "allocate_on_comm_stream": True}


def _done(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, DONE)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "Buffer": _done("group", "num_nvl_bytes", "num_rdma_bytes")
    | {"low_latency_mode": True, "num_qps_per_rank": 8, "allow_nvlink_for_low_latency_mode": False}
    | {"allow_mnnvl": True, "use_fabric": True, "explicitly_destroy": True, "enable_shrink": True},
    "Buffer.get_dispatch_layout": _done("topk_idx", "num_experts") | EVENTS,
    "Buffer.dispatch": _done("x", "handle", "num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")
    | _done("topk_idx", "topk_weights", "expert_alignment", "num_worst_tokens")
    | {"num_tokens_per_rdma_rank": torch.zeros(1), "config": deep_ep.Config(num_sms=24), **EVENTS},
    "Buffer.combine": _done("x", "handle", "topk_weights", "bias") | {"config": deep_ep.Config(24, 8, 256), **EVENTS},
    "Buffer.low_latency_dispatch": _done("x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts", "use_fp8")
    | _done("cumulative_local_expert_recv_stats", "round_scale", "use_ue8m0", "return_recv_hook")
    | {"async_finish": True},
    "Buffer.low_latency_combine": _done("x", "topk_idx", "topk_weights", "handle", "return_recv_hook", "out")
    | {"async_finish": True},
    "ElasticBuffer": _done("group", "num_bytes", "num_max_tokens_per_rank")
    | {"num_cpu_bytes": 1, "hidden": WIDTH, "num_topk": K, "use_fp8_dispatch": True, "deterministic": True}
    | _done("allow_multiple_reduction")
    | {"allow_hybrid_mode": False, "prefer_overlap_with_compute": False}
    | {"sl_idx": 0, "num_allocated_qps": 9, "num_cpu_timeout_secs": 1, "num_gpu_timeout_secs": 1}
    | {"explicitly_destroy": True},
    "ElasticBuffer.dispatch": _done("x", "topk_idx", "topk_weights", "cumulative_local_expert_recv_stats")
    | _done("num_experts", "num_max_tokens_per_rank", "expert_alignment", "handle", "do_cpu_sync", "do_handle_copy")
    | _done("do_expand", "do_zero_padding", "use_tma_aligned_col_major_sf")
    | KERNELS,
    "ElasticBuffer.combine": _done("x", "handle", "topk_weights", "bias") | KERNELS,
}
REFUSED: dict[str, dict[str, Any]] = {
    "Buffer": {"comm": 1},
    "Buffer.low_latency_dispatch": {"dispatch_wait_recv_cost_stats": 1},
    "Buffer.low_latency_combine": {"use_logfmt": True, "zero_copy": True, "combine_wait_recv_cost_stats": 1},
}


@on_ranks(2)
def test_every_argument_is_done_or_refused_or_ignored_on_purpose(comm: Communicator) -> None:
    x, ids, weights = problem(comm.rank)
    buffers = {"Buffer": deep_ep.Buffer(comm), "ElasticBuffer": deep_ep.ElasticBuffer(comm)}
    got, *_, handle, _ = buffers["ElasticBuffer"].dispatch(x, ids, weights, num_experts=EXPERTS)
    tokens = {"x": x, "topk_idx": ids, "topk_weights": weights}
    right: dict[str, dict[str, Any]] = {
        "Buffer": {"group": comm},
        "ElasticBuffer": {"group": comm},
        "Buffer.get_dispatch_layout": {"topk_idx": ids, "num_experts": EXPERTS},
        "Buffer.dispatch": tokens | {"num_tokens_per_expert": torch.zeros(EXPERTS)},
        "ElasticBuffer.dispatch": tokens | {"num_experts": EXPERTS},
        **{f"{name}.combine": {"x": got, "handle": handle} for name in buffers},
    }
    few = {
        "x": x,
        "topk_idx": ids,
        "num_max_dispatch_tokens_per_rank": TOKENS,
        "num_experts": EXPERTS,
        "use_fp8": False,
    }
    rows, _, way, *_ = buffers["Buffer"].low_latency_dispatch(**few)
    right["Buffer.low_latency_dispatch"] = few
    right["Buffer.low_latency_combine"] = {"x": rows, "topk_idx": ids, "topk_weights": weights, "handle": way}
    for name, table in ARGUMENTS.items():
        of, _, method = name.partition(".")
        call = getattr(buffers[of], method) if method else getattr(deep_ep, of)
        refused = REFUSED.get(name, {})
        assert set(inspect.signature(call).parameters) == set(table) | set(refused), name
        given = {argument: value for argument, value in table.items() if value is not DONE}
        for plain, more in zip(_tensors(call(**right[name])), _tensors(call(**right[name], **given)), strict=True):
            assert torch.equal(plain, more), name
        for argument, value in refused.items():
            with pytest.raises(InvalidParamError, match=argument):
                call(**right[name], **({argument: value} if comm.rank == 0 or not method else {}))
        with pytest.raises(TypeError, match="do_expnad"):
            call(**right[name], do_expnad=True)


def _tensors(made: Any) -> list[torch.Tensor]:
    return [each for each in made if isinstance(each, torch.Tensor)] if isinstance(made, tuple) else []


@on_ranks(2)
def test_arguments_of_the_elastic_buffer(comm: Communicator) -> None:
    (x, ids, weights), local = problem(comm.rank), EXPERTS // 2
    buffer, given = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=TOKENS), {"num_experts": EXPERTS}
    stats = torch.ones(local, dtype=torch.int32)
    *_, handle, _ = buffer.dispatch(x, ids, weights, stats, expert_alignment=4, **given)
    every = torch.cat([problem(rank)[1].reshape(-1) for rank in range(2)])
    mine = [int((every == comm.rank * local + expert).sum()) for expert in range(local)]
    assert stats.tolist() == [n + 1 for n in mine]
    assert handle.num_recv_tokens_per_expert_list == [-(-n // 4) * 4 for n in mine]
    again = {"x": x, "handle": handle, "num_experts": EXPERTS, "expert_alignment": 4, "do_cpu_sync": False}
    assert len(buffer.dispatch(**again)[0]) == handle.num_recv_tokens
    layout, first = deep_ep.Buffer(comm).get_dispatch_layout(ids, EXPERTS), {"x": x, "topk_idx": ids}
    wrong = first | {"num_tokens_per_expert": layout[2], "is_token_in_rank": ~layout[3]}
    for call, arguments, text in (
        (buffer.dispatch, again | {"topk_idx": ids}, "topk_idx is given with a handle"),
        (
            buffer.dispatch,
            again | {"topk_weights": weights[:, 1:]},
            r"topk_weights has shape \(6, 2\), expected \(6, 3\)",
        ),
        (
            buffer.dispatch,
            again | {"num_max_tokens_per_rank": 7},
            "num_max_tokens_per_rank is given with a handle of 6",
        ),
        (buffer.dispatch, again | {"do_expand": True}, "do_expand is given as True with a handle of False"),
        (buffer.dispatch, first | {"do_zero_padding": True} | given, "do_zero_padding is given without do_expand"),
        (buffer.dispatch, again | {"do_cpu_sync": True}, "do_cpu_sync is given with a handle"),
        (buffer.dispatch, again | {"expert_alignment": 2}, "expert_alignment is given with a handle of 4"),
        (buffer.dispatch, again | {"num_experts": 2}, "num_experts is given with a handle of 8"),
        (
            deep_ep.ElasticBuffer(comm).dispatch,
            first | {"do_cpu_sync": False} | given,
            "is 0, expected at least 1 with",
        ),
        (buffer.dispatch, first | {"num_max_tokens_per_rank": 5} | given, "is 5, expected at least 6"),
        (buffer.dispatch, first | {"num_experts": 2**31}, "num_experts is 2147483648, expected"),
        (buffer.dispatch, first | {"cumulative_local_expert_recv_stats": stats[1:]} | given, "recv_stats is"),
        (deep_ep.Buffer(comm).dispatch, wrong, "is_token_in_rank is not the layout"),
    ):
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text):
            call(**arguments)


def test_a_program_for_low_latency_buffers_begins() -> None:
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks=1, num_experts=EXPERTS)
    buffer = deep_ep.Buffer(None, 0, size, low_latency_mode=True, num_qps_per_rank=8, explicitly_destroy=True)
    assert (size, buffer.num_rdma_bytes) == (0, 0)
    ids = torch.rand(4, EXPERTS).topk(2)[1].to(deep_ep.topk_idx_t)
    assert ids.dtype == torch.int64
    assert int(buffer.get_dispatch_layout(ids, EXPERTS)[2].sum()) == 8


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_ep", "deep_ep.utils"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    deep_ep.install()
    deep_ep.install()
    assert sys.modules["deep_ep"] is deep_ep
    monkeypatch.setitem(sys.modules, "deep_ep", torch)
    with pytest.raises(ImportError, match="torch already"):
        deep_ep.install()


def test_migration_says_which_names_are_offered() -> None:
    section = (ROOT / "docs/migration.md").read_text("utf-8").partition("## From DeepEP to")[2]
    rows = re.findall(r"^\| (`.+`) \| (offered|differs|missing)\b", section, re.MULTILINE)
    answers = {name: answer for names, answer in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert len(answers) > 30
    for name, answer in answers.items():
        owner, _, member = name.rpartition(".")
        assert hasattr(getattr(deep_ep, owner) if owner else deep_ep, member) == (answer != "missing"), name
