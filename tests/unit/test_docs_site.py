"""The tools behind `make docs`: links of the repository become links of the site, the reference is complete, and the checker of
a built site finds what is wrong. The site itself is built and checked in CI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_site  # noqa: E402
import reference  # noqa: E402
import site_hooks  # noqa: E402

import tilework  # noqa: E402
from tilework.cli.main import VERBS  # noqa: E402


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[a](docs/tiles.md#x)", "[a](tiles.md#x)"),
        ("README.md", "![a](docs/images/speed.png)", "![a](images/speed.png)"),
        ("README.md", "[a](bench/README.md) [b](CHANGELOG.md)", "[a](method.md) [b](changelog.md)"),
        ("docs/quickstart.md", "[a](../CONTRIBUTING.md#the-tree) [b](errors.md)", "[a](contributing.md#the-tree) [b](errors.md)"),
        ("docs/quickstart.md", "[a](#here) [b](https://pytorch.org/docs)", "[a](#here) [b](https://pytorch.org/docs)"),
        ("bench/README.md", "[a](../docs/benchmark.md)", "[a](benchmark.md)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(source: str, text: str, expected: str) -> None:
    assert site_hooks.site_links(text, source) == expected


def test_the_reference_has_every_command_and_every_public_name() -> None:
    commands, api = reference.cli_page(), reference.api_page()
    for verb in VERBS:
        assert f"\n## tilework {verb}\n" in commands
    assert "separate&#124;inside&#124;none" in commands and "--no-verify" in commands
    for name in tilework.__all__:
        assert f"tilework.{name}" in api, name
    assert "#### Session.run\n" in api and "- `batch_sizes`: " in api


def test_docstrings_become_markdown() -> None:
    text = "What it does.\n\n    one        first\n               and more\n    two, three   second\n"
    assert reference.markdown(text) == "What it does.\n\n- `one`: first and more\n- `two, three`: second"


def test_the_checker_finds_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<h1 id="top">x</h1><a href="#top">a</a><a href="https://pytorch.org">b</a>')
    assert check_site.problems(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<a href="gone.html">a</a><a href="good.html#nothing">b</a><img src="no.png"><script src="https://cdn.example/x.js"></script>'
    )
    (tmp_path / "bad.css").write_text("@font-face { src: url('https://fonts.example/f.woff2') }")
    found = "\n".join(check_site.problems(tmp_path))
    assert len(found.splitlines()) == 5
    for part in ("gone.html", "good.html#nothing", "no.png", "cdn.example", "fonts.example"):
        assert part in found


def test_every_page_of_the_docs_is_in_the_sites_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in text or page.name == "test-results.md", page.name
