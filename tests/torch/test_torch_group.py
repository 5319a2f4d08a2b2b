"""Groups over gloo, as they are on several hosts: results, gradients, asynchronous calls, checks before data move."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_groups import joined
from engine_groups import DTYPES, caught, engine, logged, to_numpy, to_torch
from replicated import check_gradients

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, PeerMismatchError
from alltoallv.testing import Ranks, golden, reference
from alltoallv.torch.engines import membership as torch_membership
from alltoallv.torch.engines.group import TorchGroupCommunicator
from alltoallv.torch.engines.membership import LARGE
from alltoallv.torch.engines.reduction import reduces

SEED = 20240611


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def random_cases(size: int, count: int) -> list[golden.Case]:
    """Every dtype in turn; the same on every rank."""
    rng = np.random.default_rng([SEED, size])
    return [
        golden.random_case(
            rng,
            size,
            DTYPES[(i + size) % len(DTYPES)],
            zeros=float(rng.choice([0.0, 0.3, 0.7, 1.0])),
            gaps=bool(rng.integers(2)),
            permuted=bool(rng.integers(2)),
            overlapping_sends=bool(rng.integers(2)),
            max_count=int(rng.choice([1, 7, 60, 3000])),
        )
        for i in range(count)
    ]


def run_case(comm: Any, case: golden.Case, number: int) -> None:
    """One exchange; ``number`` decides how it is asked for, alike on all ranks or not."""
    r = comm.rank
    x = to_torch(case.inputs[r])
    arguments: dict[str, Any] = {"sdispls": case.sdispls[r], "group": comm}
    expected = case.expected[r]
    if number % 4 == 2:  # the operator allocates: gaps are zero
        arguments |= {"recv_counts": case.recv_counts[r], "rdispls": case.rdispls[r]}
        expected = reference.all_to_all_v(case.inputs, case.send_counts, case.sdispls, case.recv_counts, case.rdispls)[
            r
        ]
        ends = [case.rdispls[r][j] + n for j, n in enumerate(case.recv_counts[r]) if n]
        expected = expected[: max(ends, default=0)]
    elif number % 4 == 3 and (number // 4 + r) % 3:  # some or all ranks learn
        expected = reference.all_to_all_v(case.inputs, case.send_counts, case.sdispls)[r]
    else:
        arguments |= {"recv_counts": case.recv_counts[r], "rdispls": case.rdispls[r]}
        arguments["out"] = to_torch(case.outputs[r])
    if number % 5 == 4:
        out, work = at.all_to_all_v(x, case.send_counts[r], **arguments, async_op=True)
        assert work.wait()
        out = work.result() if out is None else out
    else:
        out = at.all_to_all_v(x, case.send_counts[r], **arguments)
    golden.assert_bits_equal(to_numpy(out), expected, f"exchange {number} on rank {r}: {case!r}")
    golden.assert_bits_equal(to_numpy(x), case.inputs[r], f"input of exchange {number}")


@pytest.mark.parametrize(
    ("size", "count", "large"),
    [
        (1, 30, LARGE),
        (3, 50, LARGE),
        (2, 60, 40),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, 60, LARGE), (4, 60, LARGE), (4, 60, 40))),
    ],
)
def test_random_exchanges(ranks: Ranks, file: str, size: int, count: int, large: int) -> None:
    """With the messages that gloo moves by themselves, and some of each kind in one exchange."""

    def run(rank: int, size: int, cases: list[golden.Case]) -> dict[str, int]:
        with mock.patch.object(torch_membership, "LARGE", large), engine(rank, size, file) as comm:
            for number, case in enumerate(cases):
                run_case(comm, case, number)
            return comm.stats()

    cases = random_cases(size, count)
    stats = ranks(size, communicator=False)(run, cases)
    own = sum(int(np.trace(case.send_counts)) * case.dtype.itemsize for case in cases)
    moved = sum(int(case.send_counts.sum()) * case.dtype.itemsize for case in cases)
    assert sum(one["bytes_self"] for one in stats) == own
    assert sum(one["bytes_gloo"] for one in stats) == moved - own
    assert [one["operators"] for one in stats] == [count] * size


def test_every_function(ranks: Ranks, file: str) -> None:
    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:
            rows = [torch.arange(6.0).view(3, 2) + 10 * r for r in range(size)]
            splits = [[(r + j) % 3 % 2 + (j == 0) for j in range(size)] for r in range(size)]
            splits = [[3 - sum(row[1:]), *row[1:]] for row in splits]
            expected = reference.all_to_all_single([x.numpy() for x in rows], splits)[rank]
            receives = [splits[j][rank] for j in range(size)]
            output = torch.empty(sum(receives), 2)
            assert at.all_to_all_single(output, rows[rank], receives, splits[rank], group=comm) is None
            assert output.tolist() == expected.tolist()

            inputs = [torch.full((rank + j,), 10.0 * rank + j) for j in range(size)]
            outputs = [torch.empty(j + rank) for j in range(size)]
            work = at.all_to_all(outputs, inputs, group=comm, async_op=True)
            assert work is not None
            work.wait()
            assert [out.tolist() for out in outputs] == [[10.0 * j + rank] * (j + rank) for j in range(size)]

            gathered = torch.empty(size * 3, 2, dtype=torch.float8_e4m3fn)
            at.all_gather_into_tensor(gathered, rows[rank].to(torch.float8_e4m3fn), group=comm)
            assert torch.equal(gathered.float(), torch.cat(rows).to(torch.float8_e4m3fn).float())

            counts = [[(3 * r + j) % 4 for j in range(size)] for r in range(size)]
            assert at.exchange_counts(counts[rank], group=comm).tolist() == [row[rank] for row in counts]

            experts = 2
            local = [[(r + i) % 3 for i in range(size * experts)] for r in range(size)]
            global_ = [[local[j][e + r * experts] for j in range(size) for e in range(experts)] for r in range(size)]
            xs = [torch.arange(2.0 * sum(c)).view(-1, 2) + 100 * r for r, c in enumerate(local)]
            x = xs[rank].clone().requires_grad_()
            scattered = at.global_scatter(x, local[rank], global_[rank], group=comm)
            assert torch.equal(
                scattered.detach(),
                torch.from_numpy(reference.global_scatter([x.numpy() for x in xs], local, global_)[rank]),
            )
            back = at.global_gather(scattered, local[rank], global_[rank], group=comm)
            assert torch.equal(back.detach(), xs[rank])
            (back * (rank + 1)).sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, rank + 1))

            tensor = torch.arange(5, dtype=torch.int16) * (rank + 1)
            comm.broadcast("int16", tensor, size - 1).run()
            assert tensor.tolist() == [size * i for i in range(5)]
            comm.barrier().run()

    ranks(3, communicator=False)(run)


@pytest.mark.parametrize("length", [37, 9001])  # in one step, and in two
def test_reductions_are_those_of_shared_memory(ranks: Ranks, file: str, length: int) -> None:
    """The same bits as the reference, which adds in the order of ranks: every dtype and operation."""

    def run(rank: int, size: int) -> int:
        done = 0
        rng = np.random.default_rng(length)
        with engine(rank, size, file) as comm, np.errstate(all="ignore"):
            for name in DTYPES:
                inputs = [golden.fill(rng, length, name) for _ in range(size)]
                for op in ("sum", "avg", "min", "max", "prod"):
                    if not reduces(op, getattr(torch, name)):
                        continue
                    x = to_torch(inputs[rank])
                    out = torch.empty_like(x)
                    counts = [length // size + (j < length % size) for j in range(size)]
                    comm.reduce("all_reduce", name, out, x, op, counts).run()
                    golden.assert_bits_equal(
                        to_numpy(out), reference.all_reduce(inputs, op)[rank], f"all_reduce {op} of {name}"
                    )
                    counts = [length - 5 * (size - 1), *[5] * (size - 1)][::-1]
                    out = torch.empty(counts[rank], dtype=x.dtype)
                    comm.reduce("reduce_scatter", name, out, x, op, counts).run()
                    expected = reference.reduce_scatter(inputs, op, counts)[rank]
                    golden.assert_bits_equal(to_numpy(out), expected, f"reduce_scatter {op} of {name}")
                    done += 1
            error = caught(lambda: comm.reduce("all_reduce", "int32", out, out.int(), "avg", counts))
            assert isinstance(error, InvalidParamError)
            assert "op 'avg' is not defined for dtype int32" in str(error)
        return done

    assert ranks(3, communicator=False)(run) == [13 * 4 + 4] * 3


def test_gradients(ranks: Ranks, file: str) -> None:
    """First and second derivatives with gaps, permutations and overlapping send regions; learnt counts."""

    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:
            sends = [[1, 2], [0, 1]][rank]
            recvs = [[1, 0], [2, 1]][rank]
            check_gradients(
                comm,
                [4, 2],
                (),
                lambda x: at.all_to_all_v(x, sends, recvs, sdispls=[0, 0], rdispls=[[1, 0], [0, 3]][rank], group=comm),
            )
            check_gradients(comm, [3, 1], (2,), lambda x: at.all_to_all_v(x, sends, unit="row", group=comm))
            x = torch.ones(3, requires_grad=True)
            out, work = at.all_to_all_v(x, [1, 2], [1 + rank] * 2, group=comm, async_op=True)
            work.wait()
            (out * 3).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [3, 3, 3]

    ranks(2, communicator=False)(run)


def test_compiled(ranks: Ranks, file: str) -> None:
    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:

            @torch.compile(fullgraph=True, backend="aot_eager")
            def step(x: torch.Tensor, sends: torch.Tensor) -> torch.Tensor:
                return at.all_to_all_v(x * 2, sends, unit="row", group=comm) + 1

            for n in (1, 2, 3):
                x = torch.full((size * n, 2), float(rank), requires_grad=True)
                out = step(x, torch.tensor([n] * size))
                assert out[:, 0].tolist() == [2.0 * j + 1 for j in range(size) for _ in range(n)]
                out.sum().backward()
                assert torch.equal(x.grad, torch.full_like(x, 2))

    ranks(2, communicator=False)(run)


def test_asynchronous_calls(ranks: Ranks, file: str) -> None:
    """They return before the peers arrive, several are in flight, sync calls queue behind, groups are independent."""

    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:
            other = at.from_group(dist.new_group(list(range(size))), backend="gloo", timeout=30)
            x = torch.arange(size * 1000.0) + rank
            if rank == 1:
                time.sleep(1.0)
            begin = time.monotonic()
            works = [at.all_to_all_v(x + i, [1000] * size, [1000] * size, group=comm, async_op=True) for i in range(8)]
            late = time.monotonic() - begin
            assert rank == 1 or late < 0.5
            assert rank == 1 or not works[0][1].is_completed()
            with pytest.raises(TimeoutError, match="still under way"):
                at.all_to_all_v(x, [1] * size, async_op=True, group=comm)[1].wait(0.001)
            sync = at.all_to_all_v(x, [1000] * size, [1000] * size, group=comm)  # behind the nine
            assert all(work.is_completed() for _, work in works)
            for i, (out, work) in enumerate(works):
                assert work.is_success()
                assert torch.equal(work.result(), out)
                assert torch.equal(out, sync + i)
                assert torch.equal(work.get_future().wait(), out)

            # In opposite order on two ranks.
            two = [comm, other] if rank % 2 else [other, comm]
            pending = [(c, at.all_to_all_v(x, [5] * size, [5] * size, group=c, async_op=True)) for c in two]
            for _, (_, work) in pending:
                work.wait()
            other.destroy()

    ranks(2, communicator=False)(run)


def provoke(comm: Any) -> list[tuple[str, str, int]]:
    """What the ranks disagree about, one after the other; class, text and code of what this rank raises."""
    r, w = comm.rank, comm.size
    x = torch.arange(4.0 * w).view(2 * w, 2)
    out = torch.full((2 * w, 2), -1.0)
    two, many = [2] * w, [99] * w

    def exchange(x: torch.Tensor = x, sends: list[int] = two, out: torch.Tensor = out, **more: Any) -> object:
        return at.all_to_all_v(x, sends, two, unit="row", out=out, group=comm, **more)

    attempts = [
        lambda: exchange(sends=[1, *[2] * (w - 1)] if r == 1 else two),  # counts
        lambda: exchange(x.int(), out=out.int()) if r == 1 else exchange(),  # dtype
        lambda: at.exchange_counts(two, group=comm) if r == 1 else exchange(),  # operator
        lambda: exchange(x.view(-1)[: 2 * w].view(-1, 1), out=torch.zeros(2 * w, 1)) if r == 1 else exchange(),  # rows
        lambda: exchange(sends=many) if r == 1 else exchange(),  # what rank 1 finds wrong itself
        lambda: at.all_to_all_v(x, many, group=comm) if r == 1 else at.all_to_all_v(x, two, group=comm),
        lambda: exchange("not a tensor") if r == w - 1 else exchange(),  # type: ignore[arg-type]
        lambda: exchange(sends=[0, *[2] * (w - 1)] if r == 1 else two, async_op=True)[1].wait(),  # type: ignore[index]
        lambda: at.all_to_all_v(x, [1, 3, *two[2:]], unit="row", group=comm) if r == 1 else exchange(),  # learns
        lambda: at.functional.all_reduce(x if r else x[1:], group=comm),
        lambda: at.functional.all_reduce(x if r == 0 else x.double(), group=comm),
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            errors.append((type(error).__name__, str(error), getattr(error, "code", 0)))
        else:
            errors.append(("", "", 0))
        assert (out == -1).all(), "something was written"
    assert torch.equal(exchange(), torch.cat([x[2 * r : 2 * r + 2]] * w))  # the communicator stays usable
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_breaches_are_those_of_shared_memory(ranks: Ranks, file: str, size: int) -> None:
    """The same class, text and code on every rank, nothing written, and the next call works."""

    def over_gloo(rank: int, size: int) -> list[tuple[str, str, int]]:
        with engine(rank, size, file) as comm:
            found = provoke(comm)
            assert comm.stats()["failed_operators"] >= len(found)
            return [(name, text.replace(comm.domain, "D"), code) for name, text, code in found]

    def over_memory(comm: Communicator) -> list[tuple[str, str, int]]:
        torch.set_num_threads(1)
        return [(name, text.replace(comm.domain, "D"), code) for name, text, code in provoke(comm)]

    found = ranks(size, communicator=False)(over_gloo)
    expected = ranks(size)(over_memory)
    assert found == expected
    names = [[name for name, _, _ in one] for one in found]
    assert all(all(one) for one in names), names  # every rank raises
    assert len({one[0] for one in found}) == 1
    assert found[0][0][1].endswith("rank 1 sends 1 rows to rank 0, which expects 2")


def test_world_of_one(ranks: Ranks, file: str) -> None:
    """Displacements count, and so do the checks."""

    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:
            out = torch.zeros(6)
            at.all_to_all_v(torch.arange(5.0), [2], [2], sdispls=[3], rdispls=[1], out=out, group=comm)
            assert out.tolist() == [0, 3, 4, 0, 0, 0]
            assert at.all_to_all_v(torch.arange(5.0), [2], sdispls=[1], group=comm).tolist() == [1, 2]
            with pytest.raises(PeerMismatchError, match="rank 0 sends 2 elements to rank 0, which expects 3"):
                at.all_to_all_v(torch.arange(5.0), [2], [3], group=comm)
            with pytest.raises(InvalidParamError, match="sdispls"):
                at.all_to_all_v(torch.arange(5.0), [2], [2], sdispls=[4], group=comm)
            assert at.functional.all_reduce(torch.ones(2), group=comm).tolist() == [1, 1]
            outputs = [torch.zeros(2)]
            at.all_to_all(outputs, [torch.ones(2)], group=comm)
            assert outputs[0].tolist() == [1, 1]

    ranks(1, communicator=False)(run)


def test_who_carries_a_group(ranks: Ranks, file: str, tmp_path: Path) -> None:
    """By argument and environment; one communicator per kind of device; what ranks want must agree."""

    def run(rank: int, size: int) -> None:
        with joined(rank, size, file, backend="gloo") as group, logged(logging.INFO) as lines:
            auto = at.from_group(group)
            assert auto.backend == "shm"
            assert at.from_group(group) is auto
            gloo = at.from_group(group, backend="gloo", timeout=20)
            assert isinstance(gloo, TorchGroupCommunicator)
            assert at.from_group(group, backend="gloo") is gloo
            assert lines == [f"group {group.group_name!r}: cpu tensors of 2 ranks on 1 host go through gloo"]
            assert at.all_to_all_v(torch.ones(2), [1, 1], group=gloo).tolist() == [1, 1]
            assert at.all_to_all_v(torch.ones(2), [1, 1]).tolist() == [1, 1]
            assert (auto.stats()["operators"], gloo.stats()["operators"]) == (1, 1)

            with pytest.raises(InvalidParamError, match="backend is 'smoke', expected one of"):
                at.from_group(group, backend="smoke")
            with pytest.raises(BackendUnavailableError, match="has 'gloo' for cpu tensors, expected 'nccl'"):
                at.from_group(group, backend="nccl")
            with pytest.raises(PeerMismatchError, match="rank 0 has cpu tensors over backend 'mpi', rank 1 has cpu"):
                at.from_group(group, backend="mpi" if rank == 0 else "nccl")
            with pytest.raises(InvalidParamError, match="check is 'sometimes'"):
                at.from_group(group, backend="gloo", check="sometimes", device="meta")

            gloo.destroy()
            assert not gloo.usable
            with pytest.raises(InvalidParamError, match="has been destroyed"):
                at.all_to_all_v(torch.ones(2), [1, 1], group=gloo)
            again = at.from_group(group, backend="gloo", timeout=20)  # in place of the old one
            assert again is not gloo
            assert at.all_to_all_v(torch.ones(2), [1, 1], group=again).tolist() == [1, 1]

            part = dist.new_group([1])
            if rank == 0:
                with pytest.warns(UserWarning, match="not a member"):
                    assert at.all_to_all_v(torch.ones(1), [1], group=part) is None
            else:
                assert at.all_to_all_v(torch.ones(1), [1], group=at.from_group(part, backend="gloo")).tolist() == [1]

    def forced(rank: int, size: int, file: str) -> str:
        with joined(rank, size, file, backend="gloo"):
            assert at.all_to_all_v(torch.ones(2), [1, 1]).tolist() == [1, 1]
            return at.from_group(dist.group.WORLD).backend

    ranks(2, communicator=False)(run)
    env = {"ALLTOALLV_TORCH_BACKEND": "gloo"}
    assert ranks(2, communicator=False, env=env)(forced, str(tmp_path / "forced")) == ["gloo"] * 2


def test_without_checks(ranks: Ranks, file: str) -> None:
    """``check="off"`` saves the step; a rank that fails by itself then ends the communicator for all."""

    def run(rank: int, size: int) -> None:
        with engine(rank, size, file, check="off") as comm:
            x = torch.arange(4.0) + 10 * rank
            assert at.all_to_all_v(x, [2, 2], [2, 2], group=comm).tolist() == [
                2.0 * rank,
                2 * rank + 1,
                10 + 2 * rank,
                11 + 2 * rank,
            ]
            assert at.all_to_all_v(x, [1, 3], group=comm).numel() == 2 + 4 * rank
            error = caught(lambda: at.all_to_all_v(x, [2, 9 if rank else 2], [2, 2], group=comm))
            assert "sdispls[1] + send_counts[1] is 2 + 9" in str(error)
            end = time.monotonic() + 10
            while comm.usable and time.monotonic() < end:  # rank 1 tells the others behind its call
                time.sleep(0.01)
            assert not comm.usable

    ranks(2, communicator=False)(run)
