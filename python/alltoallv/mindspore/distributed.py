"""Every public name of ``mindspore.mint.distributed``, on CPU, with its signatures, return values and error classes.

    from alltoallv.mindspore import distributed as dist

    dist.init_process_group()
    dist.all_reduce(tensor)

`alltoallv.mindspore.install` puts them into MindSpore itself, for programs that must not be changed. Differences:

- All ranks of a group raise an error that one of them finds in its arguments, instead of waiting for that rank.
- ``group`` may also be an `alltoallv.Communicator`; ``src``, ``dst`` and ``peer`` are then ranks in it.
- ``scatter_list`` and ``gather_list`` may be None except on the root, where MindSpore demands them of all ranks.
- all_reduce, broadcast, reduce_scatter and the functions of names with all_gather and all_to_all have gradients,
  as `alltoallv.mindspore` describes. The others have none, as MindSpore's.

Outputs are contiguous tensors. Asynchronous calls return a `CommHandle`.
"""

from mindspore.mint.distributed.distributed import TCPStore

from alltoallv._calls.front_end import publish as _publish
from alltoallv.mindspore import collectives, exchange
from alltoallv.mindspore.mint import (
    P2POp,
    all_gather_object,
    as_mint,
    batch_isend_irecv,
    broadcast_object_list,
    destroy_process_group,
    first_outputs,
    gather_object,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    irecv,
    is_available,
    is_initialized,
    isend,
    new_group,
    recv,
    recv_object_list,
    scatter_object_list,
    send,
    send_object_list,
)

all_gather = as_mint(collectives.all_gather)
all_gather_into_tensor = as_mint(exchange.all_gather_into_tensor)
all_gather_into_tensor_uneven = as_mint(collectives.all_gather_into_tensor_uneven)
all_reduce = as_mint(collectives.all_reduce)
all_to_all = as_mint(first_outputs(collectives.all_to_all))
all_to_all_single = as_mint(exchange.all_to_all_single)
barrier = as_mint(collectives.barrier)
broadcast = as_mint(collectives.broadcast)
gather = as_mint(collectives.gather)
reduce = as_mint(collectives.reduce)
reduce_scatter = as_mint(collectives.reduce_scatter)
reduce_scatter_tensor = as_mint(collectives.reduce_scatter_tensor)
reduce_scatter_tensor_uneven = as_mint(collectives.reduce_scatter_tensor_uneven, ("sum", "min", "max", "avg"))
scatter = as_mint(collectives.scatter)

__all__ = [
    "P2POp",
    "TCPStore",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_uneven",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_uneven",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]

_publish(globals())
