"""What README and docs show is what a user gets: NumPy's part; the frameworks' folders have theirs."""

from __future__ import annotations

import pytest
from documented import blocks, pages, run_page


@pytest.mark.parametrize("page", pages("numpy"))
def test_commands_print_what_the_page_shows(page, tmp_path):
    run_page(page, "numpy", tmp_path)


def test_every_python_block_is_a_program():
    assert [(one.page.name, one.text) for one in blocks() if one.language == "python" and not one.title] == []


def test_programs_are_shown_running():
    shown = {(one.page, one.framework) for one in blocks() if one.language == "console"}
    assert {(one.page, one.framework) for one in blocks() if one.title} <= shown
