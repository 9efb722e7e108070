"""What a frontend has of its vendor's interface, row by row, as a table for its page. A test holds every row against the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

HERE, IGNORED, REFUSED = "yes", "accepted, no effect", "refused"
Row = tuple[str, str, str, str]  # where, names, status, what to know


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "|".join(f" {c} " if c != "---" else c for c in line) + "|" for line in lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def names_table(rows: Iterable[Row]) -> str:
    found = [(f"`{where}`", code(names.split()), status, note) for where, names, status, note in rows]
    return table(("where", "names", "supported", "note"), found)


def variables_table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Environment variables: (names, status, what to know)."""
    return table(("variable", "supported", "note"), [(code(names.split(", ")), status, note) for names, status, note in rows])
