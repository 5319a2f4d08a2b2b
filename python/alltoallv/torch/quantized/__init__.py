"""Quantized collectives on torch tensors: functions, gradients, operators, and the hook for DDP."""
