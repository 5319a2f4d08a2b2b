"""torch_npu's own operators on the emulator: each against its documented formula, and what is refused."""

from __future__ import annotations

import operator_page
import pytest
from npu_ranks import caught, use_device
from operators import families

from alltoallv.testing import Ranks


@pytest.mark.parametrize("family", families())
def test_operators_compute_their_formulas(ranks: Ranks, family: str) -> None:
    def check(rank: int, size: int) -> None:
        device = use_device(rank)
        for case in families()[family]:
            for dtype in case.dtypes:
                case.call(device, dtype)
            if case.gradient:
                case.differentiate(device)

    ranks(1, communicator=False)(check)


def test_every_operator_has_a_case(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> None:
        use_device(rank)
        from alltoallv_emulator.operators import registry

        cases = [case for family in families().values() for case in family]
        run = {name for case in cases for name in (case.operator, *case.runs)}
        assert set(registry.names()) - run == set()

    ranks(1, communicator=False)(check)


def test_the_page_is_up_to_date() -> None:
    assert operator_page.PAGE.read_text() == operator_page.page(), "run python tests/npu/operator_page.py"


def test_refusals_leave_the_queue_alive(ranks: Ranks) -> None:
    """Of an operator that has no formula, in the caller; and of an argument's value, by the argument's name."""

    def check(rank: int, size: int) -> None:
        import torch
        import torch_npu

        device = use_device(rank)
        x = torch.ones(4, 8, device=device, requires_grad=True)
        for call, words in (
            (
                lambda: torch_npu.npu_lstm_cell(*[x] * 7),
                "npu::npu_lstm_cell is not among the operators of",
            ),
            (lambda: torch_npu.npu_format_cast(x[1:], 29), "input is a tensor of shape (3, 8)"),
            (lambda: torch_npu.npu_geglu(x, -1, 2), "npu::npu_geglu: approximate is 2; the emulator expects 0 or 1"),
        ):
            error = caught(call)
            assert isinstance(error, NotImplementedError), error
            assert words in str(error)
            torch.npu.synchronize()
            assert (x + 1).sum().item() == 64

    ranks(1, communicator=False)(check)


def test_a_format_is_remembered(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> None:
        import torch
        import torch_npu

        device = use_device(rank)
        x = torch.arange(8.0, device=device).view(2, 4)
        cast = torch_npu.npu_format_cast(x, 29)
        casts = (x, cast, cast.t(), torch_npu.npu_format_cast(cast, 2))
        assert [int(torch_npu.get_npu_format(one)) for one in casts] == [2, 29, 29, 2]
        assert torch.equal(cast.cpu(), x.cpu())

    ranks(1, communicator=False)(check)
