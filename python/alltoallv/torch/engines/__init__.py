"""The engines that move the bytes of torch tensors: HCCL, and the groups of torch.distributed."""
