"""An expert layer over mindformers' dispatchers in a graph, and its gradients, beside one process in NumPy.

The argument names the dispatcher: "alltoall", "padded" (the same with ``use_pad_tokens``) or "moev3".
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import alltoallv.mindspore as am

# mindformers' packages import transformers, datasets and more, which its dispatchers do not need.
(root,) = map(Path, importlib.util.find_spec("mindformers").submodule_search_locations)
for each in root.rglob("__init__.py"):
    package = types.ModuleType(".".join(each.parent.relative_to(root.parent).parts))
    package.__path__ = [str(each.parent)]
    sys.modules[package.__name__] = package

am.install()
ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
ms.communication.init("hccl")
RANK, SIZE = ms.communication.get_rank(), ms.communication.get_group_size()
ms.set_auto_parallel_context(parallel_mode="data_parallel")

EXPERTS, TOP, TOKENS, MODEL, HIDDEN = 8, 2, 6, 4, 6
mine = slice(RANK * EXPERTS // SIZE, (RANK + 1) * EXPERTS // SIZE)
random = np.random.default_rng(0)
x = random.normal(size=(SIZE, TOKENS, MODEL)).astype(np.float32)
up = random.normal(size=(EXPERTS, MODEL, 2 * HIDDEN)).astype(np.float32)
down = random.normal(size=(EXPERTS, HIDDEN, MODEL)).astype(np.float32)


def alltoall(padded: bool):
    """Tokens of weighted experts, each of which scales them and takes the tangent."""
    name = "mindformers.parallel_core.training_graph.transformer.moe.token_dispatcher"
    kind = importlib.import_module(name).MoEAlltoAllTokenDispatcher
    config = types.SimpleNamespace(
        use_pad_tokens=padded, num_moe_experts=EXPERTS, moe_router_topk=TOP, seq_length=TOKENS, hidden_size=MODEL,
        expert_model_parallel_size=SIZE, tensor_model_parallel_size=1, context_parallel_size=1, is_dryrun=False,
        print_expert_load=False, enable_expert_relocation=False, moe_permute_fusion=False,
    )  # fmt: skip
    routing = np.stack([[random.permutation(EXPERTS)[:TOP] for _ in range(TOKENS)] for _ in range(SIZE)])
    weights, scale = random.random(routing.shape).astype(np.float32), up[:, 0, :MODEL]

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dispatcher, self.scale = kind(config), ms.Parameter(Tensor(scale[mine]))
            self.numbers = Tensor(np.arange(EXPERTS // SIZE).reshape(1, -1), ms.float32)

        def construct(self, tokens, probs, routing_map):
            rows, ends, state = self.dispatcher.token_permutation(tokens, probs, routing_map)
            rows = rows.reshape(-1, MODEL)
            places = ops.cumsum(ops.ones_like(rows[:, :1]), 0) - 0.5
            expert = (places > ops.cast(ends, ms.float32).reshape(1, -1)).astype(ms.float32).sum(axis=1)
            chosen = (expert.reshape(-1, 1) == self.numbers).astype(ms.float32)
            rows = ops.tanh(rows * ops.matmul(chosen, self.scale))
            return self.dispatcher.token_unpermutation(rows.reshape(1, -1, MODEL), state)

    values = np.tanh(x[:, :, None] * scale[routing])
    out = (weights[..., None] * values).sum(2)
    inner = 2 * out[:, :, None] * weights[..., None] * (1 - values**2)
    of_x, of_weights = (inner * scale[routing]).sum(2), (2 * out[:, :, None] * values).sum(-1)
    of_scale = np.zeros_like(scale)
    np.add.at(of_scale, routing, inner * x[:, :, None])
    args = [Tensor(each[RANK : RANK + 1]) for each in (x, weights, routing.astype(np.int32))]
    return Layer(), args, out[RANK], [of_x[RANK], of_weights[RANK], of_scale[mine]]


def moev3():
    """MoEV3's function of a rank: sorted tokens, grouped matrix products and SwiGLU."""
    function = importlib.import_module("mindformers.modules.transformer.moev3").ffn_forward_func
    experts = np.sort(random.integers(0, EXPERTS, size=(SIZE, TOKENS)))
    counts = np.stack([np.bincount(each, minlength=EXPERTS) for each in experts]).astype(np.float32)

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.up = ms.Parameter(Tensor(up[mine]), name="up")
            self.down = ms.Parameter(Tensor(down[mine]), name="down")

        def construct(self, tokens, expert, counter):
            return function(tokens, expert, counter, self.up, self.down, "hccl_world_group", MODEL, SIZE)

    a, b = np.split(np.einsum("rth,rthf->rtf", x, up[experts]), 2, -1)
    sigmoid = 1 / (1 + np.exp(-a))
    out = np.einsum("rtf,rtfh->rth", hidden := a * sigmoid * b, down[experts])
    inner = np.einsum("rth,rtfh->rtf", 2 * out, down[experts])
    gates = np.concatenate([inner * b * sigmoid * (1 + a * (1 - sigmoid)), inner * a * sigmoid], -1)
    of_up, of_down = np.zeros_like(up), np.zeros_like(down)
    np.add.at(of_up, experts, x[..., None] * gates[:, :, None])
    np.add.at(of_down, experts, hidden[..., None] * 2 * out[:, :, None])
    of_x = np.einsum("rtf,rthf->rth", gates, up[experts])
    args = [Tensor(each[RANK : RANK + 1]) for each in (x, experts.astype(np.int32), counts)]
    return Layer(), args, out[RANK], [of_x[RANK], of_up[mine], of_down[mine]]


kind = sys.argv[1]
layer, args, expected, gradients = moev3() if kind == "moev3" else alltoall(kind == "padded")
np.testing.assert_allclose(layer(*args).asnumpy()[0], expected, rtol=1e-4, atol=1e-4)
print("forward as in one process", flush=True)


def loss(*inputs):
    return (layer(*inputs) ** 2).sum()


wanted = 0 if kind == "moev3" else (0, 1)
of_inputs, of_weights = ms.grad(loss, wanted, layer.trainable_params())(*args)
found = [each.asnumpy()[0] for each in ((of_inputs,) if kind == "moev3" else of_inputs)]
for given, want in zip([*found, *(each.asnumpy() for each in of_weights)], gradients, strict=True):
    np.testing.assert_allclose(given, want, rtol=1e-3, atol=1e-3)
print("gradients as in one process", flush=True)
