"""Sources and feeds: every format, the order that can be continued, ranks, and records that cannot be read."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tilework.data import Arrays, BadRecord, Each, Feed, Position, formats, kept
from tilework.data.named import fitted, source_of
from tilework.errors import MachineError, UserError

NUMBERS = torch.arange(40)


def source() -> Arrays:
    return Arrays((NUMBERS.float()[:, None], NUMBERS))


def batches(feed: Feed, position: Position, size: int = 1) -> list[list[int]]:
    """The records of each batch that is left in the epoch."""
    found = []
    for chunk in feed.chunks(position, iter(lambda: size, None)):
        found += chunk.inputs[1].reshape(chunk.num_steps, -1).tolist()
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_epoch_goes_on_anywhere(workers: int, size: int) -> None:
    """Whatever the number of workers and of batches in a chunk."""
    feed = Feed(source(), 4, seed=3, num_workers=workers)
    whole = batches(Feed(source(), 4, seed=3), Position(1))
    assert sorted(n for batch in whole for n in batch) == NUMBERS.tolist() and whole != batches(feed, Position(0))
    assert batches(feed, Position(1), size) == whole
    for at in (1, 4, 9):
        assert batches(feed, Position(1, at), size) == whole[at:]


def test_rows_of_every_type() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.complex64):
        tensor = torch.arange(6).reshape(3, 2).to(dtype)
        assert torch.equal(Arrays([tensor]).rows(np.array([2, 0]))[0], tensor[[2, 0]])


def test_ranks_share_the_batches() -> None:
    alone = batches(Feed(source(), 4, seed=3), Position())
    ranks = [batches(Feed(source(), 4, seed=3, rank=r, ranks=2), Position()) for r in range(2)]
    assert [b for pair in zip(*ranks, strict=True) for b in pair] == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_of_a_transform_belong_to_the_batch(workers: int) -> None:
    """The same however many batches are in a chunk, for any rank, and in no other epoch."""

    def noisy(record, generator):
        return record[0] + torch.rand(record[0].shape, generator=generator), record[1]

    def values(epoch: int, size: int, **ranks: int) -> list[torch.Tensor]:
        feed = Feed(source(), 4, seed=3, transform=noisy, num_workers=workers, **ranks)
        chunks = feed.chunks(Position(epoch), iter(lambda: size, None))
        return [b for c in chunks for b in c.inputs[0].clone().reshape(c.num_steps, -1)]

    one = values(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, values(0, 3), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[1::2], values(0, 2, rank=1, ranks=2), strict=True))
    assert not torch.equal(one[0] % 1, values(1, 1)[0] % 1)


def broken() -> Each:
    def read(number: int):
        if number in (5, 6):
            raise ValueError("it is torn")
        return torch.tensor([number, number] if number != 11 else [number]), torch.tensor(number)

    return Each(40, read, lambda n: f"shelf/{n}.bin")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_record_is_named(workers: int) -> None:
    feed = Feed(broken(), 4, shuffle=False, num_workers=workers)
    with pytest.raises(UserError, match="record 5 cannot be read") as e:
        batches(feed, Position())
    assert e.value.id == "data-record" and "shelf/5.bin: ValueError: it is torn" in e.value.found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 4])
def test_broken_records_are_skipped_and_reported_once(workers: int, size: int) -> None:
    told: list[str] = []
    feed = Feed(broken(), 4, shuffle=False, num_workers=workers, bad_records="skip", report=told.append)
    found = batches(feed, Position(), size)
    assert found[1] == [4, 7, 7, 7] and found[2] == [8, 9, 10, 12]
    batches(feed, Position(1), size)
    assert len(told) == 3 and "shelf/5.bin" in told[0] and "int64[1]" in told[2] and "int64[2]" in told[2]


def test_no_record_can_be_read() -> None:
    def read(number: int):
        raise OSError("gone")

    with pytest.raises(UserError, match="no record can be read"):
        batches(Feed(Each(8, read, str), 4, bad_records="skip"), Position())


def test_fewer_records_than_a_batch() -> None:
    with pytest.raises(UserError, match="no complete batch") as e:
        Feed(source(), 32, ranks=2)
    assert e.value.found == "40 records" and "2 ranks" in e.value.expected


def test_workers_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    batches(Feed(source(), 4, num_workers=1), Position())
    assert torch.equal(torch.rand(3), expected)


# ---- formats ----


def write_idx(path: Path, array: np.ndarray, kind: int) -> None:
    data = struct.pack(">HBB", 0, kind, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    data += array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_idx(tmp_path: Path) -> None:
    images = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    labels = np.array([3, -1, 4, 1, -5], dtype=np.int32)
    write_idx(tmp_path / "i.idx", images, 0x08)
    write_idx(tmp_path / "l.idx.gz", labels, 0x0C)
    found = formats.idx([str(tmp_path / "i.idx"), str(tmp_path / "l.idx.gz")])
    x, y = found.rows(np.array([4, 1]))
    assert torch.equal(x, torch.from_numpy(images[[4, 1]])) and y.tolist() == [-5, -1] and y.dtype == torch.int32
    assert isinstance(found.arrays[0], np.memmap)
    for damaged in (b"", b"\1\0\x08\1\0\0\0\1a", (tmp_path / "i.idx").read_bytes()[:-1]):
        (tmp_path / "d.idx").write_bytes(damaged)
        with pytest.raises(UserError, match="not a readable idx file"):
            formats.idx([str(tmp_path / "d.idx")])


def test_numpy_files_are_mapped(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.uint16).reshape(6, 2)
    np.save(tmp_path / "a.npy", array)
    found = formats.npy([str(tmp_path / "a.npy")])
    assert isinstance(found.arrays[0], np.memmap)
    assert found.rows(np.array([5, 0]))[0].tolist() == [[10, 11], [0, 1]]
    np.save(tmp_path / "o.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(UserError, match="not a readable NumPy file"):
        formats.npy([str(tmp_path / "o.npy")])


def test_tokens(tmp_path: Path) -> None:
    np.arange(100, 121, dtype=np.uint16).tofile(tmp_path / "t.bin")
    found = formats.tokens(str(tmp_path / "t.bin"), 5)
    assert len(found) == 4
    x, y = found.rows(np.array([3]))
    assert x.tolist() == [[115, 116, 117, 118, 119]] and y.tolist() == [[116, 117, 118, 119, 120]]
    x, y = formats.tokens(str(tmp_path / "t.bin"), 5, same=True).rows(np.array([3]))
    assert torch.equal(x, y) and x[0, 0] == 115


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,y,b\n1,2,3\n\n4,5,6\n7,x,9\n")
    found = formats.csv(str(tmp_path / "d.csv"), ["y"])
    x, y = found.rows(np.array([1, 0]))
    assert len(found) == 3 and x.tolist() == [[4, 6], [1, 3]] and y.tolist() == [[5], [2]]
    with pytest.raises(BadRecord, match=r"d.csv, line 5.*could not convert string to float: 'x'"):
        found.rows(np.array([2]))
    with pytest.raises(UserError, match="no column 'z'"):
        formats.csv(str(tmp_path / "d.csv"), ["z"])


def test_pictures_with_masks(tmp_path: Path) -> None:
    from PIL import Image

    for i, patient in enumerate(("p1", "p1", "p2")):
        (tmp_path / patient).mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (51 * i, 0, 255)).save(tmp_path / patient / f"{i}.tif")
        Image.new("L", (16, 16), 255 if i == 1 else 0).save(tmp_path / patient / f"{i}_mask.tif")
    found = formats.pictures(str(tmp_path), 8)
    x, y = found.rows(np.array([0, 1, 2]))
    assert x.shape == (3, 3, 8, 8) and y.shape == (3, 1, 8, 8)
    assert x[:, 0, 0, 0].tolist() == pytest.approx([0, 0.2, 0.4]) and y.mean((1, 2, 3)).tolist() == [0, 1, 0]
    (tmp_path / "p1" / "1.tif").write_bytes(b"no picture")
    with pytest.raises(BadRecord, match=r"record 1 .*p1/1.tif"):
        found.rows(np.array([1]))
    (tmp_path / "p2" / "2_mask.tif").rename(tmp_path / "p2" / "2_mask.png")  # another ending is as good
    assert formats.pictures(str(tmp_path), 8).rows(np.array([2]))[1].shape == (1, 1, 8, 8)
    Image.new("RGB", (16, 16)).save(tmp_path / "p2" / "3.tif")
    Image.new("L", (16, 16)).save(tmp_path / "p2" / "4_mask.tif")
    found = formats.pictures(str(tmp_path), 8)
    for number, words in ((3, r"p2/3.tif.*it has no mask"), (4, r"p2/4_mask.tif.*the mask has no picture")):
        with pytest.raises(BadRecord, match=words):
            found.rows(np.array([number]))
    with pytest.raises(UserError, match="no pictures with masks"):
        formats.pictures(str(Path(__file__).parent), 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_hdf5(tmp_path: Path, workers: int) -> None:
    import h5py

    with h5py.File(tmp_path / "d.h5", "w") as f:
        f["x"], f["y"], f["short"] = np.arange(80.0).reshape(40, 2), np.arange(40), np.arange(3)
    found = formats.Hdf5(str(tmp_path / "d.h5"), ["x", "y"])
    x, y = found.rows(np.array([7, 2, 7]))
    assert x.tolist() == [[14, 15], [4, 5], [14, 15]] and y.tolist() == [7, 2, 7]
    expected = batches(Feed(source(), 4, seed=3), Position())
    assert batches(Feed(found, 4, seed=3, num_workers=workers), Position()) == expected
    with pytest.raises(UserError, match="different numbers of rows"):
        formats.Hdf5(str(tmp_path / "d.h5"), ["x", "short"])
    with pytest.raises(UserError, match="not an HDF5 file with these data sets"):
        formats.Hdf5(str(tmp_path / "d.h5"), ["z"])


def test_labels_are_not_cut_to_whole_numbers(tmp_path: Path) -> None:
    """A column of labels that is none is a bad record, not label 2."""
    (tmp_path / "d.csv").write_text("a,b,label\n1,2,0\n3,4,2.7\n5,6,1\n")
    found = source_of(f"csv:{tmp_path / 'd.csv'}:label", [("x", torch.float32, (2,)), ("y", torch.int64, ())])
    assert found.rows(np.array([0, 2]))[1].tolist() == [0, 1]
    with pytest.raises(BadRecord, match=r"record 1 \(.*y has 2.7\d*, which is no int64"):
        found.rows(np.array([0, 1]))
    many = fitted(Arrays((torch.tensor([1, 300, 2]),)), [("y", torch.int8, ())], "numbers")
    with pytest.raises(BadRecord, match="y has 300, which is no int8"):
        many.rows(np.arange(3))


def test_fewer_than_no_workers() -> None:
    with pytest.raises(UserError, match="processes that read") as e:
        Feed(source(), 4, seed=3, num_workers=-1)
    assert e.value.expected == "0 or more"


def test_the_command_line_knows_all_forms() -> None:
    from tilework.cli import run
    from tilework.data import named

    assert {"digits", *run.FORMS} == set(named.FORMS)


def test_named_sources(tmp_path: Path) -> None:
    wanted = [("x", torch.float32, (1, 28, 28)), ("y", torch.int64, ())]
    x, y = source_of("digits", wanted).rows(np.array([0, 1]))
    assert x.shape == (2, 1, 28, 28) and y.dtype == torch.int64
    flat = source_of("digits", [("x", torch.float32, (784,)), wanted[1]], in_memory=True)
    assert torch.equal(flat.rows(np.array([1]))[0].flatten(), x[1].flatten())
    with pytest.raises(UserError, match="not what this step takes") as e:
        source_of("digits", [("x", torch.float32, (1, 32, 32)), wanted[1]]).rows(np.array([0]))
    assert e.value.expected == "x [1, 32, 32], y []"
    for text, words in (("digitz", "did you mean 'digits'"), ("hdf5:x", "hdf5:FILE:NAME,NAME"), ("synthetic:bart:tiny:4", "bert"),
                        ("tokens:x:many", "tokens:FILE:LENGTH")):  # fmt: skip
        with pytest.raises(UserError) as e:
            source_of(text, wanted)
        assert words in e.value.expected
    write_idx(tmp_path / "none.idx", np.zeros((0, 28, 28), np.uint8), 0x08)
    with pytest.raises(UserError, match="has no records"):
        source_of(f"idx:{tmp_path / 'none.idx'}", wanted[:1])
    write_idx(tmp_path / "b.idx", np.full((2, 28, 28), 51, np.uint8), 0x08)
    assert source_of(f"idx:{tmp_path / 'b.idx'}", wanted[:1]).rows(np.array([0]))[0].mean().item() == pytest.approx(0.2)


# ---- records that are kept ----


class Counted:
    """How often each record was read; some cannot be."""

    def __init__(self, bad: tuple[int, ...] = (), count: int = 200) -> None:
        self.read = np.zeros(count, np.int64)
        self.bad = bad

    def __len__(self) -> int:
        return len(self.read)

    def place(self, number: int) -> str:
        return f"file {number}"

    def rows(self, numbers: np.ndarray) -> tuple[torch.Tensor, ...]:
        for n in numbers.tolist():
            self.read[n] += 1
            if n in self.bad:
                raise BadRecord(n, self.place(n), "torn")
        picked = torch.from_numpy(numbers)
        return picked.to(torch.bfloat16)[:, None] + torch.arange(3), picked, picked % 2 == 0


def keeps(how: str, found: Counted, folder: Path, told: list[str]) -> kept.Kept:
    return kept.in_memory(found) if how == "memory" else kept.on_disk(found, folder, "images:somewhere:8", [], told.append)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["memory", "disk"])
def test_records_are_read_once(how: str, workers: int, tmp_path: Path) -> None:
    told: list[str] = []
    original = Counted()
    expected = [[t.clone() for t in c.inputs] for c in Feed(Counted(), 8, seed=5).chunks(Position(), iter(lambda: 3, None))]
    found = keeps(how, original, tmp_path, told)
    before = original.read.copy()
    for _ in range(2):
        feed = Feed(found, 8, seed=5, num_workers=workers)
        made = [c.inputs for c in feed.chunks(Position(), iter(lambda: 3, None))]
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype
            for x, y in zip(made, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        )
    assert (original.read == before).all() and before[1:].max() == 1
    if how == "disk":
        again = keeps(how, unread := Counted(), tmp_path, told)
        assert unread.read.sum() == 0 and len(told) == 1 and torch.equal(again.rows(np.array([9]))[1], torch.tensor([9]))


@pytest.mark.parametrize("how", ["memory", "disk"])
@pytest.mark.parametrize("bad", [(0,), (0, 1, 70), tuple(range(64, 128)), (199,)])
def test_what_cannot_be_read_is_remembered(how: str, bad: tuple[int, ...], tmp_path: Path) -> None:
    for _ in range(2):  # the second time, on disk, from what is there
        found = keeps(how, Counted(bad), tmp_path, [])
        good = np.array([n for n in range(200) if n not in bad])
        assert torch.equal(found.rows(good)[1], torch.from_numpy(good))
        with pytest.raises(BadRecord, match=f"record {bad[0]} .file {bad[0]}.: torn"):
            found.rows(np.arange(200))
        skipping = Feed(found, 8, shuffle=False, bad_records="skip")
        seen = torch.cat([c.inputs[1] for c in skipping.chunks(Position(), iter(lambda: 1, None))])
        assert len(seen) == 200 and not set(seen.tolist()) & set(bad)
    with pytest.raises(UserError, match="no record can be read"):
        keeps(how, Counted(tuple(range(200))), tmp_path / "none", [])


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    np.save(tmp_path / "y.npy", np.arange(6))
    name, told = f"npy:{tmp_path / 'x.npy'},{tmp_path / 'y.npy'}", []
    wanted = [("x", torch.float32, (2,)), ("y", torch.int64, ())]

    def first() -> float:
        return source_of(name, wanted, cache=tmp_path / "c", report=told.append).rows(np.array([0]))[0][0, 0].item()

    assert first() == first() == 0.0 and len(told) == 1
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2) + 7)
    assert first() == 7.0 and len(told) == 2
    other = source_of(name, [("x", torch.float64, (2,)), wanted[1]], cache=tmp_path / "c", report=told.append)
    assert len(told) == 3 and other.rows(np.array([1]))[0].dtype == torch.float64
    for damage in ("cache.json", "0.npy"):  # it is noticed, and made again
        for folder in (tmp_path / "c").glob("[0-9a-f]*"):
            (folder / damage).write_bytes((folder / damage).read_bytes()[:-1])
        assert first() == 7.0
    assert len(told) == 5 and not list((tmp_path / "c").glob("*.part"))


def test_no_room_for_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.os, "fsync", full)
    with pytest.raises(MachineError, match=r"\[data-cache\]") as e:
        keeps("disk", Counted(), tmp_path, [])
    assert "No space left" in e.value.found and not [p for p in tmp_path.iterdir() if not p.name.endswith(".lock")]


@pytest.mark.parametrize("workers", [0, 2])
def test_whoever_takes_the_batches_may_stop_in_an_epoch(workers: int) -> None:
    feed = Feed(source(), 4, seed=3, num_workers=workers)
    found = [c.inputs[1].tolist() for c in feed.chunks(Position(0, 2), iter([2, 1]))]
    whole = batches(Feed(source(), 4, seed=3), Position(0, 2))
    assert found == [whole[0] + whole[1], whole[2]]


def test_bytes_are_brightness_in_idx_files_alone(tmp_path: Path) -> None:
    """Masks of 0 and 1, counts and classes that are kept as bytes stay what they are; and it is said."""
    wanted = [("x", torch.float32, (4, 4)), ("mask", torch.float32, (4, 4))]
    x, mask = np.full((2, 4, 4), 51, np.uint8), np.ones((2, 4, 4), np.uint8)
    told: list[str] = []
    found = fitted(Arrays((x, mask)), wanted, "npy:x,mask", report=told.append).rows(np.array([1]))
    assert found[0].max() == 51 and found[1].max() == 1
    assert told == ["npy:x,mask: x, mask: bytes are taken as they are, as numbers from 0 to 255"]
    write_idx(tmp_path / "x.idx", x, 0x08)
    found = source_of(f"idx:{tmp_path / 'x.idx'}", wanted[:1], report=told.append).rows(np.array([1]))
    assert found[0].max().item() == pytest.approx(0.2) and len(told) == 1


def test_masks_and_pictures_that_would_be_lost(tmp_path: Path) -> None:
    from PIL import Image

    def one(name: str, mask: Image.Image, picture: Image.Image | None = None) -> torch.Tensor:
        (tmp_path / name).mkdir()
        (picture or Image.new("RGB", (4, 4))).save(tmp_path / name / "a.tif")
        mask.save(tmp_path / name / "a_mask.png")
        return formats.pictures(str(tmp_path / name), 4).rows(np.array([0]))[1]

    white = Image.new("L", (4, 4), 255)
    assert one("ones", Image.new("L", (4, 4), 1)).sum() == 16
    assert one("bits", Image.new("1", (4, 4), 1)).sum() == 16
    assert one("nothing", Image.new("L", (4, 4), 0)).sum() == 0
    with pytest.raises(BadRecord, match="the mask has values up to 3, expected 0 and 1, or 0 and 255"):
        one("classes", Image.new("L", (4, 4), 3))
    deep = Image.fromarray(np.full((4, 4), 40000, np.uint16))
    with pytest.raises(BadRecord, match=r"a\.tif has pixels of type I;16, expected 8 bits"):
        one("deep", white, deep)
    with pytest.raises(BadRecord, match=r"a\.tif has pixels of type F"):
        one("numbers", white, Image.fromarray(np.full((4, 4), 0.5, np.float32)))


def test_whatever_a_decoder_raises_names_its_record() -> None:
    def read(number: int):
        return (torch.tensor(struct.unpack(">I", b"12" if number == 3 else b"1234")[0]),)

    found = Each(5, read, lambda n: f"block {n}")
    with pytest.raises(BadRecord, match=r"record 3 \(block 3\): error: unpack requires"):
        found.rows(np.arange(5))
    told: list[str] = []
    assert list(Feed(found, 5, seed=0, bad_records="skip", report=told.append).chunks(Position(), iter([1])))
    assert "skipped" in told[0]


def test_large_labels_and_empty_sequences(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,label\n1,16777217\n")
    found = source_of(f"csv:{tmp_path / 'd.csv'}:label", [("x", torch.float32, (1,)), ("y", torch.int64, ())])
    assert found.rows(np.array([0]))[1].item() == 16777217
    (tmp_path / "t.bin").write_bytes(b"12345678")
    with pytest.raises(UserError) as e:
        source_of(f"tokens:{tmp_path / 't.bin'}:0", [])
    assert "tokens:FILE:LENGTH" in e.value.expected


def test_records_of_arrays_and_numbers() -> None:
    found = Each(4, lambda n: (np.full(3, n, np.float32), n), str).rows(np.array([1, 3]))
    assert found[0].tolist() == [[1, 1, 1], [3, 3, 3]] and found[1].tolist() == [1, 3] and found[1].dtype == torch.int64


def test_quoted_names_in_csv(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text('\ufeff"a","b, c","label"\n1,2,0\n3,"4",1\n')
    x, y = formats.csv(str(tmp_path / "q.csv"), ["label"]).rows(np.array([0, 1]))
    assert x.tolist() == [[1, 2], [3, 4]] and y.flatten().tolist() == [0, 1]
