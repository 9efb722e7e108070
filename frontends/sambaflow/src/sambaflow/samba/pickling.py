"""torch.load(path), which since torch 2.6 makes only objects of known classes: ours, and those of models that this program has
converted, so that a model that was saved whole comes back."""

from __future__ import annotations

import torch
from torch import nn

from . import lenient, oldmodel, sambatensor

torch.serialization.add_safe_globals(
    [sambatensor.SambaTensor, sambatensor.SambaParameter, sambatensor._rebuilt, sambatensor._rebuilt_parameter, set,
     lenient.before_forward, lenient.after_forward, oldmodel.run, oldmodel.write_host_params]
)  # fmt: skip


def register(model: nn.Module) -> None:
    """What a converted model consists of. A class that only a file names is as unknown to torch.load as before."""
    torch.serialization.add_safe_globals(list({type(m) for m in model.modules()}))
