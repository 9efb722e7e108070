"""Checkpoints: whole or not at all, kept and pruned, damaged ones passed over. And training with them, in one process."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilework
from tilework.data import Arrays, Feed, Position
from tilework.data.named import source_of
from tilework.errors import MachineError, UserError
from tilework.runs.checkpoints import Checkpoints, name_of
from tilework.runs.folder import RunFolder
from tilework.runs.training import Training
from tilework.runtime.checkpoint import State

ROWS = 4


def state(step: int, size: int = 8) -> State:
    tensors = {
        "param/w": torch.full((size,), float(step)),
        "state/w/exp_avg": torch.arange(size) * 0.5,
        "buffer/n": torch.tensor(step),
    }
    return State(tensors, step, (7, step, 0), {"lr": 0.1 / step})


def save(found: Checkpoints, step: int, loss: float = 1.0, **kwargs) -> None:
    found.save(state(step), artifact="abc", position={"epoch": 1, "batch": step}, metrics={"loss": loss}, **kwargs)
    found.wait()


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path / "c")
    save(found, 30)
    saved, back = Checkpoints(tmp_path / "c").newest()
    expected = state(30)
    assert (back.num_steps, back.random, back.hyper) == (30, (7, 30, 0), expected.hyper)
    assert back.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(back.tensors[k], t) and back.tensors[k].dtype == t.dtype for k, t in expected.tensors.items())
    assert saved.position == {"epoch": 1, "batch": 30} and saved.artifact == "abc"
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-000000030"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path, keep=2)
    for step, loss in ((1, 0.9), (2, 0.2), (3, 0.5), (4, 0.6), (5, 0.7)):
        save(found, step, loss)
    assert found.steps() == [2, 4, 5]
    save(found, 6, 0.1)
    assert found.steps() == [5, 6]


def damaged(tmp_path: Path) -> tuple[Checkpoints, list[str]]:
    told: list[str] = []
    found = Checkpoints(tmp_path, report=told.append)
    for step in (1, 2, 3):
        save(found, step)
    return found, told


@pytest.mark.parametrize("file", ["tensors-00000-of-00001.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, file: str, how: str) -> None:
    found, told = damaged(tmp_path)
    path = tmp_path / name_of(3) / file
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[:-3])
    else:
        path.unlink()
    saved, _ = found.newest()
    assert saved.step == 2
    assert len(told) == 1 and str(path) in told[0] and "falling back to step 2" in told[0]


def test_no_checkpoint_can_be_used(tmp_path: Path) -> None:
    found, told = damaged(tmp_path)
    for step in (1, 2, 3):
        (tmp_path / name_of(step) / "checkpoint.json").write_text("{}")
    with pytest.raises(UserError, match="none of its 3 checkpoints"):
        found.newest()
    assert len(told) == 3 and "there is no earlier one" in told[2]
    assert Checkpoints(tmp_path / "other").newest() is None


def test_what_was_left_half_done_is_removed(tmp_path: Path) -> None:
    found, _ = damaged(tmp_path)
    (tmp_path / ".step-000000004.part").mkdir()
    (tmp_path / ".gone-step-000000000").mkdir()
    Checkpoints(tmp_path, rank=1, ranks=2)
    assert len(list(tmp_path.iterdir())) == 5
    Checkpoints(tmp_path)
    assert found.steps() == [1, 2, 3] and len(list(tmp_path.iterdir())) == 3


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    found, _ = damaged(tmp_path)
    (tmp_path / name_of(3) / "checkpoint.json").write_text("torn")
    save(found, 3)
    assert found.newest()[0].step == 3


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """No file may grow beyond 4 kB: what the system says is what it says when the disk is full, but for the number."""
    told: list[str] = []
    found = Checkpoints(tmp_path, report=told.append)
    save(found, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        found.save(state(2, size=100_000), artifact="abc", position={})
        found.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.problem is not None and "step 2 was not written" in told[0] and "earlier ones are kept" in told[0]
    assert found.newest()[0].step == 1 and [p.name for p in tmp_path.iterdir()] == [name_of(1)]
    save(found, 3)
    assert found.problem is None and found.newest()[0].step == 3


def test_ranks_write_their_parts(tmp_path: Path) -> None:
    """Each rank its own statistics; shared state once; sharded state where it is kept."""
    both = [Checkpoints(tmp_path, rank=r, ranks=2) for r in range(2)]
    shared = {"param/w": torch.ones(3)}
    for rank, found in enumerate(both):
        own = State(
            {**shared, "buffer/mean": torch.tensor(float(rank)), f"state/p{rank}/m": torch.full((2,), rank)}, 5, (1, 2, 3), {}
        )
        found.save(own, artifact="abc", position={}, sharded=True)
    for found in both:
        found.wait()
    for rank, found in enumerate(both):
        _, back = found.newest()
        assert back.tensors["buffer/mean"] == rank and set(back.tensors) == {"param/w", "buffer/mean", "state/p0/m", "state/p1/m"}
    _, alone = Checkpoints(tmp_path).newest()
    assert alone.tensors["buffer/mean"] == 0


# ---- training ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(F.dropout(torch.relu(self.norm(self.first(x))), 0.2, self.training))


def a_step() -> tilework.Step:
    torch.manual_seed(0)
    model = Net()
    return tilework.Step(model=model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
                         inputs=(torch.randn(ROWS, 6),), targets=(torch.randint(0, 3, (ROWS,)),))  # fmt: skip


@pytest.fixture(scope="module")
def path(workshop: Path) -> Path:
    tilework.compile(a_step(), workshop / "resume.pef", options=tilework.Options(opt_level=1, programs="fused"))
    return workshop / "resume.pef"


def records(bad: int | None = None, value: float = float("nan"), label: int | None = None) -> Arrays:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(48, 6, generator=g)
    y = x[:, :3].argmax(1)
    if bad is not None:
        x[bad] = value
    if label is not None:
        y[7] = label
    return Arrays((x, y))


def train(
    path: Path, folder: Path, steps: int, source: Arrays | None = None, seed: int = 4, **kwargs
) -> tuple[Training, list[str]]:
    told: list[str] = []
    session = tilework.load(path, seed=seed, num_threads=1)
    feed = Feed(source or records(), ROWS, seed=seed)
    training = Training(session, feed, folder, steps=steps, save_every=10, report=told.append, **kwargs)
    training.run()
    return training, told


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(m["step"], m["loss"]) for m in RunFolder(folder).metrics()]


def same(one: Training, other: Training) -> None:
    a, b = one.session.tensors(), other.session.tensors()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert one.session.random_state() == other.session.random_state()


def test_in_parts_is_the_same_as_at_once(path: Path, tmp_path: Path) -> None:
    whole, _ = train(path, tmp_path / "whole", 60)
    for steps in (7, 12, 33, 60):  # in the first epoch, at its end, between checkpoints
        part, told = train(path, tmp_path / "parts", steps, resume=True)
    assert part.done.resumed == 33 and "continuing from step-000000033" in told
    same(whole, part)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 60
    note = RunFolder(tmp_path / "parts").read()
    assert note["state"] == "done" and note["step"] == 60 and note["digest"] == whole.session.artifact.digest


def test_the_norm_of_the_gradients_is_written(tmp_path: Path) -> None:
    """Of each step, whatever the number of steps in a call; also after a resume."""
    step = a_step()
    path = tmp_path / "norms.pef"
    tilework.compile(step, path, options=tilework.Options(opt_level=1, programs="fused", grad_norm=True))
    train(path, tmp_path / "whole", 30)
    train(path, tmp_path / "parts", 13)
    train(path, tmp_path / "parts", 30, resume=True)
    norms = [[m["grad_norm"] for m in RunFolder(tmp_path / part).metrics()] for part in ("whole", "parts")]
    assert len(norms[0]) == 30 and norms[0] == norms[1]
    with tilework.load(path, seed=4, num_threads=1) as session:
        feed = Feed(records(), ROWS, seed=4)
        for chunk, norm in zip(feed.chunks(Position(), itertools.repeat(1)), norms[0], strict=False):
            session.run(*chunk.inputs)
            assert session.grad_norm == norm


def test_the_optimizer_and_the_random_numbers_matter_here(path: Path, tmp_path: Path) -> None:
    """What the test above would miss otherwise."""
    whole, _ = train(path, tmp_path / "whole", 20)
    for change in ("seed", "state"):
        folder = tmp_path / change
        train(path, folder, 10)
        session = tilework.load(path, seed=4, num_threads=1)
        training = Training(session, Feed(records(), ROWS, seed=4), folder, steps=20, resume=True)
        position = training._begin()
        if change == "seed":
            session.seed(5)
        else:
            session.load_tensors(session.state_dict())  # weights alone: fresh moments
        training._train(position)
        assert training.done.losses[-1] != whole.done.losses[-1]


def test_a_run_is_not_overwritten(path: Path, tmp_path: Path) -> None:
    train(path, tmp_path / "r", 10)
    with pytest.raises(UserError, match="has a run already"):
        train(path, tmp_path / "r", 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a folder"):
        train(path, tmp_path / "file", 20)


def test_it_goes_on_from_the_one_before_a_damaged_one(path: Path, tmp_path: Path) -> None:
    whole, _ = train(path, tmp_path / "whole", 40)
    train(path, tmp_path / "r", 30)
    file = tmp_path / "r" / "checkpoints" / name_of(30) / "tensors-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    again, told = train(path, tmp_path / "r", 40, resume=True)
    assert any("falling back to step 20" in t for t in told)
    same(whole, again)
    assert losses(tmp_path / "r") == losses(tmp_path / "whole")


def test_what_changed_is_said(path: Path, tmp_path: Path) -> None:
    train(path, tmp_path / "r", 10)
    _, told = train(path, tmp_path / "r", 20, seed=9, resume=True)
    assert any("seed was 4, is 9" in t for t in told)


def test_a_loss_that_is_not_a_number_ends_the_run(path: Path, tmp_path: Path) -> None:
    """Checkpoints from before it stay; none is made of what came after."""
    train(path, tmp_path / "r", 10, records())
    with pytest.raises(UserError, match=r"the loss of step \d+ \(epoch \d\) is nan") as e:
        train(path, tmp_path / "r", 40, records(bad=3), resume=True)
    assert e.value.id == "loss-nan" and "the checkpoint of step 10 is good" in e.value.fix
    assert "x is not finite in record 3 (row 3 of array 0, array 1)" in e.value.found
    assert Checkpoints(tmp_path / "r" / "checkpoints").steps() == [10]
    assert RunFolder(tmp_path / "r").read()["state"].startswith("failed: UserError: [loss-nan]")


def test_an_exploding_loss_ends_the_run(path: Path, tmp_path: Path) -> None:
    """A hyperparameter that is given goes before the checkpoint's, and that is said."""
    train(path, tmp_path / "r", 10)
    told: list[str] = []
    session = tilework.load(path, seed=4, num_threads=1)
    training = Training(session, Feed(records(), ROWS, seed=4), tmp_path / "r", steps=40, save_every=1, resume=True,
                        hyper={"lr": 1e38}, report=told.append)  # fmt: skip
    with pytest.raises(UserError) as e:
        training.run()
    assert "the inputs of its batch are finite (records " in e.value.found or "weights" in e.value.summary
    assert e.value.id == "loss-nan" and any("lr was 0.01, is 1e+38" in t for t in told)
    _, good = Checkpoints(tmp_path / "r" / "checkpoints").newest()
    assert all(torch.isfinite(t).all() for k, t in good.tensors.items() if k.startswith("param"))


