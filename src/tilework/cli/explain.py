"""tilework explain: what an error means and what to do. The text is in the packages: our errors.md, and the frontends' own."""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from .output import out, print_json

NAME = "explain"
HELP = "Explain an error by the id in its message, or list all error ids."
EXAMPLE = "Example: tilework explain capture-python"


@dataclass(frozen=True)
class Section:
    """One error: its id, the chapter it belongs to, and the Markdown text below its heading."""

    id: str
    chapter: str
    text: str

    @property
    def summary(self) -> str:
        """The first sentence, without Markdown."""
        first = re.split(r"\n\n|(?<=[.?])\s", self.text.strip(), maxsplit=1)[0]
        return plain_links(first.replace("`", "").replace("\n", " "))


def plain_links(text: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def parse(text: str) -> dict[str, Section]:
    """The sections of an errors.md: `## chapter`, then `### id` for each error."""
    found: dict[str, Section] = {}
    chapter = ""
    for part in re.split(r"^(?=##+ )", text, flags=re.M)[1:]:
        heading, _, body = part.partition("\n")
        if heading.startswith("### "):
            found[heading[4:].strip()] = Section(heading[4:].strip(), chapter, body.strip())
        else:
            chapter = heading.lstrip("# ").strip()
    return found


def files() -> list[Path]:
    """Our errors.md, then those of installed frontends, which name their package in the entry point group tilework.errors."""
    found = [Path(__file__).parents[1] / "errors.md"]
    for point in sorted(entry_points(group="tilework.errors"), key=lambda p: p.name):
        spec = importlib.util.find_spec(point.value)  # of a top-level package: nothing is imported
        found += [Path(folder) / "errors.md" for folder in (spec.submodule_search_locations or [] if spec else [])]
    return [path for path in found if path.exists()]


def sections() -> dict[str, Section]:
    found: dict[str, Section] = {}
    for path in files():
        found |= parse(path.read_text())
    return found


def _ids(incomplete: str) -> list[str]:
    return [id for id in sections() if id.startswith(incomplete)]


def command(
    id: Annotated[str | None, typer.Argument(metavar="ERROR-ID", help="The id in brackets, such as capture-python.",
                                             autocompletion=_ids)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    known = sections()
    if id is None:
        _list(known, json)
        return
    id = id.strip("[]").lower()
    if id not in known:
        close = difflib.get_close_matches(id, known, n=3)
        raise UserError("explain-unknown", f"there is no error {id!r}",
                        expected=f"did you mean {' or '.join(close)}?" if close else "the id in brackets of an error message",
                        fix="`tilework explain` lists all ids")  # fmt: skip
    section = known[id]
    if json:
        print_json({"id": section.id, "chapter": section.chapter, "text": section.text})
    elif out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(f"# {section.id}\n\n{section.text}"), soft_wrap=False)
    else:
        print(f"{section.id}\n\n{plain_links(section.text)}")


def _list(known: dict[str, Section], json: bool) -> None:
    if json:
        print_json([{"id": s.id, "chapter": s.chapter, "summary": s.summary} for s in known.values()])
        return
    from rich.table import Table

    for chapter in dict.fromkeys(s.chapter for s in known.values()):
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for s in known.values():
            if s.chapter == chapter:
                table.add_row(s.id, s.summary)
        out.print(chapter, style="bold")
        out.print(table, soft_wrap=False)
        out.print()
