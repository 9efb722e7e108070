"""Models of several kinds, trained through the session and in eager PyTorch, on native code."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sambaflow import samba

pytestmark = pytest.mark.slow


class Tagger(nn.Module):
    """An LSTM over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lstm, self.fc = nn.Embedding(20, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, ids, tags):
        h, _ = self.lstm(self.emb(ids))
        logits = self.fc(h)
        return F.cross_entropy(logits.reshape(-1, 4), tags.reshape(-1)), logits


class SmallUNet(nn.Module):
    """Down and up with a skip, batch normalisation, transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool, self.up, self.head = nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 1)

    def forward(self, image, mask):
        e = self.enc(image)
        u = self.up(self.mid(self.pool(e)))
        out = self.head(torch.cat([e, u], 1))
        return F.binary_cross_entropy_with_logits(out, mask), out


def _ids(high, *shape):
    return lambda: (torch.randint(0, high, shape), torch.randint(0, 4, shape))


CASES = {
    "lstm": (Tagger, _ids(20, 2, 7)),
    "unet": (SmallUNet, lambda: (torch.randn(2, 1, 8, 8), torch.randint(0, 2, (2, 1, 8, 8)).float())),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_like_eager(compiled, monkeypatch, name) -> None:
    monkeypatch.setenv("TILEWORK_DEVICE", "cpu")
    kind, data = CASES[name]

    def make(args):
        torch.manual_seed(0)
        model = kind()
        samba.from_torch_model_(model)
        x, y = data()
        inputs = (samba.from_torch_tensor(x, name="x", batch_dim=0), samba.from_torch_tensor(y, name="y", batch_dim=0))
        return model, inputs, samba.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)

    _, model, _, _ = compiled(make)
    host = copy.deepcopy(model)
    opt = torch.optim.AdamW(host.parameters(), lr=0.01, weight_decay=0.01)
    for _ in range(3):
        x, y = data()
        loss, _ = samba.session.run([x, y], model.output_tensors)
        opt.zero_grad()
        expected, _ = host(x, y)
        expected.backward()
        opt.step()
        assert abs(float(loss) - float(expected)) < 1e-4 * max(1.0, abs(float(expected)))
    samba.session.to_cpu(model)
    for (k, a), b in zip(host.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.allclose(a.float(), b.float(), atol=5e-4), k
    model.eval(), host.eval()  # running statistics now
    assert torch.allclose(samba.session.run([x, y], section_types=["fwd"])[1], host(x, y)[1], atol=1e-4)


def test_hugging_face_model_from_a_config(compiled, monkeypatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setenv("TILEWORK_DEVICE", "cpu")
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, use_cache=False)  # fmt: skip

    def make(args):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        samba.from_torch_model_(model)
        ids = samba.randint(0, 50, (2, 8), name="input_ids", batch_dim=0)
        inputs = {"input_ids": ids, "labels": samba.from_torch_tensor(ids.clone(), name="labels", batch_dim=0)}
        return model, inputs, samba.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    _, model, _, _ = compiled(make)
    host = copy.deepcopy(model)
    opt = torch.optim.AdamW(host.parameters(), lr=1e-3)
    for _ in range(3):
        ids = torch.randint(0, 50, (2, 8))
        outputs = samba.session.run({"input_ids": ids, "labels": ids}, model.output_tensors)
        opt.zero_grad()
        expected = host(input_ids=ids, labels=ids).loss
        expected.backward()
        nn.utils.clip_grad_norm_(host.parameters(), 1.0)
        opt.step()
        assert abs(float(outputs[0]) - float(expected)) < 1e-3
