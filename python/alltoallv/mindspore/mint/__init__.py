"""``mindspore.mint.distributed`` over our engine: its checks, groups, messages, objects, and the functions' place.

`alltoallv.mindspore.distributed` has the public names.
"""
