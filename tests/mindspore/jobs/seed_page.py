"""The example of MindSpore's page on all_gather_into_tensor, on CPU."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from alltoallv.mindspore import all_gather_into_tensor, init

ms.set_device("CPU")
init()
input_tensor = Tensor(np.ones([2, 8]).astype(np.float32))
out_tensor = Tensor(np.zeros([4, 8]).astype(np.float32))
output = all_gather_into_tensor(out_tensor, input_tensor)
print(out_tensor)
print(output)
