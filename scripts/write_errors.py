"""Writes docs/errors.md: the errors.md of the engine, then those of the frontends. `tilework explain` reads the same files.

python scripts/write_errors.py
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "src" / "tilework" / "errors.md", *sorted((ROOT / "frontends").glob("*/src/*/errors.md"))]
PAGE = ROOT / "docs" / "errors.md"


def page() -> str:
    names = ", ".join(str(path.relative_to(ROOT)) for path in SOURCES)
    head = f"<!-- Written by scripts/write_errors.py from {names}: change those. -->\n\n"
    return head + "\n".join(path.read_text().rstrip() + "\n" for path in SOURCES)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
