"""The loader: the source's own order and seeds, many steps at a time, ahead in the background; errors come through whole."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tilework
from tilework.runtime import loader as module

X = torch.arange(60, dtype=torch.float32).reshape(20, 3)
Y = torch.arange(20)


class Rows(Dataset):
    """The same data, but not in memory as far as anybody can know."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int):
        return X[i], Y[i]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


def everything(loader: tilework.Loader, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """All batches in a row (copied: a chunk's memory is used again), and the steps of each chunk."""
    xs, ys, steps = [], [], []
    for chunk in loader.chunks(dim):
        x, y = chunk.inputs
        xs.append(x.clone())
        ys.append(y.clone())
        steps.append(chunk.num_steps)
    return torch.cat(xs), torch.cat(ys), steps


@pytest.mark.parametrize("source", ["tensors", "rows", "stream"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_loader_keeps_its_order_and_seeds(source: str, shuffle: bool) -> None:
    if source == "stream" and shuffle:
        pytest.skip("an iterable dataset has no shuffle")
    dataset = {"tensors": TensorDataset(X, Y), "rows": Rows(), "stream": Stream()}[source]

    def make() -> DataLoader:
        torch.manual_seed(5)
        return DataLoader(dataset, batch_size=2, shuffle=shuffle)

    plain = make()
    expected = [torch.cat([y for _, y in plain]) for _ in range(3)]  # three epochs, three orders
    position = torch.rand(3)
    torch_loader = make()
    loader = tilework.Loader(torch_loader, num_steps=4)
    for epoch in range(3):
        x, y, steps = everything(loader)
        assert torch.equal(y, expected[epoch]) and torch.equal(x, X[y]) and steps == [4, 4, 2]
    assert torch.equal(torch.rand(3), position), "the global generator stands where it would stand"
    if shuffle:
        assert not torch.equal(expected[0], expected[1])
    assert isinstance(loader._source, module._Rows) == (source == "tensors")


def test_a_generator_of_its_own() -> None:
    def make() -> DataLoader:
        return DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(9))

    plain = make()
    expected = [torch.cat([y for _, y in plain]) for _ in range(2)]
    loader = tilework.Loader(make(), num_steps=3)
    assert all(torch.equal(everything(loader)[1], e) for e in expected)


def test_workers_and_samplers() -> None:
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 20, 12, generator=torch.Generator().manual_seed(1))
    for loader in (
        DataLoader(Rows(), batch_size=4, num_workers=2),
        DataLoader(TensorDataset(X, Y), batch_size=4, sampler=list(range(19, -1, -1))),
        DataLoader(TensorDataset(X, Y), batch_sampler=[[1, 2, 3, 4], [9, 8, 7, 6]]),
    ):
        expected = torch.cat([y for _, y in loader])
        assert torch.equal(everything(tilework.Loader(loader, num_steps=2))[1], expected)
    twice = [DataLoader(TensorDataset(X, Y), batch_size=4, sampler=weighted) for _ in range(2)]
    first = torch.cat([y for _, y in twice[0]])
    weighted.generator.manual_seed(1)
    assert torch.equal(everything(tilework.Loader(twice[1], num_steps=2))[1], first)


def test_data_in_its_own_order_is_not_copied() -> None:
    loader = tilework.Loader((X, Y), batch_size=2, num_steps=4)
    chunks = list(loader)
    assert [c.num_steps for c in chunks] == [4, 4, 2]
    assert chunks[1].inputs[0].data_ptr() == X[8].data_ptr()
    assert threading.active_count() == 1 or not any(t.name == "tilework-loader" for t in threading.enumerate())


def test_shuffled_memory() -> None:
    loader = tilework.Loader((X, Y), batch_size=2, num_steps=4, shuffle=True, seed=3)
    orders = [everything(loader)[1] for _ in range(2)]
    again = everything(tilework.Loader((X, Y), batch_size=2, num_steps=4, shuffle=True, seed=3))[1]
    assert torch.equal(orders[0], again) and not torch.equal(orders[0], orders[1])
    assert sorted(orders[0].tolist()) == list(range(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8])
def test_every_dtype_is_gathered(dtype: torch.dtype) -> None:
    x = (X % 2).to(dtype)
    xs, ys, _ = everything(tilework.Loader((x, Y), batch_size=4, num_steps=2, shuffle=True, seed=0))
    assert xs.dtype == dtype and torch.equal(xs, x[ys])


def test_arrays_dicts_and_single_tensors() -> None:
    chunk = next(iter(tilework.Loader({"a": X.numpy(), "b": Y}, batch_size=5, num_steps=2)))
    assert set(chunk.inputs[0]) == {"a", "b"} and chunk.inputs[0]["a"].shape == (10, 3)
    chunk = next(iter(tilework.Loader(X, batch_size=5, num_steps=2)))
    assert chunk.inputs[0].shape == (10, 3)
    nested = [{"x": X[i : i + 4], "more": (Y[i : i + 4],)} for i in range(0, 20, 4)]
    chunks = list(tilework.Loader(iter(nested), num_steps=2, prefetch=9))
    assert torch.equal(chunks[-1].inputs[0]["more"][0], Y[16:])


def test_another_batch_dimension() -> None:
    data = [(torch.full((3, 2), float(i)), torch.full((5, 2), i)) for i in range(5)]
    xs = []
    for chunk in tilework.Loader(data, num_steps=2).chunks(1):
        assert chunk.inputs[0].shape == (3, 2 * chunk.num_steps)
        xs.append(chunk.inputs[0].clone())
    assert torch.equal(torch.cat(xs, 1), torch.cat([x for x, _ in data], 1))


def test_memory_is_used_again() -> None:
    loader = tilework.Loader(((X, Y) for _ in range(50)), num_steps=2, prefetch=2)
    addresses = {chunk.inputs[0].data_ptr() for chunk in loader}
    assert len(addresses) == 3


def test_loading_goes_on_beside_the_work() -> None:
    """While somebody works on a chunk, the next one is made: he waits for it, and it comes."""
    made = [threading.Event() for _ in range(6)]

    def data():
        for event in made:
            event.set()
            yield X, Y

    for i, _ in enumerate(tilework.Loader(data(), num_steps=1)):
        assert made[min(i + 1, 5)].wait(60)


def test_an_error_in_the_data_comes_through_after_what_came_before() -> None:
    class Broken(Rows):
        def __getitem__(self, i: int):
            if i == 14:
                raise ValueError("sample 14 is damaged")
            return super().__getitem__(i)

    seen = []
    with pytest.raises(ValueError, match="sample 14 is damaged") as caught:
        for chunk in tilework.Loader(DataLoader(Broken(), batch_size=2), num_steps=4):
            seen += chunk.inputs[1].tolist()
    assert seen == list(range(14)), "seven whole batches came first"
    assert any("batch 7" in note for note in caught.value.__notes__)
    assert any(frame.name == "__getitem__" for frame in caught.traceback), "the user's own line is in the traceback"


def test_an_error_in_the_first_batch() -> None:
    def broken():
        raise OSError("no such disk")
        yield

    with pytest.raises(OSError, match="no such disk"):
        list(tilework.Loader(broken()))


def test_leaving_early_stops_the_thread() -> None:
    def endless():
        while True:
            yield X, Y

    for chunk in tilework.Loader(endless(), num_steps=2):
        assert chunk.num_steps == 2
        break
    import gc

    gc.collect()
    deadline = time.time() + 5
    while any(t.name == "tilework-loader" for t in threading.enumerate()) and time.time() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "tilework-loader" for t in threading.enumerate())


