"""DataLoader in its three modes, several processes, and what goes wrong while data is loaded ahead."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from pop_helpers import Classifier, data, eager, options, same, trained, twin
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import poptorch
from poptorch import AsynchronousDataAccessor, DataLoader, DataLoaderMode

MODES = list(DataLoaderMode)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        if i >= self.count:
            raise IndexError(i)
        return torch.tensor(float(i)), i * 2


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor(float(i)) for i in range(10))


def rows(loader) -> list[list[float]]:
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize(("d", "g", "r", "size"), [(1, 1, 1, 3), (2, 1, 1, 2), (1, 3, 1, 1), (2, 1, 2, 1), (2, 2, 2, 1)])
def test_a_batch_is_for_a_whole_call(d: int, g: int, r: int, size: int, mode: DataLoaderMode) -> None:
    loader = DataLoader(options(d, g, r), Numbers(17), batch_size=size, mode=mode)
    combined = size * d * g * r
    found = rows(loader)
    assert loader.combinedBatchSize == combined and len(found) == len(loader) == 17 // combined
    assert [n for b in found for n in b] == list(range(17 // combined * combined))
    assert rows(loader) == found  # another epoch
    loader.terminate()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_the_last_batch_can_be_kept(mode: DataLoaderMode) -> None:
    loader = DataLoader(options(2), Numbers(10), batch_size=2, drop_last=False, mode=mode)
    assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and len(loader) == 3


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_shuffled(mode: DataLoaderMode) -> None:
    loader = DataLoader(options(), Numbers(16), batch_size=4, shuffle=True, mode=mode)
    first, second = ([n for b in rows(loader) for n in b] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(16)) and first != second
    assert first != list(range(16))


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_lose_nothing(mode: DataLoaderMode, workers: int) -> None:
    loader = DataLoader(options(2), Numbers(12), batch_size=2, num_workers=workers, mode=mode, persistent_workers=False)
    assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    loader.terminate()


def test_rebatching_uses_small_batches_of_workers() -> None:
    loader = DataLoader(options(2), Numbers(13), batch_size=3, mode=DataLoaderMode.AsyncRebatched, rebatched_worker_size=4)
    assert loader.batch_size == 4 and rows(loader) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_the_defaults() -> None:
    loader = DataLoader(options(), Numbers(4))
    assert loader.batch_size == 1 and loader.drop_last and not loader.persistent_workers and loader.num_workers == 0
    assert rows(loader) == [[0.0], [1.0], [2.0], [3.0]]
    assert DataLoader(options(), Numbers(4), num_workers=1).persistent_workers


def test_the_options_are_frozen_and_kept() -> None:
    opts = options()
    assert DataLoader(opts, Numbers(4)).options is opts
    with pytest.raises(AttributeError, match="frozen"):
        opts.deviceIterations(4)


def test_no_batch_size() -> None:
    loader = DataLoader(options(), Numbers(3), batch_size=None)
    assert loader.combinedBatchSize is None and [int(b[0]) for b in loader] == [0, 1, 2]


def test_iterable_data() -> None:
    loader = DataLoader(options(2), Stream(), batch_size=2)
    assert [b.tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("drop", "expected"), [(True, [[0, 1, 2, 3], [4, 5, 6, 7]]), (False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])]
)
def test_a_batch_sampler(drop: bool, expected) -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    loader = DataLoader(options(2), Numbers(10), batch_sampler=sampler, drop_last=drop)
    assert rows(loader) == expected and len(loader) == len(expected) and loader.combinedBatchSize == 4


WRONG = [
    lambda: DataLoader({}, Numbers(3)),
    lambda: DataLoader(options(), Numbers(3), batch_size=0),
    lambda: DataLoader(options(), Numbers(3), batch_size="2"),
    lambda: DataLoader(options(), Numbers(3), mode="async"),
    lambda: DataLoader(options(), Numbers(3), async_options={"buffer_size": 2}),
    lambda: DataLoader(options(), Numbers(3), batch_size=None, mode=DataLoaderMode.AsyncRebatched),
    lambda: DataLoader(options(), Numbers(3), batch_size=2, batch_sampler=BatchSampler(RandomSampler(range(3)), 1, False)),
    lambda: DataLoader(options(), Numbers(3), shuffle=True, batch_sampler=BatchSampler(RandomSampler(range(3)), 1, False)),
    lambda: DataLoader(options(), Numbers(3), mode=DataLoaderMode.Async, async_options={"buffer_size": 0}),
    lambda: AsynchronousDataAccessor(3),
]


@pytest.mark.parametrize("make", WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(make) -> None:
    with pytest.raises(poptorch.Error):
        make()


def shares(count: int, processes: int, epochs: int = 1, **kwargs) -> list[list[list[int]]]:
    """[epoch][process] -> rows."""
    loaders = []
    for i in range(processes):
        opts = options().randomSeed(7)
        opts.Distributed.configureProcessId(i, processes)
        loaders.append(DataLoader(opts, Numbers(count), **kwargs))
    return [[[int(n) for b in rows(loader) for n in b] for loader in loaders] for _ in range(epochs)]


def test_processes_divide_the_data() -> None:
    assert shares(12, 3, batch_size=2) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]
    assert [len(s) for s in shares(11, 2, batch_size=2)[0]] == [4, 4]  # as many batches each


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("shuffle", [False, True])
def test_no_row_is_lost_where_the_last_batch_is_kept(shuffle: bool, mode: DataLoaderMode) -> None:
    first, second = shares(105, 2, batch_size=10, drop_last=False, shuffle=shuffle, mode=mode)[0]
    assert (len(first), len(second)) == (53, 52) and sorted(first + second) == list(range(105))
    assert [len(s) for s in shares(2, 3, drop_last=False)[0]] == [1, 1, 0]


@pytest.mark.parametrize("arguments", [
    {"sampler": SequentialSampler(range(8))},
    {"batch_sampler": BatchSampler(SequentialSampler(range(8)), 4, drop_last=True)},
], ids=list)  # fmt: skip
def test_samplers_are_not_divided(arguments) -> None:
    with pytest.raises(AssertionError, match="auto_distributed_partitioning=False"):
        shares(8, 2, **arguments)
    both = shares(8, 2, auto_distributed_partitioning=False, **arguments)[0]
    assert both == [list(range(8))] * 2 == shares(8, 1, **arguments)[0] * 2


def test_processes_shuffle_together() -> None:
    epochs = shares(12, 2, epochs=3, batch_size=2, shuffle=True)
    for epoch in epochs:
        assert sorted(n for s in epoch for n in s) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2]


def test_what_is_left_over_comes_in_the_next_epoch() -> None:
    first, second = shares(13, 2, epochs=2, batch_size=3, shuffle=True)
    left = set(range(13)) - {n for s in first for n in s}
    assert len(left) == 1 and left <= {n for s in second for n in s}


def test_shuffling_among_processes_needs_a_seed() -> None:
    opts = options()
    opts.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match="random seed"):
        DataLoader(opts, Numbers(4), shuffle=True)


def test_iterable_data_is_not_divided() -> None:
    opts = options()
    opts.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match="IterableDataset"):
        DataLoader(opts, Stream())
    assert len(list(DataLoader(opts, Stream(), auto_distributed_partitioning=False))) == 10


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_training_from_a_loader_is_eagers(mode: DataLoaderMode) -> None:
    x, y = data(24)
    model = Classifier()
    other = twin(model)
    opts = options(2, 2)
    executor, _ = trained(opts, model)
    loader = DataLoader(opts, TensorDataset(x, y), batch_size=2, mode=mode)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        for a, b in loader:
            executor(a, b)
        for i in range(3):
            eager(other, optimizer, x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8], 2, 2, 1)
    same(model, other)
    loader.terminate()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize(
    "collate", [None, lambda rows: [torch.stack([a for a, _ in rows]) + 1, torch.stack([b for _, b in rows])]]
)
def test_tensors_in_memory_are_what_torch_makes_of_them(mode: DataLoaderMode, collate) -> None:
    dataset = TensorDataset(*data(10))
    more = {} if collate is None else {"collate_fn": collate}
    ours = list(DataLoader(options(2), dataset, batch_size=2, mode=mode, drop_last=False, **more))
    theirs = list(torch.utils.data.DataLoader(dataset, batch_size=4, **more))
    assert len(ours) == len(theirs) == 3 and type(ours[0]) is type(theirs[0]) is list
    if mode != DataLoaderMode.AsyncRebatched or collate is None:
        for a, b in zip(ours, theirs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "poptorch-loader" and t.is_alive()]


def settle() -> list[str]:
    end = time.monotonic() + 10
    while names() and time.monotonic() < end:
        time.sleep(0.02)
    return names()


def test_nothing_runs_on_after_terminate() -> None:
    loader = DataLoader(
        options(), Numbers(1000), mode=DataLoaderMode.Async, async_options={"early_preload": True, "buffer_size": 2}
    )
    assert names()
    next(iter(loader))
    loader.terminate()
    assert settle() == []
    with pytest.raises(poptorch.Error, match="terminated"):
        iter(loader)


def test_there_is_nothing_to_end_in_the_mode_sync() -> None:
    loader = DataLoader(options(), Numbers(4), batch_size=2)
    before = rows(loader)
    loader.terminate()
    assert rows(loader) == before == [[0, 1], [2, 3]]


def test_nothing_runs_on_after_the_loader_is_gone() -> None:
    loader = AsynchronousDataAccessor(Numbers(1000))
    next(iter(loader))
    del loader
    assert settle() == []


def test_a_loop_that_is_left_early() -> None:
    loader = DataLoader(options(), Numbers(8), batch_size=2, mode=DataLoaderMode.Async)
    for _ in loader:
        break
    assert rows(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    loader.terminate()


class Slow(Numbers):
    def __getitem__(self, i: int):
        if i == 2:
            time.sleep(0.6)
        return super().__getitem__(i)


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Who leaves a loop does not wait until the thread has ended."""
    monkeypatch.setattr(poptorch.accessor, "_GRACE", 0.05)


