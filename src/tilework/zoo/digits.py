"""Handwritten digits: the subset that the package carries, a folder with the full MNIST files, or a download of them."""

from __future__ import annotations

import gzip
import hashlib
import struct
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import MachineError, UserError

CARRIED = Path(__file__).parent / "data"
MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, in [0, 1]
SOURCES = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
FULL_FILES = {  # SHA-256 of the published files' content, unpacked
    "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def _find(folder: Path, name: str) -> Path:
    """The file, gzipped or plain, in the folder or in its MNIST/raw."""
    for place in (folder, folder / "MNIST" / "raw"):
        for candidate in (place / name, place / name.removesuffix(".gz")):
            if candidate.exists():
                return candidate
    raise UserError("data-missing", f"{folder}: there are no MNIST files",
                    expected=f"{name}, plain or gzipped, in this folder or in its MNIST/raw",
                    fix="name the right folder, use --download, or leave it out to use the built-in digits")  # fmt: skip


def read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes, as MNIST comes: a magic number, the sizes, the data."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as f:
            data = f.read()
        dims = data[3]
        shape = struct.unpack(f">{dims}I", data[4 : 4 + 4 * dims])
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, struct.error, zlib.error) as e:
        raise UserError("data-damaged", f"{path}: not a readable idx file", found=str(e)) from e


def load(split: str = "train", folder: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """(images float32 [n, 1, 28, 28] normalised, labels int64 [n]) of the split "train" or "test"."""
    place = Path(folder) if folder else CARRIED
    part = {"train": "train", "test": "t10k"}[split]
    images = read_idx(_find(place, f"{part}-images-idx3-ubyte.gz"))
    labels = read_idx(_find(place, f"{part}-labels-idx1-ubyte.gz"))
    x = torch.from_numpy(np.array(images)).to(torch.float32).div_(255.0).sub_(MEAN).div_(STD)
    return x.unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def batches(x: Tensor, y: Tensor, batch_size: int, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches only (shapes are fixed), shuffled by the seed, or in order where it is None."""
    order = torch.arange(len(x)) if seed is None else torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    for start in range(0, len(x) - batch_size + 1, batch_size):
        pick = order[start : start + batch_size]
        yield x[pick], y[pick]


def download(folder: str | Path, report: Callable[[str], None] = lambda _: None) -> Path:
    """The full MNIST files into `folder`, each checked by its SHA-256. Files that are there already are kept."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in FULL_FILES.items():
        target = folder / name
        if target.exists() and _content_digest(target.read_bytes()) == digest:
            continue
        report(f"downloading {name}")
        target.write_bytes(_fetch(name, digest))
    return folder


def _content_digest(data: bytes) -> str:
    try:
        return hashlib.sha256(gzip.decompress(data)).hexdigest()
    except (OSError, EOFError, zlib.error):
        return ""


def _fetch(name: str, digest: str) -> bytes:
    problems = []
    for source in SOURCES:
        try:
            with urllib.request.urlopen(source + name, timeout=20) as response:
                data: bytes = response.read()
        except OSError as e:
            problems.append(f"{source}: {e}")
            continue
        if _content_digest(data) == digest:
            return data
        problems.append(f"{source}: the file has other content than the published one")
    raise MachineError("data-download", f"{name} could not be downloaded", found="; ".join(problems),
                       fix="put the four MNIST files into a folder and name it, or use the built-in digits")  # fmt: skip
