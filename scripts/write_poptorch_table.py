"""Writes the tables of the interface into docs/poptorch.md, from frontends/poptorch/src/poptorch/surface.py."""

from pathlib import Path

from poptorch.surface import table

BEGIN, END = "<!-- table: scripts/write_poptorch_table.py -->", "<!-- end of table -->"


def written(text: str) -> str:
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "poptorch.md"
    target.write_text(written(target.read_text()))
    print(target)
