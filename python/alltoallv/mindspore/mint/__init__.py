"""``mindspore.mint.distributed`` over our engine: its checks, groups, messages and objects, and its installation.

`alltoallv.mindspore.distributed` has the public names.
"""
