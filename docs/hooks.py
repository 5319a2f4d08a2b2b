"""For mkdocs: files beside docs/ that pages link to are also part of the site."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests/matrix")]

from devices import DEVICES, schemas, table  # noqa: E402
from page import tables as front_ends  # noqa: E402


class Fields(griffe.Extension):
    """Divides "a, b: what both are" in a class's docstring; a TypedDict's goes to the calls whose options it has."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        options = any(str(base).endswith(("TypedDict", "Options")) for base in cls.bases)
        for section in cls.docstring.parsed if cls.docstring else ():
            if section.kind is not griffe.DocstringSectionKind.attributes:
                continue
            fields = []
            for field in section.value:
                several = field.name.endswith(",")  # of "a, b" griffe takes b for a's type
                for name in re.findall(r"\w+", f"{field.name} {field.annotation}") if several else [field.name]:
                    own = cls.attributes.get(name)
                    annotation = (own.annotation if own else None) if several else field.annotation
                    fields.append(griffe.DocstringAttribute(name, annotation=annotation, description=field.description))
                    if options:
                        cls.attributes[name].docstring = griffe.Docstring(field.description, parent=cls)
            section.value[:] = fields


def on_files(files: Files, config: Any) -> Files:
    """Adds the examples."""
    for path in sorted(one for one in (ROOT / "examples").iterdir() if one.suffix in (".py", ".cpp")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links that leave docs/ into links of the site; a search finds notes and old changes last."""
    if page.file.src_uri.startswith("notes/") or page.file.src_uri == "changelog.md":
        page.meta["search"] = {"boost": 0.1}
    elif page.file.src_uri in ("quickstart.md", "gpu.md"):  # how to install, NCCL
        page.meta["search"] = {"boost": 3}
    module = page.file.src_uri.removeprefix("api/").removesuffix(".md").replace("torch-", "torch.").replace("-", "_")
    if page.file.src_uri.startswith("api/") and module in DEVICES:
        before, marker, rest = markdown.partition(":::")
        markdown = f"{before}{table(module)}\n{marker}{rest}"
    if page.file.src_uri == "front-ends.md":
        markdown += f"\n{front_ends()}"
    if page.file.src_uri == "api/npu_ops.md":
        markdown += operators()
    return re.sub(r"\]\(\.\./examples/", "](examples/", markdown)


def operators() -> str:
    """A heading and a schema for every operator of `alltoallv.npu_ops`."""
    sections = (f"### {name} {{ #{name} }}\n\n```text\n{schema}\n```\n" for name, schema in sorted(schemas().items()))
    return "\n## Operators\n\nArguments and results are torch_npu's:\n\n" + "\n".join(sections)
