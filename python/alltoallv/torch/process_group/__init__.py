"""The torch.distributed backend ``alltoallv``."""
