"""An expert layer over mindformers' dispatchers in a graph, and its gradients, beside one process in NumPy.

The argument names the dispatcher: "alltoall", "padded" (the same with ``use_pad_tokens``), "deredundancy" (two ranks to
a node), "zero_redundancy", "moev3", or "moev3_deredundancy", its way without redundancy.
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


def choices():
    """Returns the experts of each token, and how much each counts, in numbers that bfloat16 has."""
    routing = np.stack([[random.permutation(EXPERTS)[:TOP] for _ in range(TOKENS)] for _ in range(SIZE)])
    return routing, (random.integers(1, 64, routing.shape) / 64).astype(np.float32)


DISPATCHERS = {
    "alltoall": "MoEAlltoAllTokenDispatcher",
    "padded": "MoEAlltoAllTokenDispatcher",
    "deredundancy": "MoEAlltoAllDeredundencyTokenDispatcher",
    "zero_redundancy": "MoEAlltoAllZeroRedundancyTokenDispatcher",
}


def dispatched(name: str):
    """Tokens of weighted experts, each of which scales them and takes the tangent."""
    module = "mindformers.parallel_core.training_graph.transformer.moe.token_dispatcher"
    kind = getattr(importlib.import_module(module), DISPATCHERS[name])
    config = types.SimpleNamespace(
        use_pad_tokens=name == "padded", num_moe_experts=EXPERTS, moe_router_topk=TOP, seq_length=TOKENS,
        hidden_size=MODEL, data_parallel_size=SIZE, npu_nums_per_device=2,
        expert_model_parallel_size=SIZE, tensor_model_parallel_size=1, context_parallel_size=1, is_dryrun=False,
        print_expert_load=False, enable_expert_relocation=False, moe_permute_fusion=False,
    )  # fmt: skip
    (routing, weights), scale = choices(), up[:, 0, :MODEL]
    rows_of_experts = (-1, MODEL) if "redundancy" in name else (1, -1, MODEL)

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
            return self.dispatcher.token_unpermutation(rows.reshape(rows_of_experts), state)

    values = np.tanh(x[:, :, None] * scale[routing])
    out = (weights[..., None] * values).sum(2)
    inner = 2 * out[:, :, None] * weights[..., None] * (1 - values**2)
    of_x, of_weights = (inner * scale[routing]).sum(2), (2 * out[:, :, None] * values).sum(-1)
    of_scale = np.zeros_like(scale)
    np.add.at(of_scale, routing, inner * x[:, :, None])
    args = [Tensor(each[RANK : RANK + 1]) for each in (x, weights, routing.astype(np.int32))]
    return Layer(), args, out[RANK], [of_x[RANK], of_weights[RANK], of_scale[mine]]


def swiglu_experts(experts, coefficients):
    """Returns what each token's experts make of it in sum, and the gradients of tokens, coefficients and weights."""
    a, b = np.split(np.einsum("rth,rtkhf->rtkf", x, up[experts]), 2, -1)
    sigmoid = 1 / (1 + np.exp(-a))
    each = np.einsum("rtkf,rtkfh->rtkh", hidden := a * sigmoid * b, down[experts])
    out = np.einsum("rtk,rtkh->rth", coefficients, each)
    weighted = 2 * out[:, :, None] * coefficients[..., None]
    inner = np.einsum("rtkh,rtkfh->rtkf", weighted, down[experts])
    gates = np.concatenate([inner * b * sigmoid * (1 + a * (1 - sigmoid)), inner * a * sigmoid], -1)
    of_up, of_down = np.zeros_like(up), np.zeros_like(down)
    np.add.at(of_up, experts, x[:, :, None, :, None] * gates[:, :, :, None])
    np.add.at(of_down, experts, hidden[..., None] * weighted[:, :, :, None])
    of_x = np.einsum("rtkf,rtkhf->rth", gates, up[experts])
    return out, of_x, np.einsum("rth,rtkh->rtk", 2 * out, each), of_up, of_down


class RankOfMoEV3(nn.Cell):
    """What MoEV3 gives every rank to do, with the rank's weights; ``more`` follows them."""

    def __init__(self, name, *more):
        super().__init__()
        self.function = getattr(importlib.import_module("mindformers.modules.transformer.moev3"), name)
        self.up, self.down = (ms.Parameter(Tensor(each[mine]), name=f"w{k}") for k, each in enumerate((up, down)))
        self.more = more

    def construct(self, tokens, expert, counted):
        return self.function(tokens, expert, counted, self.up, self.down, *self.more)


def moev3():
    """Sorted tokens, grouped matrix products and SwiGLU."""
    experts = np.sort(random.integers(0, EXPERTS, size=(SIZE, TOKENS)))
    counts = np.stack([np.bincount(each, minlength=EXPERTS) for each in experts]).astype(np.float32)
    out, of_x, _, of_up, of_down = swiglu_experts(experts[..., None], np.ones((SIZE, TOKENS, 1), np.float32))
    layer = RankOfMoEV3("ffn_forward_func", "hccl_world_group", MODEL, SIZE)
    args = [Tensor(each[RANK : RANK + 1]) for each in (x, experts.astype(np.int32), counts)]
    return layer, args, out[RANK], [of_x[RANK], of_up[mine], of_down[mine]]


def moev3_deredundancy():
    """The same for tokens with several experts, with two ranks to a node."""
    routing, weights = choices()
    out, of_x, of_weights, of_up, of_down = swiglu_experts(routing, weights)
    groups = importlib.import_module("mindformers.parallel_core.training_graph.transformer.moe.utils")
    each, node = EXPERTS // (SIZE // 2), RANK // 2
    names = groups.get_oep_group_name(RANK, SIZE, 2), groups.get_iep_group_name(RANK, 2)
    terms = (2, EXPERTS, node * each, (node + 1) * each, *names, False)
    layer = RankOfMoEV3("ffn_forward_deredundency_func", *terms)
    args = [Tensor(part[RANK : RANK + 1]) for part in (x, routing.astype(np.int32), weights)]
    return layer, args, out[RANK], [of_x[RANK], of_weights[RANK], of_up[mine], of_down[mine]]


kind = sys.argv[1]
whole = {"moev3": moev3, "moev3_deredundancy": moev3_deredundancy}
layer, args, expected, gradients = whole[kind]() if kind in whole else dispatched(kind)
np.testing.assert_allclose(layer(*args).asnumpy()[0], expected, rtol=1e-4, atol=1e-4)
print("forward as in one process", flush=True)


def loss(*inputs):
    return (layer(*inputs) ** 2).sum()


wanted = {"moev3": 0, "moev3_deredundancy": (0, 2)}.get(kind, (0, 1))
of_inputs, of_weights = ms.grad(loss, wanted, layer.trainable_params())(*args)
of_inputs = (of_inputs,) if wanted == 0 else of_inputs
found = [*(each.asnumpy()[0] for each in of_inputs), *(each.asnumpy() for each in of_weights)]
for k, (given, want) in enumerate(zip(found, gradients, strict=True)):
    error = 2.0**-8 if k == 1 and "redundancy" in kind else 1e-3  # the gradient of coefficients in bfloat16
    np.testing.assert_allclose(given, want, rtol=error, atol=1e-3)
print("gradients as in one process", flush=True)
