"""Files of the formats that people have, as sources. Only what is asked for is read: a file may be larger than memory.

h5py and Pillow are needed for their formats alone: pip install 'tilework[data]'.
"""

from __future__ import annotations

import csv as csv_library
import gzip
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from .source import Arrays, BadRecord, Each, Record, as_tensor, existing, extra

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PICTURES = (".tif", ".tiff", ".png", ".jpg", ".jpeg", ".bmp")


def idx(paths: Sequence[str]) -> Arrays:
    """idx files, one for each input and target: plain ones are mapped, gzipped ones are read into memory."""
    return Arrays([_idx(existing(p)) for p in paths], paths, pictures=True)


def _idx(path: Path) -> np.ndarray:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as f:
            zero, kind, dims = struct.unpack(">HBB", f.read(4))
            shape = struct.unpack(f">{dims}I", f.read(4 * dims))
            dtype = np.dtype(_IDX_TYPES[kind])
            if zero != 0:
                raise ValueError("it does not begin with two zeros")
            if path.suffix == ".gz":
                return np.frombuffer(f.read(), dtype).reshape(shape)
        return np.memmap(path, dtype, "r", offset=4 + 4 * dims, shape=shape)
    except (OSError, EOFError, ValueError, KeyError, struct.error, zlib.error) as e:
        raise UserError("data-damaged", f"{path}: not a readable idx file", found=f"{type(e).__name__}: {e}") from e


def npy(paths: Sequence[str]) -> Arrays:
    """NumPy files, one for each input and target, mapped."""
    arrays = []
    for path in paths:
        try:
            arrays.append(np.load(existing(path), mmap_mode="r", allow_pickle=False))
        except (OSError, EOFError, ValueError) as e:
            raise UserError("data-damaged", f"{path}: not a readable NumPy file", found=f"{type(e).__name__}: {e}") from e
    return Arrays(arrays, paths)


