"""What moves the bytes of torch tensors: HCCL, and the groups of torch.distributed."""
