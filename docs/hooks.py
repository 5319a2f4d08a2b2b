"""For mkdocs: files beside docs/ that pages link to are also part of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Adds the examples."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links that leave docs/ into links of the site; a search finds notes and old changes last."""
    if page.file.src_uri.startswith("notes/") or page.file.src_uri == "changelog.md":
        page.meta["search"] = {"boost": 0.1}
    elif page.file.src_uri == "quickstart.md":  # what tells how to install
        page.meta["search"] = {"boost": 3}
    if page.file.src_uri == "api/npu_ops.md":
        markdown += operators()
    return re.sub(r"\]\(\.\./examples/", "](examples/", markdown)


def operators() -> str:
    """A heading and a schema for every operator of `alltoallv.npu_ops`."""
    schemas = (ROOT / "python/alltoallv/npu_ops/schemas.txt").read_text("utf-8").splitlines()
    by_name = {schema.partition("(")[0].partition("::")[2]: schema for schema in schemas if schema}
    sections = (f"### {name}\n\n```text\n{by_name[name]}\n```\n" for name in sorted(by_name))
    return "\n## Operators\n\nArguments and results are those of torch_npu:\n\n" + "\n".join(sections)
