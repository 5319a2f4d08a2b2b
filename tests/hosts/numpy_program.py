"""Every collective of alltoallv.numpy on ranks of this job; a line each, its name and a digest, in a file of the rank.

Arguments: ``env`` or ``mpi``, how the ranks find each other, and a folder.

The same numbers on one host and on several are what test_hosts.py compares.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv._core import code_formats
from alltoallv.errors import PeerMismatchError, ValueOverflowError

LENGTHS = (0, 7, 1000, 40_000, 400_000)  # elements: with the row, by the mover


def results(comm: Communicator, n: int, dtype: str) -> Iterator[tuple[str, Any]]:
    """The outputs of every collective for inputs of about ``n`` elements."""
    rank, size = comm.rank, comm.size
    rng = np.random.default_rng(rank + n)
    x = (rng.standard_normal(n) * 8).astype(dtype)
    sends = [(n + j + rank) // (j + 2) // size for j in range(size)]
    recvs = [(n + rank + j) // (rank + 2) // size for j in range(size)]
    sent, places = x[: sum(sends)], [(n // size) * j for j in range(size)]
    yield "all_to_all_v", an.all_to_all_v(sent, sends, recvs, group=comm)
    yield "all_to_all_v learnt", an.all_to_all_v(sent, sends, group=comm)
    out = np.full(n + sum(recvs) + size, 3, dtype)
    ends = np.cumsum([0, *(count + 1 for count in recvs[:-1])])
    yield "all_to_all_v displaced", an.all_to_all_v(x, sends, recvs, sdispls=places, rdispls=ends, out=out, group=comm)
    yield "async", an.all_to_all_v(sent, sends, recvs, group=comm, async_op=True)[1].result()
    yield "exchange_counts", an.exchange_counts(sends, group=comm)
    rows = x[: n // size * size]
    single = np.zeros_like(rows)
    an.all_to_all_single(single, rows, group=comm)
    yield "all_to_all_single", single
    planes = x[: n // (3 * size) * 3 * size].reshape(3, -1, size)
    yield "all_to_all_nd", an.all_to_all_nd(planes, 2, 0, comm)
    yield (
        "all_to_all_nd uneven",
        an.all_to_all_nd(
            planes[:, : 2 + rank], 0, 1, comm, gather_sizes=[min(2 + j, planes.shape[1]) for j in range(size)]
        ),
    )
    parts = np.array_split(x, size)
    outs = [np.zeros(len(np.array_split(np.empty(n), size)[rank]), dtype) for _ in range(size)]
    an.all_to_all(outs, parts, group=comm)
    yield "all_to_all", np.concatenate(outs)
    whole = np.zeros((size, n), dtype)
    an.all_gather_into_tensor(whole, x, group=comm)
    yield "all_gather_into_tensor", whole
    yield "all_gather", an.all_gather(x, group=comm)
    yield "all_gather_v", an.all_gather_v(x[: n // (rank + 1)], group=comm)
    told = x.copy()
    an.broadcast(told, size - 1, group=comm)
    yield "broadcast", told
    for op in ("sum", "max") if dtype != "complex64" else ("sum",):
        yield f"all_reduce {op}", an.all_reduce(x, op, group=comm)
        yield f"all_reduce leaves {op}", an.all_reduce(np.stack([x, x[::-1], x]), op, leaves=3 * size, group=comm)
    in_place = x.copy()
    an.all_reduce(in_place, out=in_place, group=comm)
    yield "all_reduce in place", in_place
    yield "reduce_scatter", an.reduce_scatter(rows, group=comm)
    if (reduced := an.reduce(x, 1, group=comm)) is not None:
        yield "reduce", reduced
    if (gathered := an.gather(x, 1, group=comm)) is not None:
        yield "gather", gathered
    taken = np.zeros(n // size, dtype)
    an.scatter(taken, rows if rank == 2 else None, 2, group=comm)
    yield "scatter", taken
    yield "scan", an.scan(x, "sum", group=comm)
    an.barrier(group=comm)
    if dtype == "float32":
        yield "quantized_all_reduce", an.quantized_all_reduce(x, group=comm)
        vectors = np.stack([x, x[::-1], x])
        yield "quantized_all_reduce leaves", an.quantized_all_reduce(vectors, leaves=3 * size, bits=4, group=comm)
        yield "quantized_all_reduce 4 bits", an.quantized_all_reduce(x, bits=4, gather="quantized", group=comm)
        for name in [*code_formats][:: 1 if n < 400_000 else 6]:  # the longest take most of the time
            how: Any = {"format": name, "gather": "quantized", "op": "avg", "group": comm}
            yield f"quantized_all_reduce {name}", an.quantized_all_reduce(x, **how)
            yield f"quantized_reduce_scatter {name}", an.quantized_reduce_scatter(rows, format=name, group=comm)
            sends = [n // size] * size
            yield f"quantized_all_to_all {name}", an.quantized_all_to_all(rows, sends, format=name, group=comm)
        long = np.resize(x, 40_000)  # in one group, which shared memory cuts
        tensor: Any = {"format": "fp8_e4m3", "group_size": "tensor", "gather": "quantized", "group": comm}
        yield "quantized_all_reduce of a tensor", an.quantized_all_reduce(long, **tensor)
        feedback = an.ErrorFeedback()
        for _ in range(2):
            kept = an.quantized_all_reduce(x, error_feedback=feedback, group=comm)
        yield "error feedback", kept
        yield "quantized_reduce_scatter", an.quantized_reduce_scatter(rows, group=comm)
        codes = np.clip(x, -128, 127).astype(np.int8)
        yield "shared scale", an.quantized_all_reduce(codes, scale=0.5, group=comm)
    yield from messages(comm, x)
    yield (
        "all_gather_object",
        np.frombuffer(repr(an.all_gather_object({"rank": rank, "n": n}, group=comm)).encode(), "u1"),
    )


def in_pieces(comm: Communicator) -> Iterator[tuple[str, Any]]:
    """Quantized sums whose parts travel in several pieces, in one shot and in two."""
    n = comm.size * 3 * 2**18 + 13
    rng = np.random.default_rng(comm.rank)
    x = rng.standard_normal(n).astype(np.float32)
    feedback = an.ErrorFeedback()
    for how in (
        {"out_dtype": "float32"},
        {"out_dtype": "float16", "group_size": 33},
        {"gather": "quantized", "error_feedback": feedback},
        {"gather": "quantized", "error_feedback": feedback, "op": "avg"},
        {"format": "nvfp4", "gather": "quantized"},
        {"format": "mxfp8", "group_size": None},
        {"bits": 4, "group_size": n},
        {"bits": 5, "group_size": n},
        {"format": "int3_rotated_spikes", "gather": "quantized", "error_feedback": feedback},
    ):
        yield (
            str({name: value for name, value in how.items() if name != "error_feedback"}),
            an.quantized_all_reduce(x, group=comm, **how),
        )
    vectors = np.stack([x, x[::-1]])
    for how in ({"gather": "quantized"}, {"bits": 4, "group_size": n}):
        yield f"leaves {how}", an.quantized_all_reduce(vectors, leaves=2 * comm.size, group=comm, **how)
    yield "feedback", feedback.state_dict()["error"]
    codes = rng.integers(-128, 128, n).astype(np.int8)
    yield "shared scale", an.quantized_all_reduce(codes, scale=0.5, group=comm)
    counts = [n - 7 * (comm.size - 1), *[7] * (comm.size - 1)]
    yield "scattered", an.quantized_reduce_scatter(x, counts, bits=4, group=comm)
    x[-1] = 1e6
    try:
        an.quantized_all_reduce(x, out_dtype="float16", overflow="raise", group=comm)
    except ValueOverflowError:
        yield "overflow", np.ones(1)  # the message has the piece, which is another on one host


def experts(comm: Communicator) -> Iterator[tuple[str, Any]]:
    """Tokens that follow their headers from host to host, from some ranks in pieces, from others not."""
    rng = np.random.default_rng(comm.rank)
    n = (700, 3, 0, 400)[comm.rank % 4]
    tokens, ids = rng.standard_normal((n, 1024)).astype(np.float32), rng.integers(0, 12, (n, 3))
    for options in ({}, {"payload": "int8", "alignment": 8, "capacity": 99}, {"payload": "int8", "codes": True}):
        dispatcher = an.MoEDispatcher(12, comm, **options)
        rows, _, state = dispatcher.dispatch(tokens, ids, rng.random((n, 3)))
        yield f"dispatch {options}", rows
        yield f"weights {options}", state.weights
        if state.scales is not None:
            yield f"scales {options}", state.scales
        again, _, _ = dispatcher.dispatch(-tokens, state)
        yield f"dispatch {options} again", again
        yield f"combine {options}", dispatcher.combine(again, state)


def messages(comm: Communicator, x: Any) -> Iterator[tuple[str, Any]]:
    """Around the ranks, in both directions at once, and from any rank."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got, back = np.zeros_like(x), np.zeros_like(x)
    works = [an.isend(x, after, tag=1, group=comm), an.irecv(got, before, tag=1, group=comm)]
    works += [an.irecv(back, after, tag=2, group=comm), an.isend(x, before, tag=2, group=comm)]
    for work in works:
        work.wait()
    yield "messages", np.concatenate([got, back])
    if comm.rank == 0:
        came = {}
        for _ in range(1, comm.size):
            one = np.zeros_like(x)
            came[an.recv(one, None, tag=3, group=comm)] = one
        yield "from any rank", np.concatenate([came[j] for j in sorted(came)])
    else:
        an.send(x, 0, tag=3, group=comm)


