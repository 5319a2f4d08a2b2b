"""A rank dies in the middle of a mixture-of-experts step, and the others go on with the experts that they have.

    python -m alltoallv run -n 4 --keep-going examples/moe_recovery.py

Every rank has 2 experts, and 16 new tokens in every step. Rank 1 kills itself with the rows of others in its hands.
"""

import os
import signal
import time

import numpy as np

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import PeerLostError

STEPS, LAST_STEP_OF_RANK_1 = 20, 7
TOKENS, WIDTH, K = 16, 32, 2


def batch(rank: int, step: int, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens, the experts that a router has chosen for each, and their weights."""
    rng = np.random.default_rng([rank, step])
    choices = np.argsort(rng.random((TOKENS, experts)), axis=1)[:, :K]
    return rng.random((TOKENS, WIDTH), dtype=np.float32), choices, rng.random((TOKENS, K), dtype=np.float32)


def forward(
    dispatcher: av.MoEDispatcher, tokens: np.ndarray, choices: np.ndarray, weights: np.ndarray, dies: bool = False
) -> np.ndarray:
    rows, counts, state = dispatcher.dispatch(tokens, choices, weights)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    parts = np.split(rows, np.cumsum(counts)[:-1])
    outputs = [part * part + expert for part, expert in zip(parts, dispatcher.local_experts, strict=True)]
    return dispatcher.combine(np.concatenate(outputs), state)


def main() -> None:
    comm = Communicator.from_env(timeout=30)
    me, experts = comm.rank, 2 * comm.size
    dispatcher, there = av.MoEDispatcher(experts, comm), tuple(range(experts))
    results = {}
    step, lost = 0, None
    while step < STEPS:
        dies = me == 1 and step == LAST_STEP_OF_RANK_1
        try:
            if lost is not None:  # another rank may die during the recovery: then try again
                begin = time.perf_counter()
                dispatcher = dispatcher.survivors()  # drops choices of lost experts; its group is comm.shrink()
                comm = dispatcher.group
                step = int(av.all_reduce(np.array(step), "min", group=comm))  # some ranks may have finished the step
                there = tuple(av.all_gather_v(np.array(dispatcher.local_experts), group=comm).tolist())
                took = time.perf_counter() - begin
                if comm.rank == 0:
                    print(f"step {step}: {str(lost).split(': ', 1)[1]}")
                    print(f"step {step}: {comm.size} ranks go on after {took * 1e3:.0f} ms with experts {list(there)}")
                lost = None
                continue
            results[step] = forward(dispatcher, *batch(me, step, experts), dies), there
            step += 1
        except PeerLostError as error:
            lost = error

    for step, (result, placed) in results.items():
        alone = av.MoEDispatcher(experts, Communicator.threads(1)[0], placement=(placed,))
        assert np.array_equal(result, forward(alone, *batch(me, step, experts))), step
    av.barrier(group=comm)
    if comm.rank == 0:
        print(f"all {STEPS} steps gave what one process with the same experts gives, bit for bit")
    comm.destroy()


if __name__ == "__main__":
    main()
