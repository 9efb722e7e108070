"""The site file, and its mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilework.errors import UserError
from tilework.tiles.machine import Core, Machine
from tilework.tiles.site import read_site
from tilework.tiles.topology import detect

GOOD = """platform = "lab"

[shape]
title = "lab"
boards = 1
chips = 2
tiles = 2
levels = ["BOX", "UNIT", "TILE"]
cpus = [[0], [1], [2], [3]]

[limits]
tiles_per_user = 3
hung_seconds = 5
"""


def test_a_shape_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(GOOD)
    site = read_site(tmp_path / "site.toml")
    node = detect(None, site, Machine(tuple(Core(0, 0, (i,)) for i in range(4))))
    assert [t.path for t in node.tiles] == [f"/BOX_0/UNIT_{c}/TILE_{t}" for c in (0, 1) for t in (0, 1)]
    assert [t.cpus for t in node.tiles] == [(0,), (1,), (2,), (3,)] and not node.virtual
    assert site.limits.tiles_per_user == 3 and site.limits.requests_per_user == 64


@pytest.mark.parametrize(
    ("change", "line", "why"),
    [
        (("boards = 1", 'boards = "one"'), 5, "Expected `int`, got `str`"),
        (("tiles = 2", "tiles = 0"), 7, "from 1 to 4096"),
        (("tiles_per_user", "tiles_for_user"), 12, "unknown field `tiles_for_user`"),
        (("hung_seconds = 5", "hung_seconds = -1"), 13, "more than 0"),
        (("[[0], [1], [2], [3]]", "[[0]]"), 9, "1 lists for 4 tiles"),
        (("chips = 2", "chips 2"), 6, "not TOML"),
        (("[shape]", "[shapes]"), 3, "unknown field `shapes`"),
    ],
)
def test_mistakes_have_a_line(tmp_path: Path, change: tuple[str, str], line: int, why: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(UserError) as e:
        read_site(path)
    assert f"{path}:{line}: " in str(e.value) and why in str(e.value)


def test_a_site_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_site(tmp_path / "none.toml")
