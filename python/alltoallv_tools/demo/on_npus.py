"""The demo's operator and pipeline on tensors of NPUs, beside the same calls on arrays of the host.

``demo`` starts it on two emulated NPUs where torch_npu is installed::

    python -m alltoallv run --emulate-npu -n 2 -m alltoallv_tools.demo.on_npus
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch_npu  # type: ignore[import-not-found, unused-ignore]

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.numpy import all_reduce, quantized_all_reduce
from alltoallv_tools.demo import digits, program


def main() -> int:
    """Runs the rank that the launcher's environment describes; returns 1 if a bit differs on any rank."""
    with (
        Communicator.from_env(timeout=120.0) as hosts,
        Communicator.from_env("npus", backend="hccl", timeout=120.0) as devices,
    ):
        torch.npu.set_device(hosts.rank)
        start = program.begin(hosts)
        tokens, experts = start.tokens[start.is_own], start.experts[start.is_own]
        routing = program.plan_routing(hosts, experts)
        tokens, sums = tokens[routing.order], program.expert_sums(tokens, experts)
        arrived = program.send_by_operation(devices, torch.from_numpy(tokens).npu(), routing)
        total = at.quantized_all_reduce(torch.from_numpy(sums).npu(), group=devices)
        expected = program.send_by_operation(hosts, tokens, routing), quantized_all_reduce(sums, group=hosts)
        pairs = zip((arrived, total), expected, strict=True)
        wrong = [len(digits.differing_rows(got.cpu().numpy(), wanted)) for got, wanted in pairs]
        tokens_off, sums_off = all_reduce(np.array(wrong), group=hosts).tolist()
        if hosts.rank == 0:
            verdict = "the bits of the CPU" if not sums_off else f"{sums_off} sums with other bits"
            print(
                f"{hosts.size} emulated NPUs, torch_npu {torch_npu.__version__}: AllToAllVOperation delivers "
                f"{tokens_off or 'no'} tokens with other bits; the int8 pipeline, as {devices.stats()['kernel_calls']} "
                f"kernel in Ascend C, gives {verdict}"
            )
        return int(tokens_off + sums_off > 0)


if __name__ == "__main__":
    sys.exit(main())
