"""Checks a built site: every link, anchor and picture leads somewhere, and nothing is fetched from another host.

python scripts/check_site.py out/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHES = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}


class Page(HTMLParser):
    """What a page points to (tag, attribute, address), and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[tuple[str, str, str]] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.addresses.append((tag, name, value))


def problems(site: Path) -> list[str]:
    found = []
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses are from the root of wherever the site is put
            continue
        for tag, name, address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if (tag, name) in FETCHES and parts.scheme != "data":
                    found.append(f"{path.name}: {tag} {address} is fetched from another host")
                continue
            target = path.parent.joinpath(unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{path.name}: {address} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors | {"__top"}:
                found.append(f"{path.name}: {address} has no such anchor")
    for path in site.rglob("*.css"):
        found += [
            f"{path.name}: {a} is fetched from another host"
            for a in re.findall(r"url\(['\"]?(https?://[^)'\"]+)", path.read_text())
        ]
    return found


def main(arguments: list[str]) -> int:
    site = Path(arguments[0])
    num_pages = len(list(site.rglob("*.html")))
    found = problems(site) if num_pages else [f"{site}: there is no page"]
    print(
        "\n".join(found) if found else f"{num_pages} pages: links, anchors and pictures are fine, nothing comes from other hosts"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
