"""What a segmentation model sees, what it should find and what it finds, side by side, for the first records of the data.

An artifact is one of a segmentation model where it has one input and one target, and one of its inference outputs has a value, or
values of several classes, for each pixel of the target: [n, ..., height, width]. The target has to be a mask: whole numbers, or
floats of 0 and 1."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..artifact.structure import flatten
from ..data.feed import Feed
from ..errors import UserError
from ..runtime.session import Session

ROWS = 4  # records that are shown
_SIDE = 128  # smaller pictures are enlarged to about this
_GAP = 2  # white pixels between two of them


class Pictures:
    """Of one artifact and its data. UserError where they are not those of a segmentation model."""

    def __init__(self, session: Session, feed: Feed) -> None:
        s = session.manifest.signature
        self.session = session
        given, targets = s.inputs[: s.num_model_inputs], s.inputs[s.num_model_inputs :]
        if len(given) != 1 or len(targets) != 1:
            raise self._not_one(f"{len(given)} inputs and {len(targets)} targets", "one of each")
        self._pixels, target = given[0].type.shape, targets[0].type
        whole = not target.type().empty().is_floating_point()
        found = [(i, axis) for i, o in enumerate(s.infer_outputs)
                 if (axis := _classes(o.type.shape, target.shape, whole=whole)) is not None]  # fmt: skip
        if len(self._pixels) < 4 or self._pixels[-2:] != target.shape[-2:] or not found:
            shapes = {"input": self._pixels, "target": target.shape, **{o.name: o.type.shape for o in s.infer_outputs}}
            raise self._not_one(", ".join(f"{k} {list(v)}" for k, v in shapes.items()), "values for each pixel of a mask")
        self._output, self._axis = found[0]
        records = feed.first(self._pixels[0])
        self._inputs, self._target = records[: s.num_model_inputs], records[-1]
        if not whole and not bool(((self._target == 0) | (self._target == 1)).all()):
            raise self._not_one("a target with other numbers than 0 and 1", "a mask")

    def _not_one(self, found: str, expected: str) -> UserError:
        return UserError("run-images", f"{self.session.artifact.path}: there are no pictures of masks to show", found=found,
                         expected=expected, fix="leave out --images, which is for segmentation models")  # fmt: skip

    def drawn(self) -> np.ndarray:
        """Bytes [height, width, 3]: a row for each record; in it the input, the mask, and what the model makes of it now. Runs
        inference, of which training notices nothing."""
        logits = flatten(self.session.infer(*self._inputs))[0][self._output].float()
        target = self._target.float()
        if self._axis:
            found, most = logits.argmax(self._axis).float(), max(1, logits.shape[self._axis] - 1)
        else:
            probable = bool(((logits >= 0) & (logits <= 1)).all())
            found, most = logits if probable else logits.sigmoid(), 1
        rows = []
        for i in range(min(ROWS, target.shape[0])):
            panels = [_seen(self._inputs[0][i].float()), _middle(target[i]) / most, _middle(found[i]) / most]
            rows.append(_beside([_bytes(p) for p in panels], axis=1))
        return _beside(rows, axis=0)


def _classes(output: list[int], target: list[int], *, whole: bool) -> int | None:
    """The axis of the output along which the classes are; 0 where it is of the target's shape itself; None: it is no mask."""
    if output == target:
        return None if whole else 0
    without = [i for i in range(1, len(output)) if output[:i] + output[i + 1 :] == target and len(output) == len(target) + 1]
    return without[0] if without and whole else None


def _seen(picture: Tensor) -> Tensor:
    """[..., height, width] -> values in [0, 1], [height, width] or, of three channels, [3, height, width]."""
    flat = picture.reshape(-1, *picture.shape[-3:]) if picture.dim() > 3 else picture
    flat = flat[:, flat.shape[1] // 2] if picture.dim() > 3 else flat  # a volume: the slice in its middle
    flat = flat if flat.shape[0] == 3 else flat[flat.shape[0] // 2]
    low, high = flat.min(), flat.max()
    return (flat - low) / (high - low).clamp(min=1e-12)


def _middle(mask: Tensor) -> Tensor:
    while mask.dim() > 2:
        mask = mask[mask.shape[0] // 2]
    return mask


def _bytes(picture: Tensor) -> np.ndarray:
    """[height, width, 3], enlarged where it is small."""
    colors = picture if picture.dim() == 3 else picture.expand(3, *picture.shape)
    times = max(1, _SIDE // max(colors.shape[-2:]))
    large = colors.repeat_interleave(times, 1).repeat_interleave(times, 2)
    return (large.nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def _beside(parts: list[np.ndarray], axis: int) -> np.ndarray:
    shape = list(parts[0].shape)
    shape[axis] = _GAP
    gap = np.full(shape, 255, np.uint8)
    return np.concatenate([p for part in parts for p in (gap, part)][1:], axis=axis)
