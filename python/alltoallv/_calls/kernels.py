"""Where another package registers kernels of quantization for a kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# By device type. A provider gives None where it has none after all.
providers: dict[str, Callable[[], Any]] = {}
