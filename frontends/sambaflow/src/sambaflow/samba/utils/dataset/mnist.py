"""MNIST as apps want it: ToTensor, normalise, flatten, pad; and two loaders. Without files, the built-in digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tilework.zoo import digits

from ....logging import samba_logger


def _get(params: Any, name: str, default: Any = None) -> Any:
    return params.get(name, default) if isinstance(params, Mapping) else getattr(params, name, default)


def dataset_transform(params: Any) -> Callable[[Any], Tensor]:
    """An image (PIL, numpy or tensor of bytes) to a normalised row of num_features, padded with zeros."""
    width = _get(params, "num_features")

    def transform(image: Any) -> Tensor:
        pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image, copy=True))
        values = pixels.to(torch.float32)
        if not pixels.is_floating_point():
            values = values / 255.0
        row = ((values - digits.MEAN) / digits.STD).reshape(-1)
        if width and width > row.numel():
            row = torch.nn.functional.pad(row, (0, width - row.numel()))
        return row

    return transform


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """MNIST in memory, normalised. `images` [n, 1, 28, 28] and `labels` [n] are the whole of it."""

    def __init__(self, train: bool, folder: Path | None) -> None:
        self.images, self.labels = digits.load("train" if train else "test", folder)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def find_folder(params: Any) -> Path | None:
    """<data-path>/<data-folder>, or <data-path>, where the MNIST files are (plain or gzipped, or in MNIST/raw)."""
    path = Path(_get(params, "data_path") or _get(params, "data_dir") or ".")
    for folder in (path / str(_get(params, "data_folder") or ""), path):
        for place in (folder, folder / "MNIST" / "raw"):
            if any((place / f"train-images-idx3-ubyte{end}").exists() for end in ("", ".gz")):
                return folder
    samba_logger.info(f"no MNIST below {path}: the {6000} + {1000} digits that Tilework carries are used instead", log_limit=1)
    return None


def load_dataset(params: Any) -> tuple[Digits, Digits]:
    folder = find_folder(params)
    return Digits(True, folder), Digits(False, folder)


def prepare_dataloader(params: Any, train_ds: Any = None, test_ds: Any = None) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """(train, test): rows of num_features, whole batches only, as shapes are fixed."""
    if train_ds is None or test_ds is None:
        train_ds, test_ds = load_dataset(params)
        width = _get(params, "num_features") or 784
        for ds in (train_ds, test_ds):
            flat = ds.images.reshape(len(ds), -1)
            ds.images = torch.nn.functional.pad(flat, (0, width - flat.shape[1])) if width > flat.shape[1] else flat
    size, workers = _get(params, "batch_size", 1), _get(params, "num_workers", 0) or 0
    return (DataLoader(train_ds, batch_size=size, shuffle=True, drop_last=True, num_workers=workers),
            DataLoader(test_ds, batch_size=size, shuffle=False, drop_last=True, num_workers=workers))  # fmt: skip