def test_a_loop_that_is_left_early_while_a_worker_is_busy(impatient) -> None:
    loader = DataLoader(options(), Slow(6), batch_size=2, mode=DataLoaderMode.Async, num_workers=1)
    for _ in loader:
        break
    assert rows(loader) == [[0, 1], [2, 3], [4, 5]]
    loader.terminate()
    assert settle() == []


class OneReader(Numbers):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.begun, self.go, self.readers, self.most = threading.Event(), threading.Event(), 0, 0

    def __getitem__(self, i: int):
        self.readers += 1
        self.most = max(self.most, self.readers)
        if i == 2:
            self.begun.set()
            self.go.wait()
        self.readers -= 1
        return super().__getitem__(i)


def test_one_thread_at_a_time_reads_the_data(impatient) -> None:
    numbers = OneReader(4)
    accessor = AsynchronousDataAccessor(numbers)
    loop = iter(accessor)
    next(loop)
    numbers.begun.wait()
    accessor.terminate()
    assert names()  # it is still reading
    threading.Timer(0.3, numbers.go.set).start()
    assert [int(x) for x, _ in accessor] == [0, 1, 2, 3] and numbers.most == 1
    accessor.terminate()


class Named(Numbers):
    def __getitem__(self, i: int):
        return {"x": torch.tensor(float(i)), "name": f"row {i}", "pair": (i, b"%d" % i)}


