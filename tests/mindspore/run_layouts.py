"""Run by msrun: random pairs of layouts, as many as its argument says."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from checks_layouts import check_random_layouts

import alltoallv.mindspore as am

check_random_layouts(am.init(timeout=60), int(sys.argv[1]))
print("all have the values of the slices")
