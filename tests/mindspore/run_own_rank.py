"""Run by msrun: one of MindSpore's own test files, as it is, under `alltoallv.mindspore.install`."""

from __future__ import annotations

import os
import sys

import pytest

import alltoallv.mindspore as am

if os.environ.get("MS_ROLE") == "MS_SCHED":
    sys.exit(0)  # msrun's scheduler runs the same script, and pytest would call its early end a failure
am.install()
sys.exit(pytest.main(["-q", "-rfEs", "--disable-warnings", "-pno:cacheprovider", *sys.argv[1:]]))
