"""Run by msrun: exchanges through MindSpore's own queue, with consumers right behind."""

import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor

import alltoallv.mindspore as am
from alltoallv import _core
from alltoallv.mindspore.device_op import DeviceExchange, build

comm = am.init(timeout=100)
if comm.rank == 0:
    build(folder=sys.argv[1])
am.exchange_counts([0, 0])  # rank 1 loads what rank 0 has built
module = build(folder=sys.argv[1])
arrays = ([2000, 2000], [0, 2000], [2000, 2000], [0, 2000])
for dtype, name in ((ms.float32, "float32"), (ms.bfloat16, "bfloat16")):
    exchange = DeviceExchange(_core.Plan(comm.core, "all_to_all_v", name, *arrays), [4000], module)
    ones = Tensor(np.ones(4000, np.float32)).astype(dtype)
    wrong = 0
    for step in range(100):
        got = (exchange(ones * float(step % 50 + comm.rank)) + 1).asnumpy().astype(np.float32).reshape(2, -1)
        wrong += not (got == [[step % 50 + 1], [step % 50 + 2]]).all()
    print(name, "wrong", wrong, flush=True)
square = Tensor(np.arange(4000, dtype=np.float32).reshape(40, 100) + comm.rank)
exchange = DeviceExchange(_core.Plan(comm.core, "all_to_all_v", "float32", *arrays), [4000], module)
turned = [(np.arange(4000).reshape(40, 100) + j).T.reshape(-1)[2000 * comm.rank :][:2000] for j in range(2)]
print("view", bool((exchange(square.T).asnumpy() == np.concatenate(turned)).all()), flush=True)
try:
    bad = ([2000, 2000], [0, 2000], [2000 + comm.rank, 2000], [0, 2001])
    DeviceExchange(_core.Plan(comm.core, "all_to_all_v", "float32", *bad), [4001], module)(square).asnumpy()
except RuntimeError as error:
    print(str(error).splitlines()[0], flush=True)
