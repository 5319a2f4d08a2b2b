"""Random collectives until an error, or until so many are over; tells the error, and how many outputs were wrong.

Arguments: a file that shows when all are at it, how many operators, the timeout of the communicator, and, of the front
end, "numpy" (if left out), "torch" or "mindspore".
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "soak"))

import rooms  # noqa: F401 - the modules below
from calls import draw
from case import UNSEEN
from episode import same, tensors

from alltoallv import Communicator
from alltoallv.errors import AllToAllVError

at_it, count, timeout = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if os.environ.get("MS_ROLE") == "MS_SCHED":
    sys.exit()  # msrun also runs the program on its scheduler
front_end = sys.argv[4] if len(sys.argv) > 4 else "numpy"
column = getattr(importlib.import_module(f"adapters.{front_end}_column"), f"{front_end.title()}Column")()
met = Communicator.from_env(timeout=60)  # so that all come to the next one at once
comm, rng = Communicator.from_env("hurried", timeout=timeout), random.Random(5)
wrong = done = 0
began = time.monotonic()
try:
    while done < count:
        call = draw(rng, comm.size, column.lacks)
        theirs = {name: tensors(column, value) for name, value in call.arguments[comm.rank].items()}
        began = time.monotonic()
        output = column.call(call.function, comm, theirs)
        wanted = call.want(call.arguments)[comm.rank]
        wrong += not (wanted is UNSEEN or same(column, output, wanted))
        done += 1
        if done == 20 and comm.rank == 0:
            at_it.touch()
except AllToAllVError as error:
    print(f"after {time.monotonic() - began:.3f} s: {type(error).__name__}: {error}", flush=True)
print(f"{done} operators, {wrong} wrong", flush=True)
