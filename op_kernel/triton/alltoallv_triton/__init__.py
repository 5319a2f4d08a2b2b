"""Triton kernels of quantization: one source for NVIDIA GPUs, Ascend NPUs (triton-ascend) and Triton's interpreter.

docs/quantization.md has the rules; codes, scales and results equal the bits of the C++ kernels (op_kernel/cpu) and of
`alltoallv.testing.quantized` bit for bit. The package is installed as ``alltoallv_triton``.

`quantize`, `dequantize` and `shared_scale` hold the kernels, `numbers` and `tiles` what they share, and `launch` the
functions on tensors that choose tiles and grids. Kernels are launched with ``enable_fp_fusion=False`` (`launch` does).
"""
