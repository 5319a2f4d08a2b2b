"""The job of one rank: send tokens to their experts, process what arrives, send it back, compare.

Every rank begins with the digits of its own classes. A token goes to the expert whose centroid is nearest;
experts 0 to 7 belong to the ranks in blocks, so some pairs of ranks exchange much and some nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import AllToAllVOperation, AllToAllVParam, Communicator, trace
from alltoallv.errors import AllToAllVError
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v, barrier, broadcast, quantized_all_reduce
from alltoallv_tools.demo import arguments, digits, missing_packages
from alltoallv_tools.demo.digits import Floats, Ints
from alltoallv_tools.demo.report import Matrix, bandwidth_table, draw_traffic, traffic_table

WARM_UP = 10
GROUP = 128  # numbers that share a scale: the default of int8


@dataclass(frozen=True)
class Routing:
    """The tokens that this rank sends and receives.

    Attributes:
        order: The tokens of this rank, sorted by expert; shape [n].
        send_counts: Tokens for every rank; shape [W].
        recv_counts: Tokens from every rank; shape [W].
        arrived_experts: The expert of every token that arrives; shape [sum(recv_counts)].
    """

    order: Ints
    send_counts: Ints
    recv_counts: Ints
    arrived_experts: Ints


def plan_routing(comm: Communicator, expert_of_token: Ints) -> Routing:
    """Informs the owner of every expert how many tokens this rank has for it."""
    owned = [len(digits.experts_of(rank, comm.size)) for rank in range(comm.size)]
    per_expert = np.bincount(expert_of_token, minlength=digits.EXPERTS)
    # Row i: tokens that rank i has for each of this rank's experts. Without recv_counts the exchange finds them out.
    arriving = all_to_all_v(per_expert, owned, group=comm).reshape(comm.size, owned[comm.rank])
    own_experts = np.array(digits.experts_of(comm.rank, comm.size), np.int64)
    ends = np.cumsum(owned)
    return Routing(
        # A rank's experts are neighbours, so sorting by expert also sorts by rank.
        order=np.argsort(expert_of_token, kind="stable"),
        send_counts=np.array([part.sum() for part in np.split(per_expert, ends[:-1])], np.int64),
        recv_counts=arriving.sum(axis=1),
        arrived_experts=np.repeat(np.tile(own_experts, comm.size), arriving.ravel()),
    )


def send_to_experts(comm: Communicator, sorted_tokens: Floats, routing: Routing) -> Floats:
    """Sends whole tokens (unit="row") to their experts; the exchange itself finds out how many arrive."""
    return all_to_all_v(sorted_tokens, routing.send_counts, unit="row", group=comm)


def send_back(comm: Communicator, processed: Floats, routing: Routing) -> Floats:
    """Sends the processed tokens back: the dispatch with send and receive counts swapped."""
    return all_to_all_v(processed, routing.recv_counts, routing.send_counts, unit="row", group=comm)


def send_by_operation(comm: Communicator, sorted_tokens: Any, routing: Routing) -> Any:
    """Does what `send_to_experts` does by Huawei's operator, with the fields of ATB: counts are in elements.

    Takes arrays and tensors of any framework and device, and returns the same kind.
    """
    row = sorted_tokens.shape[1]
    sends, recvs = routing.send_counts * row, routing.recv_counts * row
    param = AllToAllVParam(
        rank=comm.rank,
        rank_size=comm.size,
        send_counts=sends.tolist(),
        sdispls=(np.cumsum(sends) - sends).tolist(),
        recv_counts=recvs.tolist(),
        rdispls=(np.cumsum(recvs) - recvs).tolist(),
    )
    return AllToAllVOperation(param, comm)(sorted_tokens).reshape(-1, row)


@dataclass(frozen=True)
class Start:
    """What a rank begins with.

    Attributes:
        tokens: The tokens of all ranks; shape [n, 64].
        classes: Their classes; shape [n].
        is_own: Which of them this rank begins with; shape [n].
        experts: The expert of each; shape [n].
    """

    tokens: Floats
    classes: Ints
    is_own: npt.NDArray[np.bool_]
    experts: Ints


def begin(comm: Communicator) -> Start:
    """Loads the tokens and finds the experts."""
    tokens, classes = digits.load_tokens()
    centroids = np.empty((digits.EXPERTS, tokens.shape[1]))
    if comm.rank == 0:
        centroids = digits.find_centroids(tokens)
    broadcast(centroids, root=0, group=comm)  # so that all ranks route identically, to the last bit
    is_own = np.isin(classes, digits.classes_of(comm.rank, comm.size))
    return Start(tokens, classes, is_own, digits.route(tokens, centroids))


def run(comm: Communicator, repetitions: int, folder: str | None = None) -> tuple[int, Matrix]:
    """Runs the job on this rank; returns its exit code, equal on all ranks, and who sent how many tokens to whom.

    Args:
        comm: The ranks.
        repetitions: How often each exchange is timed, after ``WARM_UP`` times that are not.
        folder: Where the traffic is recorded, without the start and what is timed.
    """
    start = begin(comm)
    tokens, my_tokens, my_experts = start.tokens, start.tokens[start.is_own], start.experts[start.is_own]
    expected = digits.apply_experts(tokens, start.experts)[start.is_own]  # all tokens in one process
    barrier(group=comm)
    with contextlib.nullcontext() if folder is None else trace(folder):
        routing = plan_routing(comm, my_experts)
        sorted_tokens = my_tokens[routing.order]
        arrived = send_to_experts(comm, sorted_tokens, routing)
        processed = digits.apply_experts(arrived, routing.arrived_experts)
        returned = send_back(comm, processed, routing)
        result = np.empty_like(my_tokens)
        result[routing.order] = returned
        differing = digits.differing_rows(result, expected)
        for row in differing[:3]:
            token = np.flatnonzero(start.is_own)[row]
            print(
                f"rank {comm.rank}: token {token} (a {start.classes[token]}, expert {start.experts[token]}) "
                f"came back with other bits; {len(differing)} of {len(result)} tokens of this rank did",
                file=sys.stderr,
            )
        (equal,) = _sums(comm, [len(result) - len(differing)])
        traffic = all_gather(routing.send_counts, group=comm)
        if comm.rank == 0:
            empty = int((traffic == 0).sum())
            print(f"tokens from rank i (row) to rank j (column), {empty} of {traffic.size} pairs empty:\n")
            print(traffic_table(traffic) + "\n", flush=True)
        wrong = len(tokens) - equal
        if not wrong:
            wrong = _check_operation(comm, sorted_tokens, arrived, routing, traffic)
            _add_in_codes(comm, expert_sums(my_tokens, my_experts))
    if equal == len(tokens):
        _measure(comm, sorted_tokens, processed, routing, tokens.nbytes, repetitions)
    if comm.rank == 0:
        end = "all" if equal == len(tokens) else f"only {equal} of"
        print(f"{end} {len(tokens)} tokens came back bit for bit", flush=True)
    return int(wrong > 0), traffic


def expert_sums(tokens: Floats, experts: Ints) -> Floats:
    """Returns the sum of each expert's tokens; shape [8, 64]."""
    sums = np.zeros((digits.EXPERTS, tokens.shape[1]), np.float32)
    np.add.at(sums, experts, tokens)
    return sums


