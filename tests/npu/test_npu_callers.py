"""The script that lists which operators a package calls."""

from __future__ import annotations

from callers import Call, calls

PROGRAM = """
import torch, torch_npu
torch_npu.npu_rms_norm(x, gamma, epsilon=1e-6)[0]
torch.ops._C_ascend.npu_add_rms_norm_bias.default(x, y, gamma, **rest)
torch_npu.npu_fused_infer_attention_score.out(q, k, v, out=[y, z])
torch_npu.npu.current_stream()
torch_npu.npu.Event()
torch.ops.vllm.all_reduce(x)
kernels["npu_swiglu"](x)
"""


def test_calls_of_operators() -> None:
    assert sorted(calls(PROGRAM, "a.py")) == [
        Call("_C_ascend::npu_add_rms_norm_bias", (), "a.py"),
        Call("npu::npu_fused_infer_attention_score", ("out",), "a.py"),
        Call("npu::npu_rms_norm", ("epsilon",), "a.py"),
    ]
