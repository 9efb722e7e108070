"""Writes the table of the interface into docs/sambaflow.md, from frontends/sambaflow/src/sambaflow/surface.py."""

from pathlib import Path

from sambaflow.surface import table

BEGIN, END = "<!-- table: scripts/write_sambaflow_table.py -->", "<!-- end of table -->"


def written(text: str) -> str:
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "sambaflow.md"
    target.write_text(written(target.read_text()))
    print(target)
