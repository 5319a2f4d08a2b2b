"""deep_ep's interface on CPU: what arrives where, the way back, and both versions alike."""

from __future__ import annotations

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
    others: tuple[dict[str, Any], ...] = (
        {"topk_idx": ids[:, :2], "topk_weights": weights[:, :2]},
        {"num_experts": 2 * EXPERTS},
        {"topk_weights": weights.half()},
    )
    given = {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS}
    got, _, got_weights, handle, _ = buffer.dispatch(**given)
    for told in (None, got_weights.half()):
        with pytest.raises(PeerMismatchError, match=r"rank 0 and rank 1 move .* but differ in their weights"):
            buffer.combine(got, handle, topk_weights=told if comm.rank else got_weights)
    for other in others:
        with pytest.raises(PeerMismatchError, match=r"rank 0 and rank 1 move .* but differ in their weights"):
            buffer.dispatch(**given | (other if comm.rank else {}))
    other_x, other_got = (x.half(), got.half()) if comm.rank else (x, got)
    for call in (
        lambda: buffer.dispatch(**given | {"x": other_x}),
        lambda: buffer.dispatch(other_x, handle=handle),
        lambda: buffer.combine(other_got, handle),
    ):
        with pytest.raises(PeerMismatchError, match=r"rank 0 moves .* of bfloat16, rank 1 moves .* of float16"):
            call()
    scales = torch.ones(TOKENS, 1, dtype=torch.float16 if comm.rank else torch.bfloat16)
    with pytest.raises(PeerMismatchError, match="rank 0 and rank 1 move"):
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
    with pytest.raises(InvalidParamError, match="the buffer has been destroyed"):
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **given)
    with pytest.raises(InvalidParamError, match="the buffer has been destroyed"):
        buffer.combine(x, handle)


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
    rows = re.findall(r"^\| (`.+`) \| (offered|differs|refused|missing)\b", section, re.MULTILINE)
    answers = {name: answer for names, answer in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert len(answers) > 30
    for name, answer in answers.items():
        owner, _, member = name.rpartition(".")
        assert hasattr(getattr(deep_ep, owner) if owner else deep_ep, member) == (answer != "missing"), name
        if answer == "refused":
            with pytest.raises(NotImplementedError, match="low-latency calls are not in"):
                getattr(deep_ep.Buffer, member)(None)
