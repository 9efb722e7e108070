"""Pictures of what segmentation models see and find, and runs that show them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilework
from tilework.data import Arrays, Feed
from tilework.errors import UserError
from tilework.runs.folder import RunFolder
from tilework.runs.pictures import Pictures
from tilework.runs.training import Training
from tilework.zoo import cosmic, logreg, unet

ROWS, SIDE = 2, 8


class Same(nn.Module):
    """Finds the mask that is in its input: what is drawn for it is known."""

    def __init__(self, classes: int, dims: int) -> None:
        super().__init__()
        self.classes, self.dims = classes, dims
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1]
        if self.classes == 1:
            return (first - 0.5) * self.scale
        return torch.cat([-((first - c / (self.classes - 1)) ** 2) * self.scale for c in range(self.classes)], 1)


def made(classes: int, dims: int, folder: Path) -> tuple[tilework.Session, Feed, Tensor]:
    """Of masks that fill half of the picture: the left one, or for classes a third each."""
    columns = torch.arange(SIDE) * classes // SIDE if classes > 1 else (torch.arange(SIDE) < SIDE // 2).long()
    mask = columns.expand(3 * ROWS, *[SIDE] * dims)
    x = (mask / max(1, classes - 1)).unsqueeze(1).repeat(1, 3, *[1] * dims).float()
    y = mask.clone() if classes > 1 else mask.unsqueeze(1).float()
    model, loss = Same(classes, dims), F.cross_entropy if classes > 1 else F.binary_cross_entropy_with_logits
    step = tilework.Step(model=model, inputs=(x[:ROWS],), targets=(y[:ROWS],), loss=loss,
                         optimizer=torch.optim.SGD(model.parameters(), 1e-9))  # fmt: skip
    path = folder / "same.pef"
    tilework.compile(step, path, options=tilework.Options(device="reference", programs="fused"), weights="inside")
    return tilework.load(path), Feed(Arrays((x, y)), ROWS, seed=1), mask


@pytest.mark.parametrize(("classes", "dims"), [(1, 2), (3, 2), (1, 3), (4, 3)])
def test_input_mask_and_what_is_found_are_side_by_side(classes: int, dims: int, tmp_path: Path) -> None:
    session, feed, _ = made(classes, dims, tmp_path)
    before = session.tensors()
    picture = Pictures(session, feed).drawn()
    assert picture.dtype == np.uint8 and picture.shape == (ROWS * 128 + 2, 3 * 128 + 4, 3)
    panels = [picture[:128, i * 130 : i * 130 + 128] for i in range(3)]
    for other in panels[1:]:  # the model finds what is there
        assert np.abs(panels[0].astype(int) - other).max() <= 1
    assert (picture[128:130] == 255).all() and (picture[:, 128:130] == 255).all()
    assert all(torch.equal(t, before[k]) for k, t in session.tensors().items())


def test_what_is_no_segmentation_is_refused(tmp_path: Path) -> None:
    options = tilework.Options(device="reference", programs="fused")
    tilework.compile(logreg.build(batch_size=4), tmp_path / "l.pef", options=options)
    digits = Arrays((torch.randn(8, 784), torch.zeros(8, dtype=torch.int64)))
    with tilework.load(tmp_path / "l.pef") as session, pytest.raises(UserError, match=r"\[run-images\].*no pictures of masks"):
        Pictures(session, Feed(digits, 4))
    step = unet.build()
    tilework.compile(step, tmp_path / "u.pef", options=options, verify=False)
    images, masks = unet.synthetic(unet.SIZES["tiny"], 8)
    with tilework.load(tmp_path / "u.pef") as session:
        Pictures(session, Feed(Arrays((images, masks)), 4))
        with pytest.raises(UserError, match="other numbers than 0 and 1"):
            Pictures(session, Feed(Arrays((images, masks + 0.5)), 4))


def test_planes_with_classes(tmp_path: Path) -> None:
    """CosmicTagger: [n, planes, classes, h, w] for labels [n, planes, h, w]."""
    tilework.compile(
        cosmic.build(), tmp_path / "c.pef", options=tilework.Options(device="reference", programs="fused"), verify=False
    )
    config = cosmic.SIZES["tiny"]
    with tilework.load(tmp_path / "c.pef") as session:
        picture = Pictures(session, Feed(Arrays(cosmic.synthetic(config, 2 * config.batch_size)), config.batch_size)).drawn()
    assert picture.ndim == 3 and picture.shape[2] == 3


def test_a_run_shows_them(tmp_path: Path) -> None:
    """At their steps, whatever else ends a call; and the numbers are those of a run without."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = {}
    for name, shown in (("plain", {}), ("shown", {"log_dir": tmp_path / "board", "histograms": 4, "images": 3})):
        (tmp_path / name).mkdir()
        session, feed, _ = made(1, 2, tmp_path / name)
        runs[name] = Training(session, feed, tmp_path / name / "run", steps=10, save_every=5, **shown)
        runs[name].run()
    losses = [[m["loss"] for m in RunFolder(tmp_path / name / "run").metrics()] for name in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 10
    assert all(m["lr"] == 1e-9 for m in RunFolder(tmp_path / "shown" / "run").metrics())
    found = EventAccumulator(str(tmp_path / "board"), {"histograms": 0, "images": 0}).Reload()
    assert [e.step for e in found.Images("samples/input, target, prediction")] == [3, 6, 9]
    assert [e.step for e in found.Histograms("parameters/scale")] == [4, 8]
    assert found.Scalars("memory/session_planned_mb")[-1].value == pytest.approx(session.planned_bytes / 1e6)
    assert (tmp_path / "shown" / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    session, feed, _ = made(1, 2, tmp_path)
    with pytest.raises(UserError, match=r"\[run-board\]"):
        Training(session, feed, tmp_path / "r", steps=1, images=3)
