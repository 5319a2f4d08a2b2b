"""The main job on real data, in small: handwritten digits as tokens of a mixture-of-experts layer.

``python -m alltoallv demo`` starts it on 4 ranks. `program` is what a rank runs and the place to read first;
`digits` has the data, the routing and the experts; `report` has the table and the picture.
"""

from __future__ import annotations

import importlib.util

_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def missing_packages() -> str:
    """A sentence about what the demo needs and does not find, with the command to install it; or ""."""
    names = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if not names:
        return ""
    return f"the demo needs {' and '.join(names)}: pip install {' '.join(names)}"
