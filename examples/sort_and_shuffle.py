"""A distributed sort, and a shuffle by key, as databases and data loaders do them; checked against one process.

python -m alltoallv run -n 4 examples/sort_and_shuffle.py
mpirun -n 4 python examples/sort_and_shuffle.py --records 1000000
"""

import argparse

import numpy as np

from alltoallv import Communicator
from alltoallv.numpy import all_gather, all_reduce, all_to_all_v, gather

RECORD = np.dtype([("key", np.int64), ("value", np.float64)])


def shuffle_by_key(records: np.ndarray, comm: Communicator) -> np.ndarray:
    """Sends all records whose key is r modulo W to rank r; they arrive in the order of ranks."""
    owners = records["key"] % comm.size
    counts = np.bincount(owners, minlength=comm.size)
    return all_to_all_v(records[np.argsort(owners, kind="stable")], counts, group=comm)


def sort(records: np.ndarray, comm: Communicator) -> np.ndarray:
    """Sorts records by key over all ranks: no key of a rank is larger than one of the next rank."""
    mine = records[np.argsort(records["key"], kind="stable")]
    # The quantiles of all ranks give splitters that cut the records into about equal parts.
    places = np.linspace(0, len(mine) - 1, 32).astype(int)
    samples = np.sort(all_gather(mine["key"][places], group=comm).ravel())
    splitters = samples[len(samples) * np.arange(1, comm.size) // comm.size]
    bounds = [0, *np.searchsorted(mine["key"], splitters, side="right"), len(mine)]
    received = all_to_all_v(mine, np.diff(bounds), group=comm)
    return received[np.argsort(received["key"], kind="stable")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000, help="per rank, at least 1")
    count = parser.parse_args().records
    if count < 1:
        parser.error(f"--records is {count}, expected 1 or more")
    with Communicator.from_env() as comm:
        rng = np.random.default_rng(comm.rank)
        records = np.zeros(count, RECORD)
        records["key"], records["value"] = rng.integers(0, 1000, count), rng.normal(size=count)

        # Sum the values of every key on the rank that owns it.
        own = shuffle_by_key(records, comm)
        sums = np.bincount(own["key"], own["value"], minlength=1000)
        expected = all_reduce(np.bincount(records["key"], records["value"], minlength=1000), group=comm)
        assert np.allclose(sums[comm.rank :: comm.size], expected[comm.rank :: comm.size])

        ordered = sort(records, comm)
        keys = ordered["key"]
        ends = gather(np.array([len(keys), keys.min(initial=1000), keys.max(initial=-1)]), group=comm)
        if ends is not None:
            assert ends[:, 0].sum() == count * comm.size
            assert (ends[:-1, 2] <= ends[1:, 1]).all()
            print(f"{count * comm.size} records sorted; records, first and last key of every rank:")
            for rank, (n, first, last) in enumerate(ends):
                print(f"rank {rank}: {n} {first} {last}")


if __name__ == "__main__":
    main()
