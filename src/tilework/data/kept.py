"""Records that were read once: in memory, or as NumPy files in a folder, where the next run finds them.

FOLDER/<key>/cache.json      what is in there, and which records could not be read
FOLDER/<key>/0.npy ...       a file for each input and target, a row for each record, as the step takes them

The key is made of the data's name, of what the step takes, and of the size and time of change of every file that is read. A
folder is written under another name and renamed: it is there as a whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import MachineError, UserError
from .source import BadRecord, Record, Source

FORMAT = 2
NOTE = "cache.json"
CHUNK = 64  # records that are read at a time
Report = Callable[[str], None]


class Kept:
    """A source of what was read before. Records that could not be read then cannot be read now, for the same reason."""

    def __init__(self, arrays: Sequence[np.ndarray], dtypes: Sequence[torch.dtype], bad: dict[int, tuple[str, str]],
                 place: Callable[[int], str]) -> None:  # fmt: skip
        self.arrays, self.dtypes, self.bad, self.place = list(arrays), list(dtypes), bad, place

    def __len__(self) -> int:
        return len(self.arrays[0])

    def rows(self, numbers: np.ndarray) -> Record:
        if self.bad:
            for number in numbers.tolist():
                if number in self.bad:
                    raise BadRecord(number, *self.bad[number])
        return tuple(_tensor(a[numbers], d) for a, d in zip(self.arrays, self.dtypes, strict=True))


def in_memory(source: Source) -> Kept:
    """All of it, read now."""
    arrays: list[np.ndarray] = []
    dtypes: list[torch.dtype] = []
    bad: dict[int, tuple[str, str]] = {}
    for begin, record in _chunks(source, bad):
        parts = [_array(t) for t in record]
        if not arrays:
            dtypes, arrays = [t.dtype for t in record], [np.empty((len(source), *a.shape[1:]), a.dtype) for a in parts]
        for to, part in zip(arrays, parts, strict=True):
            to[begin : begin + len(part)] = part
    return Kept(arrays, dtypes, bad, source.place)


def on_disk(source: Source, folder: Path, name: str, wanted: Any, report: Report = lambda _: None) -> Kept:
    """What the folder has of it; where it has nothing, or the files have changed since, it is read and written first. Processes
    that ask for the same at the same time wait for the one that writes."""
    key = _key(name, wanted, len(source))
    final = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f".{key}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _opened(final, source)
            if found is None:
                report(f"reading {len(source)} records of {name} once, into {final}")
                _write(source, final, name)
                found = _opened(final, source)
    except OSError as e:
        raise MachineError("data-cache", f"{folder}: the records could not be kept there", found=str(e),
                           fix="use a folder with more room, or leave out --data-cache") from e  # fmt: skip
    assert found is not None
    return found


def files_of(name: str) -> list[Path]:
    """The files that the name of data speaks of, all that are in its folders among them."""
    found: list[Path] = []
    for part in name.replace(",", ":").split(":")[1:]:
        path = Path(part)
        if part and path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file())
        elif part and path.is_file():
            found.append(path)
    return found


def _key(name: str, wanted: Any, count: int) -> str:
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files_of(name)]
    text = json.dumps([FORMAT, name, [[n, str(d), list(s)] for n, d, s in wanted], count, stats])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _chunks(source: Source, bad: dict[int, tuple[str, str]]) -> Iterator[tuple[int, Record]]:
    """(number of the first, records) in their order. One that cannot be read is zeros, and goes into `bad`."""
    like = _first(source, bad)
    for begin in range(0, len(source), CHUNK):
        numbers = np.arange(begin, min(begin + CHUNK, len(source)))
        while True:
            good = np.array([n not in bad for n in numbers.tolist()])
            try:
                record = source.rows(numbers[good]) if good.any() else ()
                break
            except BadRecord as e:
                bad[e.number] = (e.place, e.why)
        if not good.all():
            whole = tuple(t.new_zeros((len(numbers), *t.shape[1:])) for t in like)
            for to, tensor in zip(whole, record, strict=False):
                to[torch.from_numpy(good)] = tensor
            record = whole
        yield begin, record


def _first(source: Source, bad: dict[int, tuple[str, str]]) -> Record:
    """The first record that can be read."""
    for number in range(len(source)):
        try:
            return source.rows(np.array([number]))
        except BadRecord as e:
            bad[number] = (e.place, e.why)
    raise UserError("data-record", "no record can be read", found=str(BadRecord(0, *bad[0])))


def _write(source: Source, final: Path, name: str) -> None:
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    files: list[Any] = []
    try:
        bad: dict[int, tuple[str, str]] = {}
        kinds: list[dict[str, Any]] = []
        for _, record in _chunks(source, bad):
            arrays = [_array(t) for t in record]
            if not files:
                for i, (tensor, array) in enumerate(zip(record, arrays, strict=True)):
                    shape = [len(source), *array.shape[1:]]
                    kinds.append({"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape})
                    file = open(part / f"{i}.npy", "wb")  # noqa: SIM115
                    files.append(file)
                    header = {"descr": array.dtype.str, "fortran_order": False, "shape": tuple(shape)}
                    np.lib.format.write_array_header_1_0(file, header)
            for file, array in zip(files, arrays, strict=True):
                file.write(np.ascontiguousarray(array).data)
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        sizes = [file.tell() for file in files]
        note = {"format": FORMAT, "data": name, "records": len(source), "tensors": kinds, "bytes": sizes,
                "bad": {str(n): list(why) for n, why in bad.items()}}  # fmt: skip
        with open(part / NOTE, "w") as f:
            json.dump(note, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    except BaseException:
        for file in files:
            file.close()
        shutil.rmtree(part, ignore_errors=True)
        raise
    for file in files:
        file.close()


def _opened(final: Path, source: Source) -> Kept | None:
    """None where there is nothing, or it is not what it should be."""
    try:
        note = json.loads((final / NOTE).read_text())
        paths = [final / f"{i}.npy" for i in range(len(note["tensors"]))]
        if note["format"] != FORMAT or note["records"] != len(source) or [p.stat().st_size for p in paths] != note["bytes"]:
            return None
        arrays = [np.load(p, mmap_mode="r", allow_pickle=False) for p in paths]
        dtypes = [getattr(torch, t["dtype"]) for t in note["tensors"]]
        bad = {int(n): (str(place), str(why)) for n, (place, why) in note["bad"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Kept(arrays, dtypes, bad, source.place)


def _array(tensor: Tensor) -> np.ndarray:
    """NumPy does not know bfloat16."""
    return (tensor.contiguous().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.contiguous()).numpy()


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    found = torch.from_numpy(np.asarray(array))
    return found.view(torch.bfloat16) if dtype == torch.bfloat16 else found
