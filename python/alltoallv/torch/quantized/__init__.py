"""Quantized collectives on torch tensors: functions, gradients, kernels, and the hook for DDP."""
