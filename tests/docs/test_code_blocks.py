"""What README and docs show is what a user gets: NumPy's part; the frameworks' folders have theirs."""

from __future__ import annotations

import ast

import pytest
from documented import PAGES, blocks, pages, run_page


@pytest.mark.parametrize("page", pages("numpy"))
def test_commands_print_what_the_page_shows(page, tmp_path):
    run_page(page, "numpy", tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_is_python(page):
    for block in blocks():
        if block.page == page and block.language == "python":
            ast.parse(block.text)


def test_programs_are_shown_running():
    shown = {(one.page, one.framework) for one in blocks() if one.language == "console"}
    assert {(one.page, one.framework) for one in blocks() if one.title} <= shown
