"""The daemon's memory of a page: short, and right for short windows."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tilework.tiles import client, holding, usage
from tilework.tiles.page import EXEC, SIZE, Page
from tilework.tiles.usage import Usage


def test_asking_often_leaves_nothing_behind() -> None:
    p = Page()
    looked = Usage(os.dup(p.fd))
    begin = time.monotonic()
    for _ in range(1000):
        looked.about(2.0)
    assert len(looked._kept) <= 1 + (time.monotonic() - begin) / usage.KEPT_EVERY_SECONDS
    looked.close()


def test_only_the_last_minute_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Page()
    looked = Usage(os.dup(p.fd))
    monkeypatch.setattr(usage, "KEPT_SECONDS", 0.3)
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        looked.sample()
    assert len(looked._kept) <= 4 and looked._kept[-1].at - looked._kept[0].at <= 0.3e9
    looked.close()


@pytest.mark.parametrize("window", [0.0, 0.1, 0.2])
def test_a_short_window_shows_what_is_now(window: float) -> None:
    """Busy, then idle: however short the window, the busy time before is not in it."""
    p = Page()
    slot, looked = p.slot(), Usage(os.dup(p.fd))
    with slot.during(EXEC):
        for _ in range(5):
            time.sleep(0.1)
            looked.sample()
        slot.add_steps(1000)
        busy = looked.about(window)
    for _ in range(4):
        time.sleep(0.1)
        looked.sample()
    idle = looked.about(window)
    assert busy["shares"]["exec"] > 90 and idle["shares"]["idle"] > 90, (busy, idle)
    assert idle["steps_per_second"] == 0 and looked.about(60.0)["steps_per_second"] > 0
    assert 40 < looked.about(60.0)["shares"]["exec"] < 70, "longer than the lease: since it began"
    looked.close()


def test_what_went_before_the_lease_does_not_count() -> None:
    p = Page()
    looked = Usage(os.dup(p.fd))
    time.sleep(0.25)
    looked.sample()
    p.restart()
    with p.process.during(EXEC):
        time.sleep(0.1)
        found = looked.about(2.0)
    assert found["shares"]["exec"] > 50 and found["seconds"]["idle"] < 0.25
    looked.close()


def test_seconds_add_up_to_the_age_of_the_lease(run_folder: Path) -> None:
    lease = holding.hold("1", lambda _: None)
    slots = [lease.page.slot() for _ in range(4)]
    for slot in slots:
        slot.enter(EXEC)
    time.sleep(0.5)
    about = client.view().leases[0]
    assert sum(about.seconds.values()) == pytest.approx(about.held_seconds, rel=0.5)
    assert 0.5 <= about.seconds["exec"] < 1.5 * about.held_seconds, "once, not for each of the four"
    for slot in slots:
        slot.close()
    holding.let_go(lease)


@pytest.mark.parametrize("size", [0, 100, SIZE])
def test_what_is_no_page_is_unknown(size: int) -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, size)
    looked = Usage(fd)
    about = looked.about(2.0)
    assert about["state"] == "unknown" and about["shares"] == {} and looked.stuck_for() == 0
    looked.close()
