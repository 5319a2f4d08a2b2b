"""Under Yama's mode 1 ranks read each other's memory only where ALLTOALLV_ALLOW_PTRACE lets them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from alltoallv.numpy import all_to_all_v
from alltoallv.testing import Ranks


@pytest.mark.parametrize("allowed", ["", "0", "1"])
def test_peers_read_private_memory_if_they_may(
    ranks: Ranks, cma_permitted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    """A preload stands for the kernel's Yama, which few test machines have, in its answers alone."""
    if not cma_permitted:
        pytest.skip("this machine forbids process_vm_readv between ranks, whatever they allow")

    def work(comm):
        x, counts = np.full(2 * 3_000_000, comm.rank, np.uint8), [3_000_000] * 2
        out = all_to_all_v(x, counts, counts, out=np.empty_like(x), group=comm)
        return comm.stats()["cma_permitted"], [int(part.sum()) for part in out.reshape(2, -1)]

    library, folder = tmp_path / "yama.so", tmp_path / "allowed"
    folder.mkdir()
    source = Path(__file__).with_name("yama.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    for name, value in (("LD_PRELOAD", library), ("YAMA_ALLOWED", folder), ("ALLTOALLV_ALLOW_PTRACE", allowed)):
        monkeypatch.setenv(name, str(value))
    found = ranks(2, fresh=True, preloaded=False)(work)
    assert found == [(int(allowed == "1"), [0, 3_000_000])] * 2
