"""The main example, on a small scale: a mixture-of-experts layer on handwritten digits.

``python -m alltoallv demo`` starts it on 4 ranks. Read `program` first, which every rank runs; `digits` has the data,
the routing and the experts; `report` has the table and the picture.
"""

from __future__ import annotations

import importlib.util

_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def missing_packages() -> str:
    """Returns a sentence that names missing packages, with the command to install them; or ""."""
    names = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if not names:
        return ""
    return f"the demo needs {' and '.join(names)}: pip install {' '.join(names)}"