def test_texts_are_put_together_like_rows() -> None:
    ours = list(DataLoader(options(), Named(7), batch_size=3, mode=DataLoaderMode.AsyncRebatched, drop_last=False,
                           rebatched_worker_size=2))  # fmt: skip
    theirs = list(DataLoader(options(), Named(7), batch_size=3, drop_last=False))
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a["x"], b["x"]) and a["name"] == b["name"] and a["pair"][1] == b["pair"][1]
        assert torch.equal(a["pair"][0], b["pair"][0])


@pytest.mark.parametrize(("collate", "found"), [
    (lambda batch: [torch.tensor([x for x, _ in batch]), None], "NoneType"),
    (lambda batch: [torch.tensor([x for x, _ in batch]), torch.tensor(1.0)], "without dimensions"),
    (lambda batch: [torch.tensor([x for x, _ in batch]), torch.zeros(5)], "different numbers of rows"),
])  # fmt: skip
def test_what_cannot_be_rebatched_is_refused(collate, found: str) -> None:
    loader = DataLoader(options(), Numbers(4), batch_size=2, mode=DataLoaderMode.AsyncRebatched, collate_fn=collate)
    with pytest.raises(poptorch.Error, match=found):
        list(loader)
    loader.terminate()


def test_batches_are_not_reused() -> None:
    loader = DataLoader(options(), Numbers(6), batch_size=2, mode=DataLoaderMode.Async)
    assert [b[0].tolist() for b in list(loader)] == [[0, 1], [2, 3], [4, 5]]
    loader.terminate()


def test_an_accessor_of_a_data_set_alone() -> None:
    accessor = AsynchronousDataAccessor(Numbers(3), load_indefinitely=False)
    assert len(accessor) == 3 and [int(x) for x, _ in accessor] == [0, 1, 2]
    accessor.terminate()


class Broken(Numbers):
    def __getitem__(self, i: int):
        if i == 5:
            raise ValueError("row five is broken")
        return super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_an_error_of_the_data_set_surfaces(mode: DataLoaderMode, workers: int) -> None:
    loader = DataLoader(options(), Broken(8), batch_size=2, mode=mode, num_workers=workers, persistent_workers=False)
    seen = []
    with pytest.raises(ValueError, match="row five is broken"):
        for x, _ in loader:
            seen.append(x.tolist())
    assert seen == [[0, 1], [2, 3]]
    loader.terminate()
    assert settle() == []


def test_ctrl_c_ends_a_program_that_waits_for_data() -> None:
    """And leaves no process behind."""
    code = """
import sys, time, torch, poptorch
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        if i: time.sleep(60)
        return torch.zeros(1)
loader = poptorch.DataLoader(poptorch.Options(), Slow(), mode=poptorch.DataLoaderMode.Async)
for x in loader:
    print("first", flush=True)
"""
    import os
    import signal

    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "first\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err and process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
