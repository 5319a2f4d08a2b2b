"""What docs/ show of `alltoallv.paddle` is what a user gets."""

from __future__ import annotations

import pytest
from documented import pages, run_page


@pytest.mark.parametrize("page", pages("paddle"))
def test_commands_print_what_the_page_shows(page, tmp_path):
    run_page(page, "paddle", tmp_path)
