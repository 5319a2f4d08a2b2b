"""For mkdocs: files beside docs/ that pages link to are also part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Adds the examples."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links that leave docs/ into links of the site."""
    return re.sub(r"\]\(\.\./examples/", "](examples/", markdown)
