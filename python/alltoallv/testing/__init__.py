"""Provides tools for tests of operators: a reference of every operator, golden data, and ranks to run them on.

* `alltoallv.testing.reference`: what every operator computes, in NumPy, for all ranks at once.
* `alltoallv.testing.golden`: random exchanges, comparison of bits, files.
* `run_ranks` and the pytest fixture ``ranks``: a function on n processes or threads.
* `world`: a function on a thousand simulated ranks in this process.
* `alltoallv.testing.hosts`: two hosts on one machine, for ranks that meet over TCP.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alltoallv.testing.pool import Ranks, run_ranks
    from alltoallv.testing.worker import Outcome, RankExit, RankFailures, RankTimeout, RemoteError, world

__all__ = ["Outcome", "RankExit", "RankFailures", "RankTimeout", "Ranks", "RemoteError", "run_ranks", "world"]


def __getattr__(name: str) -> Any:
    # pytest loads the plugin wherever alltoallv is installed, even without the modules that the pool needs.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "pool" if name in ("Ranks", "run_ranks") else "worker"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
