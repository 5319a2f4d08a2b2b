"""What docs/frameworks.md shows of accelerate, Trainer, Fabric and DeepSpeed is what a user gets."""

from __future__ import annotations

import pytest
from documented import pages, run_page


@pytest.mark.timeout(900)  # DeepSpeed compiles in its first run
@pytest.mark.parametrize("page", pages("frameworks"))
def test_commands_print_what_the_page_shows(page, tmp_path):
    run_page(page, "frameworks", tmp_path)
