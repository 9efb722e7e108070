"""Packing and order, without a daemon."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.errors import UserError
from tilework.tiles.asks import Ask, capped, parse
from tilework.tiles.leases import Lease
from tilework.tiles.ledger import Ledger, Waiting
from tilework.tiles.machine import Core, Gpu, Machine, numbers, ranges
from tilework.tiles.placement import choose, fitted, grants, inside, useful
from tilework.tiles.records import Record
from tilework.tiles.site import Limits, Site
from tilework.tiles.topology import detect

CORES = tuple(Core(0, 0, (i,)) for i in range(4))
NODE = detect("SN10-8", Site(), Machine(CORES))
ALL = {t.index for t in NODE.tiles}


def line(*requests: tuple[object, Ask]) -> list[tuple[object, Ask, set[int]]]:
    """A queue of processes that may use every CPU."""
    return [(who, ask, ALL) for who, ask in requests]


def test_small_jobs_share_a_chip_and_leave_others_whole() -> None:
    free = set(ALL)
    for _ in range(2):
        free -= set(choose(NODE, free, Ask(count=2)) or ())
    assert sum(all(t.index in free for t in chip) for chip in NODE.chips) == len(NODE.chips) - 1
    # A chip with two free tiles is filled before a whole one is touched.
    free = ALL - {0, 1, 9}
    assert choose(NODE, free, Ask(count=2)) == [2, 3] and choose(NODE, free, Ask(count=3)) == [8, 10, 11]


def test_jobs_of_one_chip_go_where_the_cores_are_free() -> None:
    """32 tiles on 4 cores: 8 neighbouring tiles, two chips, share a core."""
    first = choose(NODE, ALL, Ask(chips=1))
    second = choose(NODE, ALL - set(first), Ask(chips=1))
    assert {c for i in first for c in NODE.tiles[i].cpus}.isdisjoint({c for i in second for c in NODE.tiles[i].cpus})


def test_large_jobs_take_whole_chips_near_each_other() -> None:
    taken = choose(NODE, ALL, Ask(count=10))
    boards = {NODE.tiles[i].board for i in taken}
    assert len(taken) == 10 and len(boards) == 2


def test_backfill_takes_only_what_the_head_cannot_use() -> None:
    free = ALL - {0}
    # The head wants tile 0 and 1: everybody else may pass, but not with tile 1.
    made = grants(NODE, free, ALL, line(("head", Ask(tiles=(0, 1))), ("next", Ask(tiles=(1,))), ("later", Ask(count=4))))
    assert [r for r, _ in made] == ["later"] and 1 not in made[0][1]
    # The head wants more tiles than are free: any tile helps it, so nobody passes.
    assert grants(NODE, {3, 4}, ALL, line(("head", Ask(count=3)), ("next", Ask(count=1)))) == []


asks = st.one_of(
    st.integers(1, 32).map(lambda n: Ask(count=n)),
    st.integers(1, 8).map(lambda n: Ask(chips=n)),
    st.sets(st.integers(0, 31), min_size=1, max_size=6).map(lambda s: Ask(tiles=tuple(sorted(s)))),
)


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 31)), st.lists(asks, min_size=1, max_size=8))
def test_nobody_gets_what_is_not_free_and_order_holds(free: set[int], queue: list[Ask]) -> None:
    made = grants(NODE, free, ALL, line(*enumerate(queue)))
    taken = [i for _, tiles in made for i in tiles]
    assert len(taken) == len(set(taken)) and set(taken) <= free
    for number, tiles in made:
        assert len(tiles) == (queue[number].count or len(queue[number].tiles or ()) or 4 * queue[number].chips)
    waiting = [i for i in range(len(queue)) if i not in [n for n, _ in made]]
    if waiting:  # nobody behind the first who waits has taken anything that he could have used
        head = waiting[0]
        helpful = useful(NODE, ALL, queue[head])
        assert all(not helpful & set(tiles) for n, tiles in made if n > head)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_head_is_never_delayed_and_nobody_starves(data: st.DataObject) -> None:
    """Two worlds with the same requests and the same durations: with backfill the first in line starts no later than without."""
    queue = data.draw(st.lists(st.tuples(asks, st.integers(1, 5)), min_size=2, max_size=10))

    def simulate(backfill: bool) -> list[int]:
        free, running, waiting, started = set(ALL), [], list(range(len(queue))), [-1] * len(queue)
        for now in range(200):
            for end, tiles in [r for r in running if r[0] == now]:
                free |= set(tiles)
                running.remove((end, tiles))
            those = [(i, queue[i][0]) for i in waiting]
            made = []
            if backfill:
                made = grants(NODE, free, ALL, line(*those))
            else:
                for i, ask in those:
                    tiles = choose(NODE, free - {t for _, taken in made for t in taken}, ask)
                    if tiles is None:
                        break
                    made.append((i, tiles))
            for i, tiles in made:
                started[i] = now
                free -= set(tiles)
                running.append((now + queue[i][1], tiles))
                waiting.remove(i)
        return started

    assert all(s >= 0 for s in simulate(True)), "somebody never started"
    # The head: the first that cannot start at once in either world.
    plain, filled = simulate(False), simulate(True)
    late = [i for i, s in enumerate(plain) if s > 0]
    if late:
        assert filled[late[0]] <= plain[late[0]]


def test_what_can_be_asked_for() -> None:
    assert parse("4", NODE) == Ask(count=4) and parse("chips:2", NODE) == Ask(chips=2)
    assert parse("0-2,8", NODE) == Ask(tiles=(0, 1, 2, 8)) and len(parse("all", NODE).tiles or ()) == 32
    assert parse("/XRDU_0/RDU_1", NODE) == Ask(tiles=(4, 5, 6, 7))
    for wrong in ("", "0", "-1", "four", "chips:0", "1,,2", "/nowhere", "/", "//"):
        with pytest.raises(UserError):
            parse(wrong, NODE)
    ask, note = capped(Ask(count=99), NODE)
    assert ask.count == 32 and "99 tiles asked for; this node has 32 tiles" in note
    assert capped(Ask(chips=9), NODE)[0].chips == 8 and capped(Ask(tiles=(1, 40)), NODE)[0].tiles == (1,)
    with pytest.raises(UserError, match="none of the tiles"):
        capped(Ask(tiles=(40,)), NODE)
    with pytest.raises(UserError, match="no GPU"):
        capped(Ask(count=1, gpu=True), NODE)


def test_gpus_by_count() -> None:
    host = detect("host", Site(), Machine(CORES, (Gpu(0, "GPU", "1", 8, 1, 0), Gpu(1, "GPU", "2", 8, 1, 0))))
    free = {t.index for t in host.tiles}
    assert choose(host, free, parse("gpus:1", host)) == [4, 5, 6, 7] and str(parse("gpus:2", host)) == "2 GPUs"
    assert choose(host, free - {5}, parse("gpus:1", host)) == [8, 9, 10, 11], "a whole one"
    assert choose(host, free - {5}, parse("gpus:2", host)) is None
    assert choose(host, free - {5}, parse("gpu-tiles:3", host)) == [4, 6, 7] and str(parse("gpu-tiles:3", host)) == "3 GPU tiles"
    ask, note = capped(parse("gpus:9", host), host)
    assert ask.chips == 2 and "9 GPUs asked for; this node has 2 GPUs" in note
    assert choose(host, free, parse("2", host)) == [0, 1] and parse("all", host).tiles == (0, 1, 2, 3), "CPU tiles"
    for wrong in ("gpus:", "gpus:0", "gpu-tiles:x", "gpus"):
        with pytest.raises(UserError, match="which tiles"):
            parse(wrong, host)
    # A GPU's tile needs no core of its own.
    assert inside(host, {3}) == {3, 4, 5, 6, 7, 8, 9, 10, 11} and fitted(host, inside(host, {3}), parse("gpus:1", host))


def test_a_process_gets_only_tiles_whose_cpus_it_may_use() -> None:
    """32 tiles on 4 cores: CPU 1 has the tiles from 8 to 15."""
    within = inside(NODE, {1})
    assert within == set(range(8, 16)) and inside(NODE, {0, 1}) == set(range(16)) and inside(NODE, {9}) == set()
    made = grants(NODE, ALL, ALL, [("a", Ask(count=4), within), ("b", Ask(count=4), within), ("c", Ask(count=1), within),
                                   ("d", Ask(count=4), ALL)])  # fmt: skip
    assert [who for who, _ in made] == ["a", "b", "d"] and all(set(tiles) <= within for _, tiles in made[:2])
    assert not set(made[2][1]) & within
    assert fitted(NODE, within, Ask(count=9)) is None and fitted(NODE, within, Ask(tiles=(0,))) is None
    assert fitted(NODE, within, Ask(chips=2)) == Ask(chips=2) and fitted(NODE, within, Ask(chips=3)) is None
    cores = Machine(tuple(Core(0, 0, (2 * i, 2 * i + 1)) for i in range(4)))
    host = detect("host", Site(), cores)  # SMT: a core that the process has only half of is none of its tiles
    assert inside(host, {0, 2, 3}) == {1} and inside(host, {0}) == set()
    # Who asks for nothing in particular gets what there is.
    chip, every, share = (capped(ask, host)[0] for ask in (Ask(), parse("all", host), parse("share:1", host)))
    assert fitted(host, {1, 2}, chip) == Ask(count=2) and fitted(host, {1, 2}, every) == Ask(tiles=(1, 2))
    assert fitted(host, {1, 2}, share) == Ask(count=2) and fitted(host, set(), chip) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(asks, st.sets(st.integers(0, 3), min_size=1)), min_size=1, max_size=8))
def test_nobody_is_placed_outside_of_his_mask(queue: list[tuple[Ask, set[int]]]) -> None:
    those = [(i, ask, inside(NODE, cpus)) for i, (ask, cpus) in enumerate(queue)]
    for i, tiles in grants(NODE, ALL, ALL, those):
        assert {cpu for t in tiles for cpu in NODE.tiles[t].cpus} <= queue[i][1]


def test_a_path_is_never_the_whole_node() -> None:
    """`--drain "$TILE"` with TILE unset must not drain everything."""
    for path, count in (("/XRDU_0/RDU_0/TILE_1", 1), ("/XRDU_0/RDU_0/TILE_1/", 1), ("/XRDU_0/RDU_1", 4), ("/XRDU_3/", 8)):
        assert len(NODE.find(path)) == count
    for nothing in ("", "/", "//", "XRDU_0", " "):
        with pytest.raises(UserError, match="names no board, chip or tile") as e:
            NODE.find(nothing)
        assert e.value.expected == "/XRDU_0, /XRDU_0/RDU_0 or /XRDU_0/RDU_0/TILE_0"
    for unknown in ("/XRDU_4", "/XRDU", "/XRDU_0/RDU_0/TILE_1/x", "//XRDU_0"):
        with pytest.raises(UserError, match="no tile"):
            NODE.find(unknown)


def test_platforms() -> None:
    sn30 = detect("SN30-8", Site(), Machine(CORES))
    assert len(sn30.tiles) == 64 and sn30.tiles[-1].path == "/XRDU_3/RDU_1/TILE_7" and sn30.virtual
    assert [sn30.tiles[i].cpus for i in (0, 15, 16, 63)] == [(0,), (0,), (1,), (3,)] and "64 virtual tiles" in sn30.note
    many = detect("SN10-8", Site(), Machine(tuple(Core(0, 0, (2 * i, 2 * i + 1)) for i in range(64))))
    assert many.tiles[1].cpus == (4, 5, 6, 7)
    two = Machine(tuple(Core(p, 2 * p + n, (8 * p + 4 * n + i,)) for p in (0, 1) for n in (0, 1) for i in range(3)),
                  (Gpu(0, "GPU", "1", 10, 1, 2),))  # fmt: skip
    host = detect("host", Site(), two)
    assert [len(c) for c in host.chips] == [3, 3, 3, 3, 4] and not host.virtual
    assert host.tiles[-1].path == "/board_2/chip_0/tile_3" and [t.multiprocessors for t in host.chips[-1]] == [2, 3, 2, 3]
    assert host.tiles[-1].cpus == (8, 9, 10)
    with pytest.raises(UserError, match="SN10-8"):
        detect("SN10", Site(), two)


def waiting(ask: Ask, uid: int) -> Waiting:
    return Waiting(Record("w", "exclusive", uid, 1, 1, 0.0), ask, 1e9)


def test_a_user_at_his_limit_steps_aside() -> None:
    ledger = Ledger(NODE, Limits(tiles_per_user=8, requests_per_user=3))
    ledger.leases["a"] = Lease(Record("a", "exclusive", 1, -1, 1, 0.0, tuple(range(8))), None)
    for uid, count in ((1, 4), (2, 8)):
        ledger.wait(waiting(Ask(count=count), uid))
    served = ledger.next_one()
    assert served is not None and served[0].record.uid == 2
    ledger.leases["b"] = Lease(Record("b", "exclusive", 2, -1, 1, 0.0, tuple(served[1])), None)
    assert ledger.next_one() is None
    with pytest.raises(UserError, match="larger than one user may hold"):
        ledger.wait(waiting(Ask(count=9), 1))
    for _ in range(2):
        ledger.wait(waiting(Ask(count=1), 1))
    with pytest.raises(UserError, match="too many requests"):
        ledger.wait(waiting(Ask(count=1), 1))


@given(st.lists(st.integers(0, 300)))
def test_ranges_and_numbers_are_each_others_opposite(found: list[int]) -> None:
    assert numbers(ranges(found)) == sorted(set(found))
    assert ranges([0, 1, 2, 3, 8]) == "0-3,8" and ranges([]) == ""
