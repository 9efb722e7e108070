"""Twenty programs as users write them: compile, then run, as commands; and the numbers that they print beside plain PyTorch,
which is told here to cast what the vendor's stack casts by itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilework
from sambaflow import samba

HERE = Path(__file__).parent / "programs"
Command = Any  # the fixture below; a plain function with an attribute


def program(number: int) -> ModuleType:
    """Its module under a name that pickles find."""
    (path,) = HERE.glob(f"{number:02}_*.py")
    spec = importlib.util.spec_from_file_location(f"program_{number:02}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(capfd) -> Command:
    """command(module, "run", ...): the numbers that it printed as losses. Each is a session of its own, as a process has."""

    def call(module: ModuleType, name: str, *flags: str) -> list[float]:
        samba.session.reset()
        samba.session.seed = None
        capfd.readouterr()
        where = ["--pef-name", "m", "--output-folder", "o"] if name == "compile" else ["--pef", "o/m/m.pef"]
        module.main([name, *where, *flags])
        call.text = "".join(capfd.readouterr())
        return [float(line.split()[1]) for line in call.text.splitlines() if line.startswith("loss ")]

    return call


def trained(model: Any, optimizers: Any, batches: Iterable[Any], forward: Any = None) -> list[float]:
    """Plain PyTorch."""
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    losses = []
    for batch in batches:
        result = (forward or model)(*batch)
        loss = result[0] if isinstance(result, (tuple, list)) else result
        for optimizer in several:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in several:
            optimizer.step()
        losses.append(loss.item())
    return losses


def near(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) > 0
    assert found == pytest.approx(expected, rel=2e-4, abs=2e-6)
    assert len(set(expected)) > 1, "the reference does not move, so it shows nothing"


def wide(batch: Iterable[Tensor]) -> list[Tensor]:
    return [t.float() if t.is_floating_point() else t.long() for t in batch]


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    return make()


def test_01_bf16_regression(command: Command) -> None:
    p = program(1)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(256, p.Regression)
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.1), map(wide, p.batches())))
    for name, value in torch.load("weights.pt").items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_02_bf16_autoencoder(command: Command) -> None:
    p = program(2)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(1, p.AutoEncoder)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0)
    near(found, trained(model, optimizer, ([p.images(i).float()] for i in range(3))))


def test_03_bf16_products(command: Command) -> None:
    p = program(3)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(3, p.Products)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, 0.9)
    near(found, trained(model, optimizer, (wide(p.data(i)) for i in range(3))))


def test_04_constant_basis(command: Command) -> None:
    p = program(4)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(4, lambda: p.Spectral(lambda t: t))
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.1), (p.data(i) for i in range(3))))
    artifact = tilework.read_artifact("o/m/m.pef")
    held = [t for t in artifact.constants.values() if t.shape == (6, 6)]
    assert len(held) == 1 and torch.equal(held[0], p.cosines(6))


def test_05_bce_targets(command: Command) -> None:
    p = program(5)
    command(p, "compile", "-bs", "4")
    found = command(p, "run", "-lr", "0.3")
    model = seeded(5, p.Detector)
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.3), (p.data(i) for i in range(3))))


def test_06_tokens_beyond(command: Command) -> None:
    p = program(6)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(6, p.Classifier)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, (0.9, 0.997), weight_decay=0.1)
    expected = []
    for batch in [*p.loader(), *p.loader()]:
        optimizer.zero_grad()
        loss, _ = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    near(found, expected)


def test_07_int16_labels(command: Command) -> None:
    p = program(7)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(7, p.Tagger)
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.3), (wide(p.data(i)) for i in range(4))))
    assert [i.type.dtype for i in tilework.read_artifact("o/m/m.pef").manifest.signature.inputs] == ["uint8", "int16"]


def test_08_small_indices(command: Command) -> None:
    p = program(8)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(8, p.Picker)
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.2), (p.data(i) for i in range(3))))


def test_09_test_command(command: Command) -> None:
    p = program(9)
    command(p, "compile")
    (found,) = command(p, "test")
    assert "golden" in command.text and found > 0


def test_10_text_generation(command: Command) -> None:
    p = program(10)
    command(p, "compile")
    assert [s.name for s in tilework.read_artifact("o/m/m.pef").manifest.signatures] == ["prompt", "token"]
    found = command(p, "run")
    model = seeded(10, p.Language).eval()
    with torch.no_grad():
        tokens, scores = p.generate(p.prompt(), 4, model, model)
    near(found, scores)
    assert f"tokens {tokens.tolist()}" in command.text


def test_11_partial_batches(command: Command) -> None:
    p = program(11)
    command(p, "compile", "-b", "8", "--batch-sizes", "8,3")
    assert [s.num_rows for s in tilework.read_artifact("o/m/m.pef").manifest.signatures] == [8, 3]
    found = command(p, "run", "-b", "8")
    assert "captured once more" not in command.text
    model = seeded(11, p.Net)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.0)
    near(found, trained(model, optimizer, [*p.loader(), *p.loader()]))
    for name, value in torch.load("weights.pt").items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-3, atol=1e-5)
    assert command(p, "run", "-b", "3") == found  # whichever of the sizes the examples have
    with pytest.raises(SystemExit) as left:
        command(p, "compile", "--batch-sizes", "many")
    assert left.value.code == 2


def test_12_whole_model(command: Command) -> None:
    p = program(12)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(12, p.Stacked)
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.05), (p.data(i) for i in range(4))))
    again = torch.load("model.pt", weights_only=False)
    torch.testing.assert_close(again.state_dict(), dict(model.state_dict()), rtol=1e-4, atol=1e-5)


def test_13_checkpoint(command: Command) -> None:
    p = program(13)
    command(p, "compile")
    found = [*command(p, "run"), *command(p, "run", "--resume")]
    model = seeded(13, p.Net)
    model.base.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], 0.01)
    near(found, trained(model, optimizer, (p.data(i) for i in range(4))))


def test_14_two_optimizers(command: Command) -> None:
    p = program(14)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(14, p.Ranking)
    rest = [*model.dense.parameters(), *model.top.parameters()]
    several = [torch.optim.SGD(model.items.parameters(), 0.5), torch.optim.AdamW(rest, 0.01, weight_decay=0.01)]
    expected = []
    for step in range(4):
        if step == 2:  # from then on, for all of them
            for optimizer in several:
                optimizer.param_groups[0]["lr"] = 0.05
        expected += trained(model, several, [wide(p.data(step))])
    near(found, expected)


def test_15_host_loss(command: Command) -> None:
    p = program(15)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(15, p.Segmenter)

    def forward(image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(model(image), label)

    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.1, 0.9), (wide(p.data(i)) for i in range(4)), forward))


def test_16_hugging_face(command: Command) -> None:
    pytest.importorskip("transformers")
    p = program(16)
    command(p, "compile")
    found = command(p, "run")
    model = seeded(16, lambda: p.BertForSequenceClassification(p.config()))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0)

    def forward(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return model(ids, mask, labels=labels).loss

    near(found, trained(model, optimizer, (p.data(i) for i in range(2)), forward))


def test_17_measured(command: Command) -> None:
    p = program(17)
    command(p, "compile", "-b", "4")
    command(p, "measure-performance", "-b", "4", "--num-iterations", "5", "--json", "report.json")
    assert "throughput" in command.text and json.loads(Path("report.json").read_text())
    found = command(p, "run", "-b", "4", "--mapping", "spatial", "--num-spatial-batches", "2")
    model = seeded(17, p.Net)
    halves = [wide(part) for i in range(2) for part in zip(*(t.chunk(2) for t in p.data(i)), strict=True)]
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.1), halves))


def test_18_inference(command: Command) -> None:
    p = program(18)
    command(p, "compile", "-b", "4", "--inference", "--batch-sizes", "1,6")
    assert all(list(s.programs) == ["infer"] for s in tilework.read_artifact("o/m/m.pef").manifest.signatures)
    found = command(p, "run", "-b", "4", "--inference")
    assert "captured once more" not in command.text
    model = seeded(18, p.Scorer).eval()
    near(found, [float(s) for r in p.requests() for s in model(r.float())[:, 0]])


def alone(number: int, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a process: what it says on its way out, and its exit code."""
    (path,) = HERE.glob(f"{number:02}_*.py")
    return subprocess.run([sys.executable, str(path), *flags], capture_output=True, text=True, env={**os.environ, **environment})


