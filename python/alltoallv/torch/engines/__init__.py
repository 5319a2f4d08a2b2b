"""The engines that move and reduce the bytes of torch tensors: HCCL, and the groups of torch.distributed."""
