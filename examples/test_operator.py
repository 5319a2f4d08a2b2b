"""Unit tests of an operator that needs several ranks: `pytest examples/test_operator.py` starts everything.

The fixture `ranks` comes with the package.
"""

import numpy as np
import pytest

from alltoallv.errors import PeerMismatchError
from alltoallv.numpy import all_to_all_v
from alltoallv.testing import reference


def reverse(x, counts, group):
    """The operator under test: sends the parts of ``x`` in reverse order, to rank W - 1 first."""
    ends = np.cumsum(counts)
    return all_to_all_v(x, counts[::-1], sdispls=(ends - counts)[::-1], group=group)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_against_the_definition(ranks, size):
    rng = np.random.default_rng(size)
    counts = rng.integers(0, 9, (size, size))
    inputs = [rng.normal(size=int(row.sum())) for row in counts]
    displs = np.cumsum(counts, axis=1) - counts
    expected = reference.all_to_all_v(inputs, counts[:, ::-1], displs[:, ::-1])
    results = ranks(size)(lambda comm: reverse(inputs[comm.rank], counts[comm.rank], comm))
    for found, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_ranks_that_disagree_are_named(ranks):
    def wrong(comm):
        with pytest.raises(PeerMismatchError, match="rank 1 sends 3 elements to rank 0, which expects 2"):
            all_to_all_v(np.zeros(5), [3, 2] if comm.rank else [2, 3], [2, 2], group=comm)

    ranks(2)(wrong)
