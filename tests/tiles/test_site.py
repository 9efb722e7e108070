"""The site file, and its mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilework.errors import UserError
from tilework.tiles.machine import Core, Machine
from tilework.tiles.site import Site, read_site
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
        (("tiles_per_user", "tiles-per-user"), 12, "unknown field `tiles-per-user`"),
        (("title = ", "# title = "), 3, "missing required field `title`"),
        (("[limits]\n", "limits.tiles_per_user = 0\n[limit]\n"), 11, "unknown field `limits`"),
        (('["BOX", ', '["A/B", '), 8, "'A/B' is no name"),
        (('"UNIT", ', '"", '), 8, "'' is no name"),
        (('"TILE"]', '"T x"]'), 8, "'T x' is no name"),
        (("[[0], ", "[[], "), 9, "gives tile 0 no CPU"),
        (("hung_seconds = 5", "hung_seconds = nan"), 13, "more than 0"),
        (("cpus = [[0], [1], [2], [3]]", "cpus = [\n[0],\n[1],\n[2],\n[3]\n]\nrows = 1"), 15, "unknown field `rows`"),
    ],
)
def test_mistakes_have_a_line(tmp_path: Path, change: tuple[str, str], line: int, why: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(UserError) as e:
        read_site(path)
    assert f"{path}:{line}: " in str(e.value) and why in str(e.value)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ('platform = "host"\nlimits = {tiles_per_user = 0}\n', 2, "limits.tiles_per_user must be more than 0"),
        ("\nlimits = {tiles_for_user = 1}  # inline\n", 2, "unknown field `tiles_for_user`"),
        ("limits.wait_seconds = 5\nlimits.hung_seconds = -1\n", 2, "limits.hung_seconds must be more than 0"),
        ('# x\n"limits" . hung_seconds = "a"\n', 2, "Expected `float`, got `str`"),
        ('[limits]\nwait_seconds = 1\n[ shape ] # head\ntitle = "x"\nboards = 1\nchips = 1\ntiles = "2"', 7, "Expected `int`"),
    ],
)
def test_other_ways_to_write_toml_have_lines_too(tmp_path: Path, text: str, line: int, why: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(UserError) as e:
        read_site(path)
    assert f"{path}:{line}: " in str(e.value) and why in str(e.value)


def test_mistakes_that_the_machine_shows_have_a_line(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    for change, line, why in (
        (("[3]]", "[99]]"), 9, "CPUs that this machine does not have"),
        (('platform = "lab"', 'platform = "SN30"'), 1, "no platform 'SN30'"),
    ):
        path.write_text(GOOD.replace(*change))
        with pytest.raises(UserError) as e:
            detect(None, read_site(path), Machine(tuple(Core(0, 0, (i,)) for i in range(4))))
        assert e.value.id == "site-file" and f"{path}:{line}: " in str(e.value) and why in str(e.value)
    assert "did you mean 'SN30-8'?" in e.value.expected
    with pytest.raises(UserError) as e:  # what a user asked for is not the file's mistake
        detect("SN30", Site(), Machine(tuple(Core(0, 0, (i,)) for i in range(4))))
    assert e.value.id == "tiles-platform"


def test_a_site_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(b'# a\nplatform = "\xff"\n')
    with pytest.raises(UserError, match="not UTF-8") as e:
        read_site(path)
    assert f"{path}:2: " in str(e.value)


def test_a_site_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_site(tmp_path / "none.toml")
