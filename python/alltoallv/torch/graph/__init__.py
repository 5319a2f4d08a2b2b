"""The operators that torch.compile and CUDA graphs see."""
