"""Run by msrun: one of MindSpore's own test files, as it is, under `alltoallv.mindspore.install`."""

from __future__ import annotations

import sys

import pytest

import alltoallv.mindspore as am

am.install()
sys.exit(pytest.main(["-q", "-rfEs", "--disable-warnings", "-pno:cacheprovider", *sys.argv[1:]]))
