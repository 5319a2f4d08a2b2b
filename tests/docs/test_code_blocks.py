"""What README and docs show is what a user gets: NumPy's part; the frameworks' folders have theirs."""

from __future__ import annotations

import pytest
from documented import blocks, pages, run_page, without_warnings


@pytest.mark.parametrize("page", pages("numpy"))
def test_commands_print_what_the_page_shows(page, tmp_path):
    run_page(page, "numpy", tmp_path)


def test_every_python_block_is_a_program():
    assert [(one.page.name, one.text) for one in blocks() if one.language == "python" and not one.title] == []


def test_programs_are_shown_running():
    shown = {(one.page, one.framework) for one in blocks() if one.language == "console"}
    assert {(one.page, one.framework) for one in blocks() if one.title} <= shown


def test_warnings_of_other_packages_are_left_out():
    lines = [
        "[0] /v/lib/site-packages/paddle/utils.py:7: UserWarning: No ccache found.",
        "[1] /v/lib/site-packages/paddle/utils.py:7: UserWarning: No ccache found.",
        "[0]   warnings.warn(message)",
        "[0]   printed",
        "[1]   warnings.warn(message)",
        "/v/lib/site-packages/alltoallv/numpy/counts.py:3: UserWarning: ours",
        "  warnings.warn(ours)",
    ]
    assert without_warnings("\n".join(lines)).splitlines() == [lines[3], *lines[5:]]
