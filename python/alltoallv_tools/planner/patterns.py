"""The load that a pattern puts on links: its heaviest rank and pair, as parts of a rank's payload."""

from __future__ import annotations

import math
from dataclasses import dataclass

from alltoallv.errors import InvalidParamError

NAMES = ("uniform", "uneven", "skewed", "sparse", "moe")


@dataclass(frozen=True)
class Load:
    """The load of a pattern, in parts of a rank's payload.

    Attributes:
        largest: the part that goes to one peer, for the heaviest pair of a step.
        ingress: the part that the most wanted rank receives.
        peers: the number of peers that get something.
        single: True if all of it goes to one peer, over whichever class of links that is.
    """

    largest: float
    ingress: float
    peers: int
    single: bool = False


def load(pattern: str, size: int) -> Load:
    """Returns the load of a pattern of `alltoallv_tools.bench.cases`, in closed form, for any number of ranks."""
    peers = size - 1
    if pattern == "uniform":
        return Load(1 / size, 1.0, peers)
    if pattern == "uneven":  # weights 7 to 13 in sevenths: the heaviest is 1.3 times the mean
        return Load(min(1.3 / size, 1.0), 1.0, peers)
    if pattern == "skewed":  # weights 1, 1/2, 1/3, ...
        harmonic = math.fsum(1 / k for k in range(1, size + 1)) if size <= 10**6 else math.log(size) + 0.5772156649
        return Load(1 / harmonic, size / harmonic, peers)
    if pattern == "sparse":
        return Load(1.0, 1.0, min(1, peers), single=True)
    if pattern == "moe":  # popularities fall from 10 to 1 in equal ratios; their mean is 9 / ln 10 for many ranks
        ratio = 10 ** (1 / (size - 1)) if size > 1 else 1.0
        mean = math.fsum(ratio**k for k in range(size)) / size
        return Load(10 / mean / size if size > 1 else 1.0, 10 / mean if size > 1 else 1.0, peers)
    raise InvalidParamError(f"pattern is {pattern!r}, expected one of {', '.join(NAMES)}", id=1469)