def test_19_world_size(command: Command) -> None:
    p = program(19)
    command(p, "compile", "--data-parallel", "-ws", "2")
    assert tilework.read_artifact("o/m/m.pef").manifest.num_replicas == 2
    found = command(p, "run")
    model = seeded(19, p.Net)
    near(found, trained(model, torch.optim.SGD(model.parameters(), 0.1), [[torch.ones(3, 4)]] * 2))
    with pytest.raises(tilework.UserError, match="1 ranks were started, and 2 were asked for"):
        command(p, "run", "--data-parallel", "-ws", "2")
    done = alone(19, "run", "--pef", "o/m/m.pef", "--data-parallel", WORLD_SIZE="2", RANK="0")
    assert done.returncode == 2 and "nobody says where rank 0 is" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("shape", "invalid for input of size 8"),
        ("value", "tensor's value"),
        ("classes", "target"),
        ("frozen", "nothing to train"),
        ("optimizer", "none of the model's"),
        ("inputs", "missing 1 required"),
    ],
)
def test_20_mistakes(command: Command, mistake: str, words: str) -> None:
    p = program(20)
    with pytest.raises(tilework.UserError) as caught:
        command(p, "compile", "--mistake", mistake)
    text = str(caught.value)
    assert words in text and "sambaflow/samba" not in text and caught.value.exit_code == 2
    source = Path(str(p.__file__)).read_text().splitlines()
    lines = [i for i, line in enumerate(source, 1) if line.endswith(f"# HERE {mistake}")]
    assert all(f"20_mistakes.py:{i}\n" in text for i in lines)
    if mistake == "shape":
        done = alone(20, "compile", "--mistake", mistake, "--pef-name", "m", "--output-folder", "o")
        assert done.returncode == 2 and "20_mistakes.py:" in done.stderr and "Traceback" not in done.stderr


def test_20_mistakes_at_run_time(command: Command) -> None:
    p = program(20)
    command(p, "compile")
    assert command(p, "run")
    with pytest.raises(tilework.UserError, match="no graph to compile"):
        command(p, "run", "--mistake", "graph")
    with pytest.raises(tilework.UserError, match=r"out of (range|bounds)"):
        command(p, "run", "--mistake", "width")
