"""For mkdocs: files beside docs/ that pages link to are also part of the site."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import alltoallv  # noqa: E402 - of the working tree

#: By page of docs/api: the columns of its table of devices, and the cells of names of the module; where none are named,
#: those of all others. "" leaves out what has no device. The pages of torch have their own tables, which tests hold.
DEVICES: dict[str, tuple[str, dict[str, str]]] = {
    "numpy": (
        "CPU | several hosts | GPU | NPU",
        {"": "Bounded ErrorFeedback MessageWork Work", "yes | yes | no | no": ""},
    ),
    "paddle": (
        "CPU | several hosts | GPU | NPU",
        {"": "Bounded ErrorFeedback P2POp Task", "yes | not tested | no | no": ""},
    ),
    "mindspore": (
        "CPU | CPU, in graphs | Ascend | GPU",
        {
            "": "Bounded CommHandle ErrorFeedback Received install uninstall",
            "yes | yes | queue | no": "AllReduceLeaves AllToAllV AllToAllVCell DynamicAllToAllV QuantAllReduceCell "
            "QuantizedAllReduce QuantizedAllToAll QuantizedReduceScatter",
            "yes | no | host | no": "barrier exchange_counts global_gather global_scatter init irecv isend "
            "new_group recv send",
            "yes | no | no | no": "MoEDispatcher ReshardPlan empty reshard reshard_state",
            "yes | no | queue; learnt counts: host | no": "all_to_all_v",
            "yes | no | queue | no": "",
        },
    ),
    "jax": ("CPU | GPU | TPU | NPU", {"yes | no | no | no": ""}),
    "deep_ep": (
        "CPU | GPU | NPU",
        {"": "Config EPHandle EventHandle EventOverlap install topk_idx_t", "yes | not run | not tested": ""},
    ),
    "torch.symm_mem": ("CPU | GPU | NPU", {"yes | torch's own | emulated": ""}),
    "npu_ops": ("CPU | emulated NPU | NPU", {"yes | yes | torch_npu's own": ""}),
}


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
        markdown = f"{before}{devices(module)}\n{marker}{rest}"
    if page.file.src_uri == "api/npu_ops.md":
        markdown += operators()
    return re.sub(r"\]\(\.\./examples/", "](examples/", markdown)


def devices(module: str) -> str:
    """A table: on which devices each name of a module runs."""
    columns, said = DEVICES[module]
    names = {name: name if module == "npu_ops" else f"alltoallv.{module}.{name}" for name in offered(module)}
    cells: dict[str, str] = {}
    for cell, named in said.items():
        cells |= {name: cell for name in named.split() or names if name not in cells}
    if unknown := set(cells) - set(names):
        raise ValueError(f"docs/hooks.py names {sorted(unknown)}, which alltoallv.{module} has not")
    rows = [f"| [`{name}`](#{anchor}) | {cells[name]} |" for name, anchor in names.items() if cells[name]]
    head = [f"| name | {columns} |", "|---" * (columns.count("|") + 2) + "|"]
    return "\n".join([*head, *rows]) + "\n"


def offered(module: str) -> list[str]:
    """The names that a module offers, in order."""
    if module == "npu_ops":
        return sorted(schemas())
    if names := alltoallv._offered(f"alltoallv.{module}"):
        return sorted(names)
    path = (ROOT / "python/alltoallv" / module.replace(".", "/")).with_suffix(".py")
    functions = [one.name for one in ast.parse(path.read_text("utf-8")).body if isinstance(one, ast.FunctionDef)]
    return sorted(name for name in functions if not name.startswith("_"))


def schemas() -> dict[str, str]:
    """The schemas of the operators of `alltoallv.npu_ops`, by name."""
    lines = (ROOT / "python/alltoallv/npu_ops/schemas.txt").read_text("utf-8").splitlines()
    return {line.partition("(")[0].partition("::")[2]: line for line in lines if line}


def operators() -> str:
    """A heading and a schema for every operator of `alltoallv.npu_ops`."""
    sections = (f"### {name} {{ #{name} }}\n\n```text\n{schema}\n```\n" for name, schema in sorted(schemas().items()))
    return "\n## Operators\n\nArguments and results are those of torch_npu:\n\n" + "\n".join(sections)
