"""Lets a process join a framework's group, and checks all groups.

``python -m alltoallv run -n 1 grown_groups.py torch gloo``. The communicator that grow() makes serves beside the
framework's groups, which keep the ranks that they had.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from alltoallv import Communicator
from alltoallv.errors import InvalidParamError


def torch_groups() -> tuple[Any, Any, Communicator, list[Any]]:
    import torch
    import torch.distributed as dist

    import alltoallv.torch as at

    if "GROWN" in os.environ:
        return at, torch.from_numpy, Communicator.from_env(os.environ["GROWN"], timeout=50), []
    dist.init_process_group(sys.argv[2])
    return at, torch.from_numpy, at.from_group(dist.group.WORLD), [None, dist.group.WORLD, dist.new_group([0])]


def mindspore_groups() -> tuple[Any, Any, Communicator, list[Any]]:
    import mindspore

    import alltoallv.mindspore as am

    return am, mindspore.Tensor, am.init(timeout=50), [None, "hccl_world_group", am.new_group([0])]


def paddle_groups() -> tuple[Any, Any, Communicator, list[Any]]:
    import paddle

    import alltoallv.paddle as ap

    first = Communicator.from_env(timeout=50)
    return ap, paddle.to_tensor, first, [None, ap.new_group([0])]


FRONT_ENDS = {"torch": torch_groups, "mindspore": mindspore_groups, "paddle": paddle_groups}


def main(front_end: str) -> None:
    functions, tensor, first, groups = FRONT_ENDS[front_end]()

    def told(group: Any, size: int, rank: int) -> list[float]:
        x = tensor(np.arange(size, dtype=np.float32) + 10 * rank)
        return functions.all_to_all_v(x, [1] * size, [1] * size, group=group).numpy().tolist()

    comm, child = first, None
    if first.size == 1:
        assert told(groups[-1], 1, 0) == [0]
        variables = first.newcomers(1)[0] | {"GROWN": first.domain}
        child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | variables)
        comm = first.grow(1)
    assert told(comm, 2, comm.rank) == [comm.rank, 10 + comm.rank]
    if child is None:
        return
    for group in groups:
        assert told(group, 1, 0) == [0]
    if front_end != "torch":  # whose own function it is
        with pytest.raises(InvalidParamError, match=r"ranks is \[0, 1\], expected different ranks below 1"):
            functions.new_group([0, 1])
    assert child.wait() == 0
    print("grown", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
