"""Run by ``alltoallv run`` on emulated NPUs: what MindSpore's operator does with device memory and a stream."""

import ctypes
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore._c_expression.typing import type_to_type_id

import alltoallv.mindspore as am
import alltoallv_emulator as emulator
from alltoallv import Communicator, _core
from alltoallv import numpy as av
from alltoallv._calls import subgroups
from alltoallv.errors import InvalidParamError
from alltoallv.launch import hccl
from alltoallv.launch.options import make_options
from alltoallv.mindspore import device_op, graph, tensors
from alltoallv.mindspore.device_op import ENTRY, Launch, ticket_for

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
COUNT = 1000

comm = Communicator.from_env(backend="hccl", timeout=60)
rank, size = comm.rank, comm.size
acl = ctypes.CDLL("libascendcl.so")


def done(result: int) -> None:
    assert result == 0, result


def memory(array: np.ndarray) -> ctypes.c_void_p:
    """A copy on the device."""
    address = ctypes.c_void_p()
    done(acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(array.nbytes), 0))
    bytes_ = ctypes.c_size_t(array.nbytes)
    done(acl.aclrtMemcpy(address, bytes_, array.ctypes.data_as(ctypes.c_void_p), bytes_, HOST_TO_DEVICE))
    return address


def values(address: ctypes.c_void_p) -> np.ndarray:
    """What lies there now, whatever the streams are doing: a row for each rank."""
    array = np.empty((size, COUNT), np.float32)
    bytes_ = ctypes.c_size_t(array.nbytes)
    done(acl.aclrtMemcpy(array.ctypes.data_as(ctypes.c_void_p), bytes_, address, bytes_, DEVICE_TO_HOST))
    return array


def complete(address: ctypes.c_void_p) -> np.ndarray:
    """What lies there at the end of the stream."""
    done(acl.aclrtSynchronizeStream(stream))
    return values(address)


def exchange(layout: list[list[int]]) -> str:
    plan = _core.Plan(comm.core, "all_to_all_v", "float32", *layout)
    return launch(lambda places, stream: plan.run(*places[:2], stream=stream))


def launch(run: Launch) -> str:
    """As LaunchKernel of device_op.cc; returns the error's text."""
    ticket = ticket_for(run)
    entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_uint64)(ENTRY)
    message = ctypes.create_string_buffer(1024)
    places = (ctypes.c_void_p * 2)(source.value, target.value)
    failed = entry(ticket, places, stream, ctypes.addressof(message), len(message))
    assert (failed != 0) == (message.value != b"")
    return message.value.decode()


# Where MindSpore computes on CPU, HCCL would take addresses of host memory for a device's.
for front_end in (am, av):
    with pytest.raises(InvalidParamError, match="group has backend 'hccl', expected one for tensors in host memory"):
        front_end.barrier(group=comm)
tensors.queued = True  # as on Ascend
source = memory(np.full(size * COUNT, 1.0 + rank, np.float32))
target = memory(np.full(size * COUNT, -1.0, np.float32))
stream = ctypes.c_void_p()
done(acl.aclrtCreateStream(ctypes.byref(stream)))
counts, places = [COUNT] * size, [COUNT * j for j in range(size)]
emulator.set_option("task_delay_us", 1_000_000)
assert exchange([counts, places, counts, places]) == ""
assert (values(target) == -1).all(), "the call has waited for the data, or used another stream"
by_rank = np.arange(1, size + 1)[:, None]
assert (complete(target) == by_rank).all()
print("enqueued, then right", flush=True)

# The operator of graphs, as its kernel calls it.
number = device_op.number_of(graph.Host("element", comm).launch)
numbers = [(ctypes.c_int64 * len(values))(*values) for values in ([size * COUNT], [*counts, *places])]
anew = memory(np.full(size * COUNT, -1.0, np.float32))
in_graph = device_op.GraphLaunch(number, type_to_type_id(mindspore.float32), source.value, None, anew.value)
in_graph.input_shape = in_graph.output_shape = numbers[0]
in_graph.send = in_graph.recv = numbers[1]
in_graph.input_rank, in_graph.output_rank, in_graph.send_size, in_graph.recv_size = 1, 1, 2 * size, 2 * size
in_graph.stream = stream
text = ctypes.create_string_buffer(1024)
assert device_op.run(ctypes.byref(in_graph), ctypes.addressof(text), len(text)) == 0, text.value
assert (values(anew) == -1).all()
emulator.set_option("task_delay_us", 100_000)
assert (complete(anew) == by_rank).all()
print("also in a graph", flush=True)

# What mint.distributed's collectives launch, in a group of its own.
host = subgroups.connect("group", "group", list(range(size)), 60)
group = Communicator(hccl.over(host.core, make_options("group", 60)))
shape, all_counts = [size * COUNT], [COUNT] * size


def total(places: Any, at: int) -> None:
    group.core.reduce("all_reduce", "float32", "sum", places[1], places[1], all_counts, -1, at, shape=shape)


def gather(places: Any, at: int) -> None:
    layout = _core.Request.all_gather(size, [COUNT]).layout
    _core.Plan(group.core, "all_gather_into_tensor", "float32", *layout).run(*places, stream=at)


def scatter(places: Any, at: int) -> None:
    group.core.reduce("reduce_scatter", "float32", "max", *places, all_counts, -1, at, shape=shape)


for call, rows, wanted in ((total, size, size * by_rank), (gather, size, by_rank), (scatter, 1, size)):
    assert launch(lambda places, at, call=call: call(places[:2], at)) == ""
    assert (complete(target)[:rows] == wanted).all()
print("collectives of a group", flush=True)
group.destroy()

wrong = [COUNT - rank] * size
print(exchange([counts, places, wrong, places]), flush=True)
comm.destroy()
