"""Another package registers its quantization kernels for a kind of device here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Providers by device type. A provider returns None if it has no kernels after all.
providers: dict[str, Callable[[], Any]] = {}
