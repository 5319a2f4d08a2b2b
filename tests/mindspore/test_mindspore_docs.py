"""What docs/ show of `alltoallv.mindspore` is what a user gets."""

from __future__ import annotations

import pytest
from documented import pages, run_page


@pytest.mark.parametrize("page", pages("mindspore"))
def test_commands_print_what_the_page_shows(page, tmp_path):
    run_page(page, "mindspore", tmp_path)