def _check_operation(comm: Communicator, tokens: Floats, arrived: Floats, routing: Routing, traffic: Matrix) -> int:
    """Returns how many tokens arrive otherwise by the operation."""
    if not (traffic.any(axis=0) & traffic.any(axis=1)).all():  # ATB refuses empty tensors
        return 0
    (wrong,) = _sums(comm, [len(digits.differing_rows(send_by_operation(comm, tokens, routing), arrived))])
    if comm.rank == 0:
        print(f"AllToAllVOperation, with ATB's fields, delivers {wrong or 'no'} tokens with other bits")
    return wrong


def _add_in_codes(comm: Communicator, own: Floats) -> None:
    """Adds each expert's sums over the ranks by the fused pipeline, as int8, and by an all-reduce of float32."""
    exact = all_reduce(own.astype(np.float64), group=comm)
    error = np.linalg.norm(quantized_all_reduce(own, gather="quantized", group=comm) - exact) / np.linalg.norm(exact)
    if comm.rank == 0:
        saved = 1 - (1 + 4 / GROUP) / 4  # a byte for each number, and 4 for each group's scale
        summary = f"relative error {error:.2%}, {saved:.0%} fewer bytes than float32"
        print(f"int8 all-reduce of the experts' sums: {summary}\n")


def _measure(
    comm: Communicator,
    tokens: Floats,
    processed: Floats,
    routing: Routing,
    total_bytes: int,
    repetitions: int,
) -> None:
    before = comm.stats()
    send_to_experts(comm, tokens, routing)
    after = comm.stats()
    names = [name for name in after if name.startswith("bytes_")]
    moved = dict(zip(names, _sums(comm, [after[name] - before[name] for name in names]), strict=True))
    seconds = {
        "dispatch": _median_seconds(comm, lambda: send_to_experts(comm, tokens, routing), repetitions),
        "return": _median_seconds(comm, lambda: send_back(comm, processed, routing), repetitions),
    }
    if comm.rank == 0:
        paths = ", ".join(f"{name[6:]} {count:,}" for name, count in moved.items() if count)
        print(bandwidth_table(seconds, total_bytes, comm.size))
        print(
            f"\ntime: of the slowest rank, median of {repetitions} after {WARM_UP} to warm up;"
            "\n  the whole call, with agreement and allocation of the output"
            "\nalgbw: bytes of the tokens that a rank sends, on average over the ranks"
            f" ({total_bytes:,} / {comm.size}, with\n  those that stay), per time;"
            " busbw = algbw * (W - 1) / W; both as nccl-tests define them for all-to-all"
            f"\nbytes of one dispatch by data path: {paths}\n"
        )


def _median_seconds(comm: Communicator, call: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(WARM_UP + repetitions):
        barrier(group=comm)
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    slowest = all_reduce(np.array(times[WARM_UP:]), "max", group=comm)
    return float(np.median(slowest))


def _sums(comm: Communicator, values: list[int]) -> list[int]:
    sums: list[int] = all_reduce(np.array(values, np.int64), group=comm).tolist()
    return sums


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rank that the launcher's environment describes; returns its exit code."""
    parser = argparse.ArgumentParser(description="One rank of the demo; start it under a launcher.")
    arguments.add_arguments(parser)
    parser.add_argument("--trace", metavar="DIR", help="record the traffic of the job in this folder")
    args = parser.parse_args(argv)
    if missing := missing_packages():
        print(missing, file=sys.stderr)
        return 1
    picture = Path(args.output_dir) / "traffic.png"
    try:
        with Communicator.from_env(timeout=120.0) as comm:
            if comm.rank == 0:  # before anything is sent, so that no result is lost
                picture.parent.mkdir(parents=True, exist_ok=True)
                picture.open("ab").close()
            code, traffic = run(comm, args.repetitions, args.trace)
            is_first = comm.rank == 0
        if is_first and code == 0:  # now that nobody waits for it
            draw_traffic(traffic, picture)
            print(f"the traffic as a picture: {picture}", flush=True)
        return code
    except AllToAllVError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except OSError as error:
        print(
            f"--output-dir is {args.output_dir!r}, where {picture.name} cannot be written: {error}",
            file=sys.stderr,
        )
    return 1
