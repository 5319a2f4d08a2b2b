"""What PyPI shows: README.md with links that work there, and the project's URLs. A provider for scikit-build-core.

README.md links to files beside it. Where the repository is known, by ``ALLTOALLV_REPOSITORY`` or on GitHub's machines,
these links lead there; elsewhere their text remains, and pictures are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def repository() -> str:
    """The address of the repository, or nothing."""
    given = os.environ.get("ALLTOALLV_REPOSITORY", "")
    parts = [os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY")]
    return given.rstrip("/") or ("/".join(parts) if all(parts) else "")


def readme(home: str, revision: str) -> str:
    """README.md for readers who do not have the files beside it."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if not home:
            return "" if picture else text
        return f"{picture}[{text}]({home}/{'raw' if picture else 'blob'}/{revision}/{path})"

    return LINK.sub(absolute, README.read_text("utf-8"))


def dynamic_metadata(field: str, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    """The field ``readme`` or ``urls``."""
    home, revision = repository(), os.environ.get("GITHUB_REF_NAME", "HEAD")
    if field == "readme":
        return {"content-type": "text/markdown", "text": readme(home, revision)}
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    urls = {name: f"{home}/blob/{revision}/{path}" for name, path in pages.items()}
    return {"Repository": home, "Issues": f"{home}/issues", **urls} if home else {}