def test_a_short_last_batch() -> None:
    for loader in (
        lambda **k: tilework.Loader((X, Y), batch_size=8, **k),
        lambda **k: tilework.Loader((X, Y), batch_size=8, shuffle=True, **k),
        lambda **k: tilework.Loader(DataLoader(TensorDataset(X, Y), batch_size=8), **k),
        lambda **k: tilework.Loader(DataLoader(Rows(), batch_size=8), **k),
    ):
        with pytest.raises(tilework.UserError, match="drop_last=True"):
            list(loader())
        assert sum(c.num_steps for c in loader(drop_last=True)) == 2
    with pytest.raises(tilework.UserError, match="batch 1 differs"):
        list(tilework.Loader([(X, Y), (X.double(), Y)]))


def test_wrong_arguments() -> None:
    for make, message in (
        (lambda: tilework.Loader((X, Y)), "batch_size"),
        (lambda: tilework.Loader((X, Y[:3]), batch_size=2), "different numbers of rows"),
        (lambda: tilework.Loader([(X, Y)], batch_size=2), "where that source is made"),
        (lambda: tilework.Loader(7), "not a source"),
        (lambda: tilework.Loader([(X, Y)], num_steps=0), "num_steps"),
    ):
        with pytest.raises(tilework.UserError, match=message):
            make()


def test_an_empty_source() -> None:
    assert list(tilework.Loader([])) == []


def test_a_session_trains_over_a_loader(session_of) -> None:
    one, _step = session_of("linear", "reference")
    many, _ = session_of("linear", "reference")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 12, generator=generator), torch.randint(0, 5, (60,), generator=generator)
    rates = np.linspace(0.1, 0.01, 10)
    losses = [one.run(x[i * 6 : i * 6 + 6], y[i * 6 : i * 6 + 6], hyper={"lr": float(rates[i])}).loss for i in range(10)]
    results = list(many.loop(tilework.Loader((x, y), batch_size=6, num_steps=4), hyper={"lr": rates}, outputs="last"))
    assert torch.equal(torch.stack(losses), torch.cat([r.losses for r in results]))
    assert [len(r.losses) for r in results] == [4, 4, 2] and results[-1].outputs[1].shape == (6, 5)
    assert all(torch.equal(t, many.tensors()[k]) for k, t in one.tensors().items())
    with pytest.raises(tilework.UserError, match="shorter than the data"):
        list(many.loop(tilework.Loader((x, y), batch_size=6, num_steps=4), hyper={"lr": rates[:5]}))


def test_what_loads_ahead_leaves_the_cores_alone() -> None:
    """torch's operators in that thread use no threads of their own. Others keep theirs, also those that begin later."""
    from tilework.frontend.ahead import ahead
    from tilework.threads import one_thread_here

    before, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:

        def look(alone: bool) -> None:
            if alone:
                one_thread_here()
            found.append(torch.get_num_threads())

        for alone in (True, False):
            thread = threading.Thread(target=look, args=(alone,))
            thread.start()
            thread.join()
        assert found == [1, 2] and torch.get_num_threads() == 2

        def batches():
            for _ in range(4):
                yield torch.full((2, 3), float(torch.get_num_threads())), torch.zeros(2)

        seen = [
            float(c.inputs[0][-1, 0]) for c in tilework.Loader(batches(), num_steps=2).chunks()
        ]  # the first comes by the caller
        assert seen == [1.0, 1.0]
        assert list(ahead(range(2), lambda _: torch.get_num_threads(), 1, timeout=30.0)) == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
