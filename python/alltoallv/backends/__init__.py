"""Existing engines behind one small protocol.

Where shared memory does not reach (ranks on several hosts, tensors on a GPU) a program's own engine moves the data:
`torch_group` uses what torch.distributed has. Every engine agrees on rows before data move (`agreement`), as the
shared-memory transport does, with the same verdicts in the same words.
"""
