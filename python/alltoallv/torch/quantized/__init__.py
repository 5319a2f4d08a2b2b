"""Quantized collectives on torch tensors: functions, gradients, kernels, the hook for DDP."""
