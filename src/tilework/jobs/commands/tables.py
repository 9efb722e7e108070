"""Tables as Slurm's commands print them: fields with a width, cut where they are longer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Field = Callable[[Any], str]


def by_letters(text: str, rows: Sequence[Any], fields: Mapping[str, tuple[str, Field]], header: bool) -> list[str]:
    """-o: "%.18i %9P": a dot aligns to the right."""
    lines = []
    for row in ([None] if header else []) + list(rows):

        def cell(found: re.Match[str], row: Any = row) -> str:
            right, width, letter = found[1], found[2], found[3]
            if letter not in fields:
                raise KeyError(letter)
            title, value = fields[letter]
            content = title if row is None else value(row)
            if not width:
                return content
            content = content[: int(width)]
            return content.rjust(int(width)) if right else content.ljust(int(width))

        lines.append(re.sub(r"%(\.?)([0-9]*)([A-Za-z])", cell, text).rstrip())
    return lines


def by_names(text: str, rows: Sequence[Any], fields: Mapping[str, tuple[str, Field]], header: bool) -> list[str]:
    """-O: "JobID,Name:30": twenty columns each, unless a width is given."""
    wanted = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        name, _, width = word.partition(":")
        if name.lower() not in fields:
            raise KeyError(name)
        wanted.append((*fields[name.lower()], int(width) if width.isdecimal() else 20))
    made = [[title for title, _, _ in wanted]] if header else []
    made += [[value(row) for _, value, _ in wanted] for row in rows]
    return ["".join(cell[: w[2]].ljust(w[2]) for cell, w in zip(line, wanted, strict=True)).rstrip() for line in made]


def clock(seconds: float) -> str:
    """Slurm's way: 1:12, 1:02:03, 2-01:02:03."""
    whole = max(0, int(seconds))
    days, hours, minutes, left = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{left:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
