"""What docs/ show of programs under MPI is what a user gets."""

from __future__ import annotations

import pytest
from documented import pages, run_page


@pytest.mark.parametrize("page", pages("hosts"))
def test_commands_print_what_the_page_shows(page, tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: the session `hosts` has it")
    run_page(page, "hosts", tmp_path)