def test_a_label_out_of_range(path: Path, tmp_path: Path) -> None:
    train(path, tmp_path / "r", 10)
    with pytest.raises(UserError, match=r"out of range, in (one of the steps \d+ to|step) \d+ .epoch [12].") as e:
        train(path, tmp_path / "r", 40, records(label=3), resume=True)
    assert e.value.found.endswith("0 to 3 (0 to 2 are there); target of record 7 (row 7 of array 0, array 1)")
    assert re.match("the checkpoint of step (10|20) is good", e.value.fix)
    again, _ = train(path, tmp_path / "r", 40, resume=True)
    whole, _ = train(path, tmp_path / "whole", 40)
    same(whole, again)


def test_the_last_checkpoint_cannot_be_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(MachineError, match="the last checkpoint, of step 10, was not written") as e:
        train(path, tmp_path / "r", 10)
    assert e.value.id == "run-unwritten" and "No space left" in e.value.found and "there is no earlier one" in e.value.fix
    assert "not written" in (tmp_path / "r" / "log.txt").read_text()


def test_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.begin({}, resume=False)
    code = (
        "import sys; from tilework.runs.folder import RunFolder; f = RunFolder(sys.argv[1]); print(f.trainer());"
        "f.begin({}, resume=True)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], capture_output=True, text=True)
    assert done.stdout.split() == [str(os.getpid())] and f"found:    process {os.getpid()}" in done.stderr
    folder.unlock()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["None"]


def test_threads_stay_where_the_library_rounds_by_them(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilework.cli.in_folder import keep_threads

    monkeypatch.setenv("TILEWORK_ADAPT", "x")
    monkeypatch.delenv("TILEWORK_ADAPT")
    keep_threads(path, False)
    assert "TILEWORK_ADAPT" not in os.environ
    model = nn.Conv2d(3, 4, 3)
    step = tilework.Step(model=model, loss=lambda out: out.mean(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                         inputs=(torch.randn(2, 3, 8, 8),))  # fmt: skip
    tilework.compile(step, tmp_path / "c.pef", options=tilework.Options(device="reference"))
    keep_threads(tmp_path / "c.pef", False)
    assert os.environ["TILEWORK_ADAPT"] == "0"


def test_half_a_line_of_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.begin({}, resume=False)
    folder.add_metrics([{"step": s, "loss": s / 3} for s in range(1, 6)])
    with open(tmp_path / "r" / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "lo')
    folder.cut_metrics(4)
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[2])["loss"] == 1.0


def test_metrics_wait_for_room(tmp_path: Path) -> None:
    """A full disk takes no half line, and no line is lost once there is room again."""
    folder = RunFolder(tmp_path)
    folder.add_metrics([{"step": 1}])
    (tmp_path / "metrics.jsonl").rename(tmp_path / "aside")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "log.txt").symlink_to("/dev/full")
    folder.say("nobody reads this")
    folder.add_metrics([{"step": 2}])
    assert "No space left" in folder.problem and len(folder.waiting) == 1
    (tmp_path / "aside").rename(tmp_path / "metrics.jsonl")
    folder.add_metrics([{"step": 3}])
    assert [m["step"] for m in folder.metrics()] == [1, 2, 3] and not folder.problem and not folder.waiting


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 96 KB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(place)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no disk of its own can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_run_on_a_full_disk(path: Path, tmp_path: Path, small_disk: Path) -> None:
    """The run goes on to its end and says what is missing; with room again, it ends as if nothing had been."""
    with pytest.raises(MachineError, match="the last checkpoint, of step 1200, was not written") as e:
        train(path, small_disk / "r", 1200)
    good = Checkpoints(small_disk / "r" / "checkpoints").steps()[-1]
    assert f"the checkpoint of step {good} is good" in e.value.fix and 0 < good < 1200
    lines = losses(small_disk / "r")
    assert lines and (small_disk / "r" / "metrics.jsonl").read_text().endswith("}\n")
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    again, told = train(path, small_disk / "r", 1200, resume=True)
    assert f"continuing from {name_of(good)}" in told
    whole, _ = train(path, tmp_path / "whole", 1200)
    same(whole, again)
    assert losses(small_disk / "r") == losses(tmp_path / "whole")


def test_a_folder_that_cannot_be_written(path: Path) -> None:
    with pytest.raises(MachineError, match=r"\[run-unwritten\]"):
        train(path, Path("/proc/none"), 1)


def test_random_data_cannot_be_continued() -> None:
    with pytest.raises(UserError, match="random data have no records"):
        source_of("random", [])


def test_damaged_ones_of_later_steps_do_not_count(tmp_path: Path) -> None:
    """After a fallback the run has fewer steps than what it could not use."""
    before = Checkpoints(tmp_path, keep=2)
    save(before, 8, 0.5)
    save(before, 10, 0.1)
    found = Checkpoints(tmp_path, keep=1)
    (tmp_path / name_of(10) / "tensors-00000-of-00001.safetensors").write_bytes(b"damaged")
    assert found.newest()[0].step == 8
    save(found, 9, 0.6)
    assert found.newest()[0].step == 9


def test_ranks_give_up_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cannot write: nobody waits for it, all say so, and the next one is whole."""
    told: list[list[str]] = [[], []]
    ranks = [Checkpoints(tmp_path, rank=r, ranks=2, report=told[r].append) for r in range(2)]

    def both(step: int, bad: int | None) -> None:
        with monkeypatch.context() as m:
            whole = Checkpoints._write_tensors

            def full(self: Checkpoints, part: Path, tensors: object) -> None:
                whole(self, part, tensors) if self.rank != 0 or bad != 0 else part.mkdir(parents=True)
                if self.rank == bad:
                    raise OSError(28, "No space left on device")

            m.setattr(Checkpoints, "_write_tensors", full)
            for found in ranks:
                found.save(state(step), artifact="abc", position={}, metrics={"loss": 1.0})
            for found in ranks:
                found.wait()

    monkeypatch.setattr("tilework.runs.checkpoints.PATIENCE", 20.0)
    for step, bad in ((1, None), (2, 0), (3, 1), (4, 0), (5, None)):
        both(step, bad)
        assert [found.problem is None for found in ranks] == [bad is None] * 2 or bad == 1
        assert ranks[0].newest()[0].step == (5 if step == 5 else 1)
    assert any("No space left" in t for t in told[0]) and any("No space left" in t for t in told[1])
    assert any("another rank could not write" in t for t in told[1])
    assert not any("nothing after" in t for t in told[0] + told[1])


def test_epochs_are_counted_where_the_data_stand(path: Path, tmp_path: Path) -> None:
    """With other rows in a batch an epoch has another number of steps; two epochs are two epochs."""
    session = tilework.load(path, seed=4, num_threads=1)
    rows = len(records())
    Training(session, Feed(records(), ROWS, seed=4), tmp_path / "r", epochs=1).run()
    assert session.num_steps == rows // ROWS
    half = Feed(records(), ROWS, seed=4, ranks=2)  # as one of two ranks has it: half as many steps in an epoch
    told: list[str] = []
    training = Training(session, half, tmp_path / "r", epochs=2, resume=True, report=told.append)
    assert training.run().step == rows // ROWS + half.num_batches
    assert RunFolder(tmp_path / "r").read()["steps"] == training.steps == rows // ROWS + half.num_batches
    epochs = [m["epoch"] for m in RunFolder(tmp_path / "r").metrics()]
    assert epochs == [1] * (rows // ROWS) + [2] * half.num_batches
    with pytest.raises(UserError, match="nothing says where this run ends"):
        Training(session, half, tmp_path / "s")


def test_weights_of_another_run_are_a_beginning(path: Path, tmp_path: Path) -> None:
    session = tilework.load(path, seed=4, num_threads=1)
    Training(session, Feed(records(), ROWS, seed=4), tmp_path / "a", steps=12).run()
    session.save(tmp_path / "w.safetensors")
    fresh = tilework.load(path, weights=tmp_path / "w.safetensors", num_threads=1)
    done = Training(fresh, Feed(records(), ROWS, seed=4), tmp_path / "b", steps=8).run()
    assert done.step == 8 and [s for s, _ in losses(tmp_path / "b")] == list(range(1, 9))
    assert losses(tmp_path / "b")[0][1] < losses(tmp_path / "a")[0][1]


@pytest.mark.slow
def test_calls_are_small_where_data_are_slow(path: Path, tmp_path: Path) -> None:
    """A signal is heard between calls: they are sized by the data's time too. The numbers stay."""
    import time

    x, y = records().arrays

    def read(number: int):
        time.sleep(0.02)
        return x[number], y[number]

    calls: list[int] = []
    session = tilework.load(path, seed=4, num_threads=1)
    run = session.run
    session.run = lambda *a, **k: calls.append(k["num_steps"]) or run(*a, **k)  # type: ignore[method-assign]
    Training(session, Feed(tilework.data.Each(len(x), read, str), ROWS, seed=4), tmp_path / "slow", steps=60).run()
    assert sum(calls) == 60 and max(calls) <= 32
    train(path, tmp_path / "quick", 60)
    assert losses(tmp_path / "slow") == losses(tmp_path / "quick")


def test_json_has_no_word_for_what_is_no_number(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_metrics([{"step": 1, "loss": float("nan"), "samples_per_second": 2.0}])
    folder.note(loss=float("inf"))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "samples_per_second": 2.0}
    assert folder.read()["loss"] is None and str(next(folder.metrics())["loss"]) == "nan"
