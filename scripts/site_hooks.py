"""What mkdocs (mkdocs.yml) does beyond docs/: pages from elsewhere in the repository, and the generated reference.

    index.md          README.md                 cli.md   from the commands
    changelog.md      CHANGELOG.md              api.md   from the Python API
    contributing.md   CONTRIBUTING.md
    method.md         bench/README.md

Links between them are written for the repository; here they are changed to lead to the pages of the site.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "method.md",
}


def site_links(text: str, source: str) -> str:
    """The links of a file of the repository (its path, from the root), as they are on the site."""

    def change(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:|#", target) or not target:
            return match[0]
        path = (ROOT / source).parent.joinpath(target).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        name = str(path.relative_to(ROOT))
        return f"]({PAGES.get(name) or name.removeprefix('docs/')}{anchor})"

    return re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", change, text)


def on_files(files: Any, config: Any) -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    import reference
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=site_links((ROOT / source).read_text(), source)))
    files.append(File.generated(config, "cli.md", content=reference.cli_page()))
    files.append(File.generated(config, "api.md", content=reference.api_page()))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    return text if page.file.generated_by else site_links(text, f"docs/{page.file.src_uri}")