def made(how: str) -> Communicator:
    if how == "env":
        return Communicator.from_env(timeout=60)
    from mpi4py import MPI

    return Communicator.from_mpi(MPI.COMM_WORLD, timeout=60)


def main() -> None:
    comm, lines = made(sys.argv[1]), []
    for n in LENGTHS:
        for dtype in ("float32", "int16", "complex64"):
            if dtype == "complex64" and n > 1000:
                continue
            for name, value in results(comm, n, dtype):
                digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
                lines.append(f"{n} {dtype} {name}: {digest}")
    for name, value in (*in_pieces(comm), *experts(comm)):
        lines.append(f"pieces {name}: {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]}")
    for wrong in (0, 1):
        try:
            sends = [1 + (comm.rank == wrong)] * comm.size
            an.all_to_all_v(np.zeros(sum(sends), np.float32), sends, [1] * comm.size, group=comm)
        except PeerMismatchError as error:
            lines.append(f"mismatch: {str(error).partition(': ')[2]}")
    try:
        if comm.rank == 0:
            an.send(np.zeros(6), comm.size - 1, group=comm)
        elif comm.rank == comm.size - 1:
            an.recv(np.zeros(4), 0, group=comm)
    except PeerMismatchError as error:
        lines.append(f"mismatch: {str(error).partition(': ')[2]}")
    an.barrier(group=comm)
    for color in (comm.rank % 2, comm.rank // 2):  # across the hosts, and within them
        part = comm.split(color, -comm.rank)
        assert part is not None
        lines.append(f"split: {part.rank} {an.all_gather(np.array([comm.rank]), group=part).tolist()}")
        lines.append(f"its sum: {an.all_reduce(np.full(100_000, comm.rank), group=part).sum()}")
        part.destroy()
    Path(sys.argv[2], f"rank{comm.rank}.txt").write_text("\n".join(lines))
    comm.destroy()


if __name__ == "__main__":
    main()
