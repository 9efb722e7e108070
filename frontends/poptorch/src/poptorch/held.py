"""The optimizer of an executor, and where its state is."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tilework.frontend.optimizers import state_to_device, state_to_host

from . import optim
from .errors import Error
from .optimizers import (
    Form,
    another_form,
    another_value,
    copied,
    engine_state,
    form_of,
    ipu_state,
    kind_of,
    program_values,
    require_variable,
    twin,
    warn_of_unknown,
)

if TYPE_CHECKING:
    from .device import Device


class Held:
    """The optimizer of an executor: what was compiled of it, which values count, and its state while no device has it.

    State is in one place. While a device is attached it is there; else it is the optimizer's own: `_loaded` of poptorch.optim's,
    `state` of torch's. Whoever attaches next takes it from there."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.form: Form | None = None
        self.values: dict[str, float] = {}
        self._said: set[Any] = set()
        self._left: tuple[Any, Any] | None = None  # (ipu_state, ipu_param), as the device was left
        self._synced: Any = weakref.WeakKeyDictionary()  # torch's optimizer -> its `state`, as a device has it or had it

    def compiled(self, program: Path, names: Mapping[int, str]) -> None:
        self._names, self._variable = names, program_values(program)
        self.form = form_of(self.optimizer, names)
        self.values = self.form.values
        self._attributes = getattr(self.optimizer, "variable_attrs", None)

    def forget(self) -> None:
        """The program is gone. The optimizer has the state."""
        self.form = self._left = None
        self._synced.clear()

    def require_alike(self, optimizer: Any) -> Form:
        """Errors where setOptimizer was given what the compiled update cannot take."""
        assert self.form is not None
        form = form_of(optimizer, self._names)
        found = another_form(form, self.form)
        if found is None:
            require_variable(self._attributes, self.form.values, form.values)
            found = another_value(form, self.form, self._variable)
        if found is not None:
            raise Error("poptorch-optimizer", f"setOptimizer: another {found[0]} than when the model was compiled",
                        found=found[1], expected=found[2],
                        fix="call destroy(), then setOptimizer(): the next call compiles again; "
                        "new.load_state_dict(old.state_dict()) takes the state along")  # fmt: skip
        return form

    def replace(self, optimizer: Any, device: Device | None, model: nn.Module | None) -> None:
        kind_of(optimizer)
        if self.form is not None:
            form = self.require_alike(optimizer)
            if device is not None:
                self.take(device, model, optimizer)
            elif optimizer is not self.optimizer and self._left is not None:
                self._hand_over(optimizer)
            self.values = form.values
            if device is not None:
                self.send(device)
        self.optimizer = optimizer

    def _hand_over(self, optimizer: Any) -> None:
        """State that came back from a device goes on with the next optimizer, unless that one brings its own."""
        before = self.optimizer
        ours, theirs = isinstance(before, optim.Optimizer), isinstance(optimizer, optim.Optimizer)
        if not self._has_news(optimizer):
            if ours != theirs:
                raise Error("poptorch-optimizer", "setOptimizer: while no device has the state, it cannot go from an optimizer "
                                                  "of poptorch.optim to one of torch.optim, or back",
                            found=f"{type(before).__module__}, then {type(optimizer).__module__}",
                            fix="call attachToDevice() first")  # fmt: skip
            if ours:
                optimizer._loaded = before._loaded
            else:
                optimizer.state.update(before.state)
        if ours:
            before._loaded = None

    def warn(self, *, unknown: bool) -> None:
        self.optimizer._opt_called = True  # a scheduler's check that optimizer.step() comes first: our updates count
        if unknown:
            warn_of_unknown(self.optimizer, self._said)

    def send(self, device: Device) -> None:
        device.set({k: v for k, v in self.values.items() if k in self._variable})

    # ---- its state ----

    def _has_news(self, optimizer: Any) -> bool:
        """State that no device has had yet."""
        if isinstance(optimizer, optim.Optimizer):
            return optimizer._loaded is not None
        return bool(optimizer.state) and self._synced.get(optimizer) is not optimizer.state

    def upload(self, device: Device, model: nn.Module) -> None:
        """The model, and the optimizer's state."""
        loaded = self.optimizer._loaded if isinstance(self.optimizer, optim.Optimizer) else None
        if loaded is not None and loaded[0]:
            new = engine_state(loaded[0], device.session.tensors())
            device.write([new] * len(device.sessions))
            device.upload(model)
        else:
            device.upload(model, twin(self.optimizer))
        self._taken(self.optimizer)
        self._left = None

    def take(self, device: Device, model: nn.Module | None, optimizer: Any) -> None:
        """State that was loaded into an optimizer, to the device, which has the model already."""
        if not self._has_news(optimizer):
            return
        session = device.session
        if isinstance(optimizer, optim.Optimizer):
            loaded, optimizer._loaded = optimizer._loaded, None
            new = engine_state((loaded[0] if loaded else None) or {}, session.tensors())
        else:
            made = twin(optimizer)
            assert model is not None
            device._each(lambda session, _: state_to_device(session, model, made))
            new = _states(session)
        device.write([new] * len(device.sessions))
        self._taken(optimizer)

    def _taken(self, optimizer: Any) -> None:
        if isinstance(optimizer, optim.Optimizer):
            optimizer._loaded = None
        else:
            self._synced[optimizer] = optimizer.state

    def bring(self, device: Device, model: nn.Module | None) -> None:
        """Before the device is left."""
        self._left = self.now(device)
        if isinstance(self.optimizer, optim.Optimizer):
            self.optimizer._loaded = self._left
        else:
            _to_torch(self.optimizer, device, model)
            self._synced[self.optimizer] = self.optimizer.state

    def now(self, device: Device | None) -> tuple[Any, Any] | None:
        """(ipu_state, ipu_param). None before the compile."""
        if device is None:
            return self._left
        return ipu_state(_states(device.session), device.session.manifest, device.session.hyper)

    def for_a_file(self, device: Device | None, model: nn.Module | None) -> Any:
        """The optimizer with its state, for a pickle. Those of poptorch.optim bring it along."""
        if device is None or self.optimizer is None or isinstance(self.optimizer, optim.Optimizer):
            return self.optimizer
        kind: Any = type(self.optimizer)
        host = kind.__new__(kind)
        host.__setstate__({**self.optimizer.__getstate__(), "state": copied(self.optimizer.state)})
        _to_torch(host, device, model)
        return host


def _states(session: Any) -> dict[str, Tensor]:
    return {k: t for k, t in session.tensors().items() if k.startswith("state/")}


def _to_torch(optimizer: Any, device: Device, model: Any) -> None:
    """The device's state as torch's."""
    made = twin(optimizer)
    state_to_host(device.session, model, made)
    for p, state in made.state.items():
        optimizer.state[p] = state
