# ruff: noqa: F401, I001
# As it stands in MindSpore's documentation of mint.distributed.all_gather_into_tensor (Apache-2.0).
import numpy as np
import mindspore as ms
from mindspore import mint
from mindspore.mint.distributed import init_process_group
from mindspore.mint.distributed import all_gather_into_tensor
from mindspore import Tensor

ms.set_context(device_target="Ascend")
init_process_group()
input_tensor = Tensor(np.ones([2, 8]).astype(np.float32))
out_tensor = Tensor(np.zeros([4, 8]).astype(np.float32))
output = all_gather_into_tensor(out_tensor, input_tensor)
print(out_tensor)
