"""What trainingModel and inferenceModel return: a model on the device. It is compiled at the first call, for the shapes of that
call; weights are copied when they are needed."""

from __future__ import annotations

import collections
import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilework

from . import optimizers
from .adapter import NAMES, Call, Look, Traced, coerced, look
from .batches import Batches
from .device import Device, Folder, compile_to, instances, seed_of
from .enums import ConnectionType, ReductionType
from .errors import ArgumentError, Error
from .held import Held
from .logs import logger
from .optim import Optimizer
from .options import Options
from .returned import returned
from .strategies import num_devices
from .weights import Shared, alone, owners, require_unwrapped, shared


def version() -> str:
    """Files of compiled models are for exactly this one."""
    return f"3.4.0+tilework.{tilework.__version__}"


class PoplarExecutor:
    def __init__(self, model: nn.Module, options: Options, *, training: bool, optimizer: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise Error("poptorch-model", "this is not a model", found=type(model).__name__, expected="a torch.nn.Module")
        if training:
            require_unwrapped(model)
            optimizers.kind_of(optimizer)
        elif options.Training.gradient_accumulation != 1:
            raise Error("poptorch-options", "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it "
                                            "as its default "
                        "value (1) when running inference", found=str(options.Training.gradient_accumulation))  # fmt: skip
        options._freeze()
        self._options = options.clone()
        self._options._freeze()
        self._user_model = model
        self._training = training
        self._batches = Batches(self._options, training=training)
        self._held = Held(optimizer)
        self._shared = shared(model)
        self._call: Call | None = None
        self._look: Look | None = None
        self._device: Device | None = None
        self._folder: Folder | None = None
        self._path: Path | None = None
        self._traced: Traced | None = None
        self._buffers: list[dict[str, Tensor]] = []  # of each replica, while no device has them
        self._random: tuple[int, ...] | None = None
        self._uploaded: tuple[Any, ...] = ()  # which version of the weights the device has
        self._times: collections.deque[float] = collections.deque(maxlen=1000)  # seconds of the last calls
        self._compile_seconds: float | None = None
        self._is_quick = False
        if training:
            self._take_model()

    def _take_model(self) -> None:
        """Wraps the model. After destroy() the next compile does it again, unless another executor trains the model by then."""
        if self._shared.trainer is self:
            return
        require_unwrapped(self._user_model)
        self._shared.updated = frozenset(id(p) for group in self._optimizer.param_groups for p in group["params"])
        self._shared.wrap()
        self._shared.trainer = self
        if isinstance(self._optimizer, Optimizer):
            self._optimizer._state_of = weakref.ref(self)

    # ---- what it is ----

    @property
    def model(self) -> nn.Module:
        return self._user_model

    @property
    def options(self) -> Options:
        return self._options

    @property
    def _executable(self) -> Any:
        return self._path

    @property
    def _optimizer(self) -> Any:
        return self._held.optimizer

    def __getattr__(self, name: str) -> Any:
        """Everything else is the model's."""
        if name.startswith("__") or "_user_model" not in vars(self):
            raise AttributeError(name)
        return getattr(self._user_model, name)

    def __repr__(self) -> str:
        return repr(self._user_model)

    def isCompiled(self) -> bool:
        return self._path is not None

    def isAttachedToDevice(self) -> bool:
        return self._device is not None

    # ---- whose weights ----

    def _owners(self) -> list[Shared]:
        """Of the weights: another executor may train a model that this one is a part of."""
        return owners(self._user_model, self._shared)

    def _version(self) -> tuple[Any, ...]:
        return tuple((id(o), o.version) for o in self._owners())

    @contextlib.contextmanager
    def _plain(self, *, pull: bool = True) -> Iterator[None]:
        """The model with its weights up to date, as it was before anybody wrapped it."""
        with contextlib.ExitStack() as stack:
            known = self._owners()
            for owner in known if pull else ():
                owner.pull()
            for owner in known:
                stack.enter_context(owner.plain())
            yield

    # ---- compile ----

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Before the first call, for the shapes of these arguments."""
        if self._call is not None:
            logger.warning("Call to compile() ignored: the model is already compiled")
            return
        self._compile(args, kwargs)
        if self._options.connection_type != ConnectionType.Never:
            self._attach()

    def _compile(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        from .precompiled import Operators, described, require_same

        start = time.perf_counter()
        if self._training:
            self._take_model()
        batches, options, model = self._batches, self._options, self._user_model
        call = Call(args, kwargs)
        given = call.tensors(args, kwargs)
        batches.check(given)
        for i, t in enumerate(given):
            if t.dtype in (torch.int64, torch.float64, torch.bfloat16):
                to = "Int" if t.dtype == torch.int64 else "Float"
                logger.warning(f"Type coerced from {NAMES[t.dtype]} to {to} for tensor id {i + 1}")
        micro = [coerced(batches.micro(t)).contiguous() for t in given]
        if self._training and batches.replicas > 1 and options.broadcast_buffers and any(True for _ in model.buffers()):
            raise Error("poptorch-buffer", "PopTorch does not support broadcasting buffers to replicas",
                        found="a model with buffers, replicationFactor above 1",
                        fix="where the buffers of replicas may differ: options.broadcastBuffers(False)")  # fmt: skip
        with self._plain():
            for long_name, *_ in options.anchored_tensors.values():
                self._anchored(long_name)
            with Operators(model, micro) as operators:
                seen = look(model, call, micro, training=self._training)
            self._check_blocks(seen)
            traced = Traced(model, call, seen, training=self._training)
            own = described(self, micro, operators.lines)
            if self._path is not None:  # a file that was loaded: only the form of the call was not known yet
                require_same(own, self._facts, self._path)
                self._settle(call, seen, traced, self._path, given)
                return
            self._facts = own
            self._folder = Folder()
            path = self._folder.path / "model.pef"
            clip = getattr(self._optimizer, "max_grad_norm", None)
            twin = optimizers.twin(self._optimizer) if self._training else None
            compile_to(path, traced, micro, options, batches, twin, clip, {"stages": [list(s) for s in self._stages]})
        self._settle(call, seen, traced, path, given)
        self._compile_seconds = time.perf_counter() - start

    def _settle(self, call: Call, seen: Look, traced: Traced, path: Path, given: Sequence[Tensor]) -> None:
        """What the calls need, worked out once."""
        self._call, self._look, self._traced, self._path = call, seen, traced, path
        self._shapes = [t.shape for t in given]
        self._dtypes = [coerced(t[:0] if t.dim() else t).dtype for t in given]
        self._quick_types = list(zip(self._dtypes, self._shapes, strict=True))
        self._synthetic: list[Tensor] | None = None
        count = sum(seen.is_tensor) + len(seen.changed)
        self._asked = "all"
        self._count = count
        self._is_quick = (
            call.is_plain and self._batches.replicas == 1 and self._training and not seen.changed and not
            self._options.enable_synthetic_data
        )  # fmt: skip
        if self._training:
            with self._plain(pull=False):
                self._held.compiled(path, optimizers.names_of(self._user_model))
            self._held.warn(unknown=not self._options.relax_optimizer_checks)

    def compileAndExport(self, filename: str | Path, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """compile() and save() in one."""
        if not self.isCompiled():
            self._compile(args, kwargs)
        self.save(filename, export_model=export_model)

    def save(self, filename: str | Path, export_model: bool = True, save_rng_state: bool = True) -> None:
        """The compiled model as a file; a folder gets model.poptorch. export_model: with the module, as a pickle."""
        from .precompiled import write

        write(self, filename, export_model=export_model, save_rng_state=save_rng_state)

    def loadExecutable(self, filename: str | Path) -> None:
        """The program of such a file, instead of a compile. It must be of the same model and options."""
        from .precompiled import described, read, require_same

        if self.isCompiled():
            raise Error("poptorch-export", "the model is already compiled", fix="call destroy() first")
        folder = Folder()
        path, facts = read(filename, folder.path)
        with self._plain(pull=False):
            require_same(described(self), facts, path)
        self._folder, self._path, self._facts = folder, path, facts
        if facts["random"] is not None:
            self._random = tuple(facts["random"])

    def _random_state(self) -> list[int] | None:
        return self.rng_state if self._device is not None or self._random is not None else None

    _facts: dict[str, Any]  # what was compiled, as a file says it
    _stages: Sequence[tuple[str, int, int]] = ()

    def _check_blocks(self, seen: Look) -> None:
        strategy, batches = self._options._execution_strategy, self._batches
        self._stages = strategy.placed(seen.blocks)
        strategy.check(self._stages, training=self._training, accumulation=batches.accumulation, iterations=batches.iterations)
        devices = num_devices(self._stages, self._options.auto_round_num_ipus)
        if devices * batches.replicas > 64:
            raise Error("poptorch-devices", "one process has at most 64 devices", found=f"{devices} a replica, "
                                                                                        f"{batches.replicas} replicas",
                        fix="divide the replicas among several processes")  # fmt: skip

    # ---- device ----

    def attachToDevice(self) -> None:
        if self._traced is None:
            raise Error(
                "poptorch-device", "Cannot attach to a device before the model is compiled", fix="call compile(...) first"
            )
        if self._device is not None:
            raise Error("poptorch-device", "Device is already attached")
        self._attach()

    def _attach(self) -> None:
        assert self._path is not None and self._traced is not None
        options = self._options
        reduction = options.Training.accumulation_and_replication_reduction_type
        device = Device(
            self._path, self._batches, training=self._training, seed=seed_of(options), average=reduction == ReductionType.Mean,
            nan_error=self._training and options.Precision.enable_floating_point_exceptions, processes=instances(options),
        )  # fmt: skip
        try:
            self._fill(device, self._traced)
        except BaseException:
            device.close()
            raise
        self._device = device
        self._uploaded = self._version()

    def _fill(self, device: Device, traced: Traced) -> None:
        if self._random is not None:
            device.seed(self._random)
        with self._plain():
            if not self._training:
                device.upload(traced)
                return
            self._held.upload(device, traced)
        if self._buffers:  # the host has the first replica's; those that nobody has changed since are each replica's own again
            now, first = device.session.tensors(), self._buffers[0]
            kept = [k for k, t in first.items() if torch.equal(t, now[k])]
            device.write([{k: own[k] for k in kept} for own in self._buffers], same=False)
        self._held.send(device)
        dtypes = [getattr(torch, a.type.dtype) for a in device.session.manifest.signature.outputs[1:]]
        self._asked = self._batches.asked(dtypes, whole=bool(self._look and self._look.changed))

    def detachFromDevice(self) -> None:
        """Weights, optimizer state and random numbers come back to the host."""
        if self._device is None:
            raise Error("poptorch-device", "Device is not attached")
        if self._training:
            if self._shared.is_stale:
                self.copyWeightsToHost()
            self._held.bring(self._device, self._traced)
            if len(self._device.sessions) > 1:
                self._buffers = [_buffers(session.tensors()) for session in self._device.sessions]
        self._random = self._device.session.random_state()
        self._device.close()
        self._device = None

    def destroy(self) -> None:
        """Weights and optimizer state come back, everything is freed, and the model may be wrapped again. The next call compiles
        again."""
        if self._device is not None:
            self.detachFromDevice()
        if self._folder is not None:
            self._folder.remove()
        self._folder = self._path = self._call = self._look = self._traced = None
        self._buffers, self._random, self._is_quick = [], None, False
        self._held.forget()
        if self._training and self._shared.trainer is self:
            self._shared.unwrap()
            self._shared.trainer = None

    # ---- weights ----

    def _attached(self) -> Device:
        if self._device is None:
            raise Error("poptorch-device", "Device is not attached", fix="call the model, compile(...) or attachToDevice() first")
        return self._device

    def copyWeightsToHost(self) -> None:
        """The device's weights into the module's own tensors. Weights that were trained elsewhere meanwhile are newer: they come
        from there."""
        device = self._attached()
        if self._shared.trainer is not self:
            self.copyWeightsToHostIfNeeded()
            if self._uploaded != self._version():
                return
        foreign = self._shared.foreign(buffers=not self._shared.is_stale)
        self._shared.is_fresh()
        with self._plain(pull=False):
            device.download(self._traced, foreign)  # type: ignore[arg-type]

    def copyWeightsToHostIfNeeded(self) -> bool:
        stale = [owner for owner in self._owners() if owner.is_stale]
        for owner in stale:
            owner.pull()
        return bool(stale)

    def copyWeightsToDevice(self) -> None:
        """The module's tensors to the device."""
        device = self._attached()
        self._shared.is_fresh()
        for other in self._owners():
            other.pull()
        with self._plain(pull=False):
            device.upload(self._traced)  # type: ignore[arg-type]
        if self._training:
            self._shared.version += 1
        self._uploaded = self._version()

    def copyNamedBuffersToDevice(self) -> None:
        """The buffers that options.updatableNamedBuffers names."""
        names = self._options.updatable_named_buffers
        own = dict(self._user_model.named_buffers())
        unknown = [n for n in names if n not in own]
        if not names or unknown:
            raise Error("poptorch-buffer", "copyNamedBuffersToDevice needs names of buffers", found=repr(unknown or names),
                        fix="options.updatableNamedBuffers([...]) before the model is wrapped")  # fmt: skip
        device = self._attached()
        with self._plain():
            new = {f"buffer/model.{n}": own[n].detach() for n in names}
        device.write([new] * len(device.sessions))

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        found = self._user_model.load_state_dict(state_dict, strict=strict)
        if self._device is not None:
            self.copyWeightsToDevice()
        return found

    @property
    def rng_state(self) -> list[int]:
        if self._device is None:
            if self._random is None:
                raise Error("poptorch-device", "Random state is only known once the model is compiled")
            return list(self._random)
        return list(self._device.session.random_state())

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        self._random = tuple(int(n) for n in state)
        if self._device is not None:
            self._device.seed(self._random)

    # ---- optimizer ----

    def setOptimizer(self, optimizer: Any) -> None:
        """Its values count from the next call on."""
        self._held.replace(optimizer, self._device, self._traced)
        if self._held.form is not None:
            self._held.warn(unknown=not self._options.relax_optimizer_checks)
        if isinstance(optimizer, Optimizer):
            optimizer._state_of = weakref.ref(self)

    def _optimizer_state(self) -> tuple[Any, Any] | None:
        return self._held.now(self._device)

    def _take_loaded(self, optimizer: Any) -> None:
        """State was loaded into it. Without a device it is taken at the next attach; of another optimizer, by setOptimizer."""
        if self._device is not None and optimizer is self._optimizer:
            self._held.take(self._device, self._traced, optimizer)

    # ---- calls ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        if self._is_quick and self._device is not None and not kwargs and len(args) == len(self._quick_types):
            for t, (dtype, shape) in zip(args, self._quick_types):  # noqa: B905  (lengths are equal, and time counts)
                if not (isinstance(t, Tensor) and t.dtype is dtype and t.shape == shape):
                    break
            else:
                result = self._trained(args)
                self._times.append(time.perf_counter() - start)
                return result
        if self._options.connection_type == ConnectionType.Never:
            raise ArgumentError("poptorch-device", "Trying to run a model on an offline device (ConnectionType.Never): use "
                                                   "model.compile(inputs) "
                                "instead of model(inputs)")  # fmt: skip
        if self._call is None:
            self._compile(args, kwargs)
        if self._device is None:
            self._attach()
        assert self._call is not None
        result = self._called(self._call.tensors(args, kwargs))
        self._times.append(time.perf_counter() - start)
        return result

    def _called(self, given: list[Tensor]) -> Any:
        self._check_types(given)
        inputs = [coerced(t.detach()) for t in given]
        inputs = [t if t.dtype == d else t.to(d) for t, d in zip(inputs, self._dtypes, strict=True)]
        if self._options.enable_synthetic_data:
            inputs = self._made_up(inputs)
        return self._trained(inputs, given) if self._training else self._inferred(inputs, given)

    def _check_types(self, given: Sequence[Tensor]) -> None:
        self._batches.check(given)
        for i, (t, shape, dtype) in enumerate(zip(given, self._shapes, self._dtypes, strict=True)):
            if t.shape != shape:
                raise Error("poptorch-inputs", f"The shape of input {i} has changed since the model was compiled: expected "
                                               f"{shape} but got "
                            f"{t.shape}", fix="shapes are fixed by the first call; call destroy() to compile again")  # fmt: skip
            if _kind(t.dtype) != _kind(dtype):
                raise Error("poptorch-inputs", f"The type of input {i} has changed since the model was compiled: expected "
                                               f"{dtype} but got "
                            f"{t.dtype}", fix="types are fixed by the first call; call destroy() to compile again")  # fmt: skip

    def _made_up(self, inputs: list[Tensor]) -> list[Tensor]:
        if self._synthetic is None:
            self._synthetic = [torch.randn_like(t) if t.is_floating_point() else t.clone() for t in inputs]
        return self._synthetic

    def _trained(self, inputs: Sequence[Tensor], given: Sequence[Tensor] = ()) -> Any:
        device, seen, batches = self._device, self._look, self._batches
        assert device is not None and seen is not None
        if not alone():
            self._catch_up()
        try:
            raw = device.train(inputs, self._asked)
        finally:  # the steps before an error have changed the device's weights
            self._shared.trained()
            if not alone():
                self._uploaded = self._version()
        outputs = [batches.output([r[i] for r in raw], self._asked) for i in range(1, 1 + sum(seen.is_tensor))]
        for position, i in enumerate(seen.changed, 1 + sum(seen.is_tensor)):
            shares = [r[position] if batches.count > 1 else r[position].unsqueeze(0) for r in raw]
            _write_back(given[i], batches.together(shares))
        return self._result(outputs)

    def _catch_up(self) -> None:
        """Weights that another executor has trained go to this one's device."""
        if self._uploaded != self._version():
            with self._plain():
                self._attached().upload(self._traced)  # type: ignore[arg-type]
            self._uploaded = self._version()

    def _inferred(self, inputs: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        device, seen, batches = self._device, self._look, self._batches
        assert device is not None and seen is not None
        self._catch_up()
        raw = device.infer(inputs)
        of_replica = [[t[r :: batches.replicas] for r in range(batches.replicas)] for t in raw]
        count = sum(seen.is_tensor)
        outputs = [
            batches.output(shares if batches.count > 1 else [s[0] for s in shares], "all") for shares in of_replica[:count]
        ]
        for position, i in enumerate(seen.changed, count):
            _write_back(given[i], raw[position])
        return self._result(outputs)

    def _result(self, outputs: list[Tensor]) -> Any:
        made = [returned(t.to(torch.int32) if t.dtype == torch.int64 else coerced(t)) for t in outputs]
        return self._look.rebuilt(made)  # type: ignore[union-attr]

    # ---- reading ----

    def getTensorNames(self) -> list[str]:
        """Names that anchorTensor takes."""
        names = [n for n, p in self._user_model.named_parameters() if p.requires_grad]
        return [f"{kind}___{n}" for kind in ("Gradient", "UpdatedVar") for n in names]

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        anchored = self._options.anchored_tensors
        if short_name not in anchored:
            raise Error(
                "poptorch-anchor", f"no anchored tensor {short_name!r}", expected=", ".join(anchored) or "anchorTensor(...)"
            )
        kind, name = self._anchored(anchored[short_name][0])
        session = self._attached().session
        return session.gradients()[name] if kind == "Gradient" else session.state_dict()[name]

    def _anchored(self, long_name: str) -> tuple[str, str]:
        """What is read, and the name that it has in the session."""
        known = self.getTensorNames()
        kind, _, name = long_name.rpartition("___")
        found = [n for n in (name, name.removeprefix("model.")) if f"{kind or 'UpdatedVar'}___{n}" in known]
        if not found:
            raise Error("poptorch-anchor", f"{long_name!r} cannot be read", expected=", ".join(known))
        return kind or "UpdatedVar", f"model.{found[0]}"

    def compilationTime(self) -> float:
        if self._compile_seconds is None:
            raise Error("poptorch-device", "the model is not compiled yet")
        return self._compile_seconds

    def getLatency(self) -> tuple[float, float, float]:
        """(smallest, largest, mean) seconds of a call so far."""
        if not self._times:
            raise Error("poptorch-device", "no call has been made yet")
        return min(self._times), max(self._times), sum(self._times) / len(self._times)

    getComputeLatency = getLatency

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Zero: the device computes in the host's memory."""
        return 0.0, 0.0, 0.0

    getIpuHostLatency = getHostIpuLatency

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Seconds from the start of each call: inputs are there at once, outputs when it ends."""
        zero, end = [[0.0] for _ in self._times], [[t] for t in self._times]
        return {"input": zero, "input_complete": zero, "output": end, "output_complete": end}

    def resetPerfCounters(self) -> None:
        self._times.clear()

    def cycleCount(self) -> int:
        raise Error("poptorch-refused", "cycleCount: there is no chip whose cycles could be counted", fix="use getLatency()")


def _buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t for k, t in tensors.items() if k.startswith("buffer/")}


def _kind(dtype: torch.dtype) -> str:
    """What is the same on the device."""
    if dtype in (torch.int32, torch.int64):
        return "int"
    return "float" if dtype in (torch.float32, torch.float64, torch.bfloat16) else str(dtype)


def _write_back(target: Tensor, blocks: Tensor) -> None:
    """[micro-batches, ...] into the caller's own tensor."""
    with torch.no_grad():
        target.copy_(blocks[-1] if target.dim() == 0 else blocks.flatten(0, 1))