def tokens(path: str, length: int, *, same: bool = False, dtype: str = "uint16") -> Each:
    """A file of nothing but token numbers, or a NumPy file: record n is the n-th sequence of `length`, and the same one token
    later. `same`: and the same one again, for models that shift it themselves."""
    if length < 1:
        raise ValueError(length)
    if existing(path).suffix == ".npy":
        whole: np.ndarray = npy([path]).arrays[0]  # type: ignore[assignment]
    else:
        size = os.path.getsize(path) // np.dtype(dtype).itemsize
        whole = np.memmap(path, dtype, "r", shape=(size,))

    def read(number: int) -> Record:
        part = as_tensor(whole[number * length : (number + 1) * length + 1]).to(torch.int64)
        return part[:-1], part[:-1] if same else part[1:]

    return Each(max(0, (len(whole) - 1) // length), read, lambda n: f"{path}, tokens {n * length} and on")


def _cells(line: bytes) -> list[str]:
    return [cell.strip() for cell in next(csv_library.reader([line.decode("utf-8-sig").strip()]), [])]


def csv(path: str, targets: Sequence[str]) -> Each:
    """Numbers with commas, names in the first line. Inputs are all columns that are not targets, as one tensor."""
    places, lines = [], []  # where each record begins, and its line
    with open(existing(path), "rb") as f:
        names = _cells(f.readline())
        at = f.tell()
        for number, line in enumerate(f, start=2):
            if line.strip():
                places.append(at)
                lines.append(number)
            at += len(line)
    missing = [t for t in targets if t not in names]
    if missing:
        raise UserError("data-shape", f"{path} has no column {missing[0]!r}", found=", ".join(names[:20]))
    own = [i for i, name in enumerate(names) if name not in targets]
    theirs = [names.index(t) for t in targets]
    begins, numbers = np.array(places, dtype=np.int64), np.array(lines, dtype=np.int64)

    def read(number: int) -> Record:
        with open(path, "rb") as f:
            f.seek(begins[number])
            parts = _cells(f.readline())
        if len(parts) != len(names):
            raise ValueError(f"{len(parts)} values, expected {len(names)}")
        values = [float(p) for p in parts]
        return torch.tensor([values[i] for i in own]), torch.tensor([values[i] for i in theirs], dtype=torch.float64)

    return Each(len(begins), read, lambda n: f"{path}, line {numbers[n]}")


def pictures(folder: str, size: int) -> Each:
    """Pictures with masks, in folders of any depth: NAME.tif and NAME_mask.tif (the layout of kaggle_3m). Each is scaled to
    size x size: a picture of 3 channels in [0, 1], and a mask of 0 and 1."""
    try:
        from PIL import Image
    except ImportError as e:
        raise extra("Pillow", "a folder of pictures") from e
    found = sorted(p for p in existing(folder).rglob("*") if p.suffix.lower() in _PICTURES)
    masks = {p.with_name(p.stem.removesuffix("_mask")): p for p in found if p.stem.endswith("_mask")}
    images = {p.with_name(p.stem): p for p in found if not p.stem.endswith("_mask")}
    names = sorted(masks.keys() | images.keys())  # of both, without their endings
    if not masks:
        raise UserError("data-missing", f"{folder}: there are no pictures with masks",
                        expected="NAME.tif and NAME_mask.tif, in folders of any depth")  # fmt: skip

    def one(path: Path, mode: str) -> np.ndarray:
        with Image.open(path) as picture:
            if picture.mode in ("I", "F") or picture.mode.startswith("I;"):  # which would become white or black
                raise ValueError(f"{path.name} has pixels of type {picture.mode}, expected 8 bits")
            smooth = Image.Resampling.BILINEAR if mode == "RGB" else Image.Resampling.NEAREST
            return np.asarray(picture.convert(mode).resize((size, size), smooth))

    def read(number: int) -> Record:
        name = names[number]
        if name not in masks or name not in images:
            raise ValueError("it has no mask, NAME_mask" if name in images else "the mask has no picture")
        picture = torch.from_numpy(one(images[name], "RGB").copy()).permute(2, 0, 1).float() / 255
        mask = torch.from_numpy(one(masks[name], "L").copy()).unsqueeze(0)
        most = int(mask.max())
        if 1 < most <= 127:
            raise ValueError(f"the mask has values up to {most}, expected 0 and 1, or 0 and 255")
        return picture.contiguous(), (mask > (127 if most > 1 else 0)).float()

    return Each(len(names), read, lambda n: str(images.get(names[n]) or masks[names[n]]))


class Hdf5:
    """Data sets of an HDF5 file, one for each input and target, a row for each record. Each process opens the file itself."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        try:
            import h5py
        except ImportError as e:
            raise extra("h5py", "an HDF5 file") from e
        self._h5py, self.path, self.names = h5py, str(existing(path)), list(names)
        self._opened: tuple[int, Any] | None = None
        try:
            found = self._file()
            lengths = {n: len(found[n]) for n in names}
        except (OSError, KeyError) as e:
            raise UserError("data-damaged", f"{path}: not an HDF5 file with these data sets", found=f"{type(e).__name__}: {e}",
                            expected=", ".join(names)) from e  # fmt: skip
        if len(set(lengths.values())) != 1:
            raise UserError("data-shape", f"{path}: the data sets have different numbers of rows",
                            found=", ".join(f"{k}: {v}" for k, v in lengths.items()))  # fmt: skip
        self._count = next(iter(lengths.values()))

    def _file(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._h5py.File(self.path, "r"))
        return self._opened[1]

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def rows(self, numbers: np.ndarray) -> Record:
        order, back = np.unique(numbers, return_inverse=True)  # as the library wants them
        found: list[Tensor] = []
        for name in self.names:
            try:
                found.append(as_tensor(self._file()[name][order][back]))
            except OSError as e:  # a chunk that cannot be read: which record is it?
                for number in order.tolist():
                    try:
                        self._file()[name][number]
                    except OSError as one:
                        raise BadRecord(number, self.place(number), f"{name}: {one}") from one
                raise BadRecord(int(order[0]), self.place(int(order[0])), f"{name}: {e}") from e
        return tuple(found)

    def place(self, number: int) -> str:
        return f"{self.path}, row {number}"
