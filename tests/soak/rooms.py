"""Where modules lie that are used here: `case` and `column` of the matrix, `trouble` of tests/support."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [room for name in ("soak", "matrix", "support") if (room := str(TESTS / name)) not in sys.path]
