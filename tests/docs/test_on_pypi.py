"""What PyPI shows of README.md has no link that leads nowhere there."""

from __future__ import annotations

import importlib.util
import re

import pytest
from documented import ROOT

spec = importlib.util.spec_from_file_location("on_pypi", ROOT / ".ci" / "on_pypi.py")
on_pypi = importlib.util.module_from_spec(spec)
spec.loader.exec_module(on_pypi)

NAMES = "ALLTOALLV_REPOSITORY", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME"


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def links() -> list[str]:
    text = on_pypi.dynamic_metadata("readme", {}, {})["text"]
    return re.findall(r"\]\(([^)]+)\)", text)


def test_links_without_a_repository():
    assert all(link.startswith("https://") for link in links())
    assert on_pypi.dynamic_metadata("urls", {}, {}) == {}


@pytest.mark.parametrize(
    "known",
    [
        {"ALLTOALLV_REPOSITORY": "https://example.org/a/b/"},
        {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "a/b", "GITHUB_REF_NAME": "v1.0.0"},
    ],
)
def test_links_into_a_repository(monkeypatch, known):
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    inside = re.compile(rf"https://example\.org/a/b/(?:blob|raw)/{known.get('GITHUB_REF_NAME', 'HEAD')}/([^#]+)")
    urls = on_pypi.dynamic_metadata("urls", {}, {})
    assert urls["Repository"] == "https://example.org/a/b"
    paths = [inside.match(link)[1] for link in links()]
    paths += [match[1] for url in urls.values() if (match := inside.match(url))]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).is_file()] == []
