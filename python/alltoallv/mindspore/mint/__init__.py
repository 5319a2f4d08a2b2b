"""``mindspore.mint.distributed`` over our engine: its checks, groups, messages and objects.

`alltoallv.mindspore.distributed` has the public names.
"""
