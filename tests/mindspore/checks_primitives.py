"""MindSpore's communication primitives under `install`, outside of graphs; `run_primitives` has them in graphs."""

from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, mint, nn, ops
from mindspore import communication as theirs
from mindspore.communication import management
from mindspore.ops import communication
from mindspore.ops.operations import comm_ops
from primitive_cases import cases, check

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError, PeerMismatchError


def check_primitives_values_and_gradients(comm: Communicator) -> None:
    with am.install():
        management.init("hccl")
        for name, case in cases(comm.rank).items():
            check(name, case, comm.rank)


def check_primitives_of_a_network(comm: Communicator) -> None:
    """As a cell's attribute: made once, copied, with what programs call on primitives."""
    own = comm_ops.AlltoAllV
    with am.install():
        assert issubclass(ops.AlltoAllV, own)
        assert ops.AlltoAllV is comm_ops.AlltoAllV is ops.operations.AlltoAllV

        class Net(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.exchange = nn.Dense(3, 3), ops.AlltoAllV(block_size=3).recompute(False)
                self.exchange.add_prim_attr("x", 1).set_device("CPU").shard(((1,), (1,), (1,)))

            def construct(self, x):
                return self.exchange(self.layer(x).reshape(-1), [1, 1], [1, 1]).reshape(2, 3)

        net, x = Net(), Tensor(np.full((2, 3), 1.0 + comm.rank, np.float32))
        grads = [ms.grad(lambda x, net=net: (net(x) ** 2).sum(), None, net.trainable_params())(x) for net in (net,) * 2]
        np.testing.assert_array_equal(grads[0][0].asnumpy(), grads[1][0].asnumpy())
        np.testing.assert_array_equal(copy.deepcopy(net)(x).asnumpy(), net(x).asnumpy())
    assert ops.AlltoAllV is comm_ops.AlltoAllV is own


def check_primitives_exchange_any_counts(comm: Communicator) -> None:
    with am.install():
        exchanges = {block: ops.AlltoAllV(block_size=block) for block in (1, 2, 5)}

        @settings(max_examples=40, derandomize=True, database=None, deadline=None)
        @given(st.lists(st.integers(0, 4), min_size=4, max_size=4), st.sampled_from(sorted(exchanges)))
        def exchange(numbers: list[int], block: int) -> None:
            counts = np.array(numbers).reshape(2, 2)
            data = [np.arange(counts[r].sum() * block, dtype=np.int32) + 1000 * r for r in (0, 1)]
            parts = [np.split(data[r], [counts[r][0] * block]) for r in (0, 1)]
            expected = np.concatenate([part[comm.rank] for part in parts])
            terms = counts[comm.rank].tolist(), counts[:, comm.rank].tolist()
            made = exchanges[block](Tensor(data[comm.rank]), *terms)
            assert made.shape == (expected.shape if expected.size else ())
            if expected.size:
                np.testing.assert_array_equal(made.asnumpy(), expected)

        exchange()


def check_primitives_messages(comm: Communicator) -> None:
    x, peer = Tensor(np.arange(6, dtype=np.float32)), 1 - comm.rank
    with am.install():
        if comm.rank == 0:
            sent = ops.Send(3, 1)
            np.testing.assert_array_equal(ms.grad(lambda x: sent(x).sum())(x).asnumpy(), [0, 2, 4, 6, 8, 10])
        else:
            received = ops.Receive(3, 0, [6], ms.float32)
            np.testing.assert_array_equal(_received(received, x), x.asnumpy())
        batch = ops.BatchISendIRecv(["isend", "irecv"], [peer, peer], [[6]], [ms.float32])
        np.testing.assert_array_equal(batch((x + comm.rank,))[1].asnumpy(), x.asnumpy() + peer)
        with pytest.raises(InvalidParamError, match=r"BatchISendIRecv.* has no gradient"):
            ms.grad(lambda x: batch((x * 1.0,))[1].sum())(x)


def _received(receive: ops.Receive, like: Tensor) -> np.ndarray:
    """What has been received, whose gradient goes back."""
    values = []

    def loss(like):
        got = receive(like)
        values.append(got.asnumpy())
        return (got**2).sum()

    ms.grad(loss)(like)
    return values[0]


def check_primitives_refusals(comm: Communicator) -> None:
    x = Tensor(np.arange(6, dtype=np.float32))
    with am.install():
        for run, kind, text in (
            (lambda: ops.AlltoAll(3, 0, 0)(x), InvalidParamError, "split_count is 3, expected 2, the number of ranks"),
            (lambda: ops.AlltoAllV()(x, [1, 1, 1], [1, 1]), InvalidParamError, "send_numel_list is .* 2 integers"),
            (lambda: ops.AlltoAllV(block_size=0)(x, [3, 3], [3, 3]), InvalidParamError, "block_size is 0"),
            (lambda: ops.AlltoAllV()(x.reshape(2, 3), [3, 3], [3, 3]), InvalidTensorError, "expected 1 dimension"),
            (lambda: ops.ReduceScatter()(x[:5]), InvalidTensorError, "dimension 0 to be a multiple of 2"),
            (lambda: ops.AllReduce("mean")(x), InvalidParamError, "mean"),
            (lambda: ops.NeighborExchangeV2([0], [0] * 4, [0], [0] * 4, "NCHW")(x), InvalidParamError, "8 different"),
            (lambda: ops.AlltoAllV()(x, [3, 3], [3, 2]), PeerMismatchError, "rank"),
            (lambda: management.init("gloo"), RuntimeError, "backend_name is 'gloo'"),
            (lambda: communication.set_comm_ops_inplace(False), InvalidParamError, "is_enable is False, expected True"),
        ):
            with pytest.raises(kind, match=text):
                run()
        with pytest.raises(AllToAllVError, match=r"ReduceScatter.* has no gradient"):
            ms.grad(lambda x: ops.ReduceScatter("max")(x * 1.0).sum())(x)
        if comm.rank:  # what one rank finds reaches the other
            with pytest.raises(InvalidTensorError):
                ops.AllGather()(Tensor(1.0))
        else:
            with pytest.raises(AllToAllVError, match="expected at least 1 dimension"):
                ops.AllGather()(x)


def check_primitives_beside_other_functions(comm: Communicator) -> None:
    """Every name of ops.communication, and what mindspore.communication has about the job."""
    with am.install():
        assert not [
            name
            for name in communication.__all__
            if "alltoallv" not in getattr(communication, name).__module__ and name != "TCPStore"
        ]
        theirs.init()
        assert (theirs.get_rank(), theirs.get_group_size()) == (comm.rank, 2)
        assert theirs.get_comm_name() == management.get_comm_name("hccl_world_group")
        x, whole = Tensor(np.full(2, 1.0 + comm.rank, np.float32)), mint.zeros(4)
        communication.gather_into_tensor(whole, x, 1)
        np.testing.assert_array_equal(whole.asnumpy(), [1, 1, 2, 2] if comm.rank else [0] * 4)
        communication.scatter_tensor(x, whole, 1)
        np.testing.assert_array_equal(x.asnumpy(), [1 + comm.rank] * 2)
        communication.all_reduce(x)
        np.testing.assert_array_equal(x.asnumpy(), [3, 3])
        theirs.create_group("the second", [1])
        if comm.rank:
            np.testing.assert_array_equal(ops.AllReduce(group="the second")(x).asnumpy(), [3, 3])
        theirs.destroy_group("the second")
