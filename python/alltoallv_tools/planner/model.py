"""Predicts times of algorithms on a topology, in microseconds; docs/plan.md derives every formula.

Bytes are floats; GB/s times 1000 is bytes per microsecond.
"""

from __future__ import annotations

from alltoallv_tools.planner.patterns import Load, load
from alltoallv_tools.planner.topology import Level, Topology

EXCHANGES = ("flat", "pairwise", "hierarchical")
REDUCTIONS = ("flat", "two-level")


def all_to_all_v(
    topology: Topology, size: int, nbytes: float, pattern: str = "uniform", algorithm: str = "flat"
) -> float:
    """Returns the time until every rank has sent ``nbytes`` in all.

    Args:
        topology: the machine; ranks fill its groups one after the other.
        size: the number of ranks.
        nbytes: the payload of a rank, its own part included.
        pattern: one of `patterns.NAMES`.
        algorithm: ``flat``: every rank starts its messages to all peers at once. ``pairwise``: HCCL's steps, to rank
            i + k in step k. ``hierarchical``: first within the innermost groups, then between ranks of the same place.
    """
    if size == 1:
        return topology.start_us
    weights = load(pattern, size)
    if algorithm == "pairwise":
        return topology.start_us + _pairwise(topology, size, nbytes, weights)
    if algorithm == "hierarchical":
        return topology.start_us + _hierarchical(topology, size, nbytes, weights)
    return topology.start_us + _flat(topology, size, nbytes, weights)


def _flat(topology: Topology, size: int, nbytes: float, weights: Load) -> float:
    """Starts all messages at once. The slowest class sets the time, by its heaviest rank, sending or receiving."""
    slowest = alpha = 0.0
    own = 0.0 if weights.single else nbytes / size
    for level, peers in topology.used(size):
        sent = nbytes if weights.single else nbytes * peers / size
        busy = _busy(level, size, nbytes, sent, own, nbytes * weights.largest, weights.ingress)
        slowest, alpha = max(slowest, busy), max(alpha, level.alpha(size))
    return alpha + topology.message_us * weights.peers + slowest


def _busy(
    level: Level, size: int, nbytes: float, sent: float, own: float, largest: float, ingress: float = 1.0
) -> float:
    """Returns the time of a class when ``size`` ranks send ``nbytes`` each, ``sent`` of them over this class.

    On links, the most wanted rank receives ``ingress`` times what it sends, and the ``largest`` part uses one pair's
    link. In shared memory, senders store directly into the outputs, so their ``own`` part also counts.
    """
    if level.curve:
        return (sent + own) / level.port(nbytes, size) / 1e3
    return max(sent * max(1.0, ingress) / level.port(nbytes, size), largest / level.pair(nbytes, size)) / 1e3


def _pairwise(topology: Topology, size: int, nbytes: float, weights: Load) -> float:
    """Adds up HCCL's steps: (p - 1) alpha + beta * sum over k of max over i of n(i, i + k).

    Some pair of every step crosses the outermost class in use, so all steps take the time of that class.
    """
    level, _ = topology.used(size)[-1]
    step = level.alpha(size) + topology.message_us
    moved = nbytes * weights.largest * weights.peers
    if level.curve and not weights.single:
        moved += nbytes / size  # a rank's own part, as in `_busy`
    return step * (size - 1) + moved / level.pair(nbytes, size) / 1e3


def _hierarchical(topology: Topology, size: int, nbytes: float, weights: Load) -> float:
    """Goes level by level: at each level, everything that must leave the group of the level below moves once.

    Inside a group, rank l collects what goes to ranks of place l elsewhere, so groups exchange one message per group
    instead of one per rank.
    """
    total, inside = 0.0, 1
    for level, peers in topology.used(size):
        group = inside + peers  # the number of ranks up to this level
        partners = _partners(group, inside)
        sent = nbytes * partners / (partners + 1)
        part = nbytes / (partners + 1)
        busy = _busy(level, group, nbytes, sent, part, part * max(1.0, weights.ingress), weights.ingress)
        total += level.alpha(size) + topology.message_us * min(partners, max(weights.peers, 1)) + busy
        inside = group
    return total


def _partners(group: int, inside: int) -> int:
    """Returns the number of groups of ``inside`` ranks in one of ``group``, without the rank's own."""
    return -(-group // inside) - 1


def all_reduce(
    topology: Topology,
    size: int,
    nbytes: float,
    algorithm: str = "flat",
    *,
    bits: int = 32,
    group_size: int = 128,
    gather_bits: int | None = None,
) -> float:
    """Returns the time of a two-shot all-reduce of ``nbytes`` of float32.

    Args:
        topology, size: as in `all_to_all_v`.
        nbytes: the size of the vector in float32.
        algorithm: ``flat``: one exchange between all ranks and one gather. ``two-level``: an exchange and a sum within
            the innermost groups, the same between groups on the sums, quantized again, and the gathers back.
        bits: size of an element on the way to the sum; 32 and 16 are not quantized.
        group_size: number of elements that share a float32 scale, if bits is 8 or less.
        gather_bits: size of an element on the way back; None means ``bits``.
    """
    if size == 1:
        return topology.start_us
    there = nbytes * bits / 32 + (nbytes / group_size if bits <= 8 else 0.0)
    back_bits = bits if gather_bits is None else gather_bits
    back = nbytes * back_bits / 32 + (nbytes / group_size if back_bits <= 8 else 0.0)
    first, _ = topology.used(size)[0]
    memory = topology.memory_gbps * first.share(size)
    if algorithm == "flat":
        uniform = load("uniform", size)
        shots = _flat(topology, size, there, uniform) + _flat(topology, size, back, uniform)
        stages = [(1.0, 1 / size)]
    else:
        shots, stages = _levels(topology, size, there, back)
    launches, traffic = 0, 0.0
    for before, after in stages:  # parts of the vector before and after the sum over a level
        if bits <= 8:
            launches += 1
            traffic += (nbytes + there) * before  # quantize
        launches += 1
        partial = nbytes if bits <= 8 else there  # what the next level quantizes
        traffic += there * before + (back if (before, after) == stages[-1] else partial) * after  # sum
    if back_bits <= 8:
        launches += 1
        traffic += nbytes + back  # restore
    return topology.start_us + shots + launches * topology.kernel_us + traffic / memory / 1e3


def _levels(topology: Topology, size: int, there: float, back: float) -> tuple[float, list[tuple[float, float]]]:
    """Adds the exchanges and gathers of all levels; also returns the part of the vector before and after each level."""
    total, left, inside = 0.0, 1.0, 1
    stages = []
    for level, peers in topology.used(size):
        group = inside + peers
        partners = _partners(group, inside)
        for payload in (there * left, back * left):
            part = payload / (partners + 1)
            busy = _busy(level, group, payload, part * partners, part, part)
            total += level.alpha(size) + topology.message_us * partners + busy
        stages.append((left, left / (partners + 1)))
        left /= partners + 1
        inside = group
    return total, stages


def quantizing_wins_from(
    topology: Topology, size: int, algorithm: str = "flat", against_bits: int = 16
) -> float | None:
    """Returns the float32 bytes from which int8 with a re-quantized gather beats the same sum in ``against_bits``.

    None means that int8 is not faster below 16 GiB.
    """

    def gain(nbytes: float) -> float:
        plain = all_reduce(topology, size, nbytes, algorithm, bits=against_bits)
        return plain - all_reduce(topology, size, nbytes, algorithm, bits=8)

    low, high = 1.0, float(1 << 34)
    if gain(low) > 0:
        return low
    if gain(high) <= 0:
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high
