"""The notebook of examples/ runs from top to bottom, and prints what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "counts_and_codes.ipynb"


def outputs(notebook: Any) -> list[list[str]]:
    """By cell: the text, or the kind of a picture."""

    def told(output: Any) -> str:
        return output["text"] if output.output_type == "stream" else "image/png" * ("image/png" in output.data)

    return [[told(one) for one in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


def test_it_prints_what_it_shows() -> None:
    shown = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(run, timeout=120, resources=place, coalesce_streams=True).execute()  # a line may come in parts
    assert outputs(run) == outputs(shown)
    assert any("image/png" in cell for cell in outputs(run))
