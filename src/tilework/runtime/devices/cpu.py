"""cpu: runs native code. One call into the driver runs any number of steps; Python is not involved until it returns.

The code is opened from a sealed in-memory file that holds exactly the bytes that were verified: nothing is unpacked to
disk, and nobody can swap a file between the check and the load.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import os
import platform
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...artifact.fingerprint import Part, machine_features, version
from ...artifact.names import SEED
from ...artifact.reader import Artifact
from ...errors import BugError, MachineError, UserError
from ...tiles.page import Slot, use_native
from . import Call, Needs, NotANumber, inference_base
from .host import HostMemory

if TYPE_CHECKING:  # a session alone needs nothing of it
    from ...parallel.algorithms import Algorithm
    from ...parallel.exchange import Exchange, Sums
    from ...parallel.group import Group

_NAN, _ALONE = 2, 3  # what the driver returns
_ERROR_SIZE = 1024
_OPENED = itertools.count(1)
_MALLOC = {-3: 32 << 20, -1: 256 << 20}  # M_MMAP_THRESHOLD, its largest; M_TRIM_THRESHOLD
_LARGE = 16 << 20  # bytes of a session's memory, above which allocations inside a step may be large
_ENTER = ctypes.PYFUNCTYPE(c_int64, c_void_p, c_void_p, c_int64)  # too short to let other Python threads run


class _Program(Structure):
    _fields_ = (("run", c_void_p), ("buffers", POINTER(c_void_p)), ("parallel", c_int64), ("alone", c_void_p))


class _Copy(Structure):
    _fields_ = (("buffer", c_void_p), ("address", c_int64), ("bytes", c_int64), ("how", c_int32), ("dtype", c_int32))


class _Backup(Structure):
    _fields_ = (("buffer", c_void_p), ("memory", c_void_p), ("bytes", c_int64))


class _Random(Structure):
    _fields_ = (("base", c_uint64), ("counter", c_uint64), ("seed", c_void_p))


class _Reduction(Structure):
    _fields_ = (("begin", c_void_p), ("finish", c_void_p), ("exchange", c_void_p))


class _Call(Structure):
    _fields_ = (
        ("num_steps", c_int64), ("num_micro_batches", c_int64), ("micro", _Program), ("update", _Program),
        ("inputs", POINTER(_Copy)), ("num_inputs", c_int64), ("scheduled", POINTER(_Copy)), ("num_scheduled", c_int64),
        ("outputs", POINTER(_Copy)), ("num_outputs", c_int64), ("zeroed", POINTER(_Copy)), ("num_zeroed", c_int64),
        ("random", POINTER(_Random)), ("steps_done", c_int64), ("watched", POINTER(_Copy)), ("num_watched", c_int64),
        ("restored", POINTER(_Backup)), ("num_restored", c_int64), ("counts", c_int64), ("shown_loss", c_void_p),
        ("reduction", _Reduction),
    )  # fmt: skip


# The driver has the same numbers. The first is counted up, here and there, where a field or an enum changes its meaning.
_LAYOUT = [4, *(ctypes.sizeof(s) for s in (_Program, _Copy, _Backup, _Random, _Call))]
_HOW = {"all": 0, "last": 1, "sum": 2, "each": 0, "once": 3, "again": 4}  # the driver's enums
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.int64: 2, torch.bfloat16: 3, torch.float16: 4}


def open_code(name: str, code: bytes) -> ctypes.CDLL:
    fd = os.memfd_create(f"tilework-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(fd), "wb") as f:
            f.write(code)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        # The dynamic linker takes an equal path for the same library, and file numbers are used again: so every path
        # is spelt differently, by the bits of a counter. RTLD_NOW: a missing symbol is found here, not within a step.
        spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_OPENED):b}")
        return ctypes.CDLL(f"/proc/self/fd/{spelling}{fd}", mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as e:
        raise MachineError(
            "native-load", f"the native code of {name} could not be opened", found=str(e)[:300],
            fix="compile again on this machine",
        ) from e  # fmt: skip
    finally:
        os.close(fd)


@functools.cache
def _keep_freed_memory() -> None:
    """What operators inside a step allocate and free stays with this process. By default glibc gives it back to the kernel each
    time, and page faults follow: a fifth of a step of ResNet-50. Settings of the user's own are left alone."""
    if not any(k.startswith("MALLOC_") or k == "GLIBC_TUNABLES" for k in os.environ) and platform.libc_ver()[0] == "glibc":
        for setting, value in _MALLOC.items():
            ctypes.CDLL(None).mallopt(setting, value)


def _check_layout(driver: ctypes.CDLL, path: Path) -> None:
    """The structs above must be the driver's own, or a call would read and write at random."""
    try:
        found = [c_int64.in_dll(driver, "tilework_driver_layout").value]
        if found == _LAYOUT[:1]:  # then it is as long as ours
            found = list((c_int64 * len(_LAYOUT)).in_dll(driver, "tilework_driver_layout"))
    except ValueError:
        found = []
    if found != _LAYOUT:
        raise MachineError(
            "native-driver", f"{path}: its driver was made by another version of Tilework",
            found=f"layout {found or 'none'}", expected=f"layout {_LAYOUT}",
            fix="compile again; or run it on the reference device, which needs no driver",
        )  # fmt: skip


_METERED: weakref.WeakSet[Device] = weakref.WeakSet()


def _in_a_child() -> None:
    """A fork of the process must not write to the process's page."""
    for device in list(_METERED):
        device.driver.tilework_count_at(None, None)


os.register_at_fork(after_in_child=_in_a_child)


def _texts(needs: Needs, name: str) -> list[str]:
    value = needs.get(name, [])
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def _numbers(needs: Needs, name: str) -> list[int]:
    value = needs.get(name, [])
    return [v for v in value if isinstance(v, int)] if isinstance(value, list) else []


class Device:
    replays, computes = False, True

    def __init__(self, artifact: Artifact, num_threads: int | None) -> None:
        if "native/driver.so" not in artifact.native or any(p.code is None for p in artifact.manifest.programs.values()):
            raise UserError("artifact-manifest", f"{artifact.path}: an artifact for the cpu device lacks native code",
                            fix="compile the model again")  # fmt: skip
        self.memory = HostMemory(artifact)
        self.buffers = buffers = self.memory.tensors
        self.handles: dict[str, c_void_p] = {}
        if self.memory.num_bytes >= _LARGE:
            _keep_freed_memory()
        if num_threads is not None:
            torch.set_num_threads(num_threads)  # OpenMP is torch's own copy: its threads are the programs' threads
        self.driver = open_code("driver", artifact.native["native/driver.so"])
        _check_layout(self.driver, artifact.path)
        self.driver.tilework_tensor.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int32, POINTER(c_void_p)]
        self.driver.tilework_dtype.argtypes = [c_char_p]
        self.driver.tilework_free.argtypes = [c_void_p]
        self.driver.tilework_call.argtypes = [c_void_p, c_void_p, c_void_p, c_size_t]
        self.driver.tilework_call.restype = c_int
        self._pin()
        # With a number of threads that was asked for, or leased tiles, nothing is left to decide.
        adapts = num_threads is None and os.environ.get("TILEWORK_ADAPT", "1") != "0"
        self.driver.tilework_look_for_neighbours(adapts)
        self.error = ctypes.create_string_buffer(_ERROR_SIZE)
        seed = buffers[SEED].data_ptr() if SEED in buffers else None  # none: no program draws random numbers
        self.randoms = {"next": _Random(0, 0, seed), "own": _Random(0, 0, seed)}
        self._backups: dict[str, torch.Tensor] = {}
        self._artifact = artifact
        self.exchange: Exchange | None = None
        self.sums: Sums | None = None
        self.programs: dict[str, _Program] = {}
        self.libraries: dict[str, ctypes.CDLL] = {}  # by member; a library holds one program or several
        self._keep: list[object] = []
        self._release: list[Callable[[], object]] = []
        for name, program in artifact.manifest.programs.items():
            member = str(program.code)
            if member not in self.libraries:
                self.libraries[member] = open_code(Path(member).stem, artifact.native[member])
            library = self.libraries[member]
            try:
                abi = (ctypes.c_char * 64).in_dll(library, f"tilework_abi_{name}").value.decode()
            except ValueError:
                abi = "none"
            if abi != program.abi:
                raise BugError("native-abi", f"{artifact.path}: the native code of {name} was made for other buffers")
            handles = (c_void_p * len(program.buffers))(*[self._handle(b) for b in program.buffers])
            run, alone = (ctypes.cast(library[n], c_void_p) for n in (f"tilework_run_{name}", "tilework_alone"))
            self.programs[name] = _Program(run, handles, program.parallel, alone)
            self._release.append(library[f"tilework_release_{name}"])
            self._keep.append(handles)

    @staticmethod
    def fits(needs: Needs) -> list[Part]:
        here = platform.machine()
        architecture, features, glibc = str(needs.get("architecture")), _texts(needs, "features"), _numbers(needs, "glibc")
        missing = sorted(set(features) - machine_features())
        wider = "x86-64-v3" if here == "x86_64" else "baseline"
        libc = [int(p) for p in (platform.libc_ver()[1] or "0").split(".")[:2]]
        return [
            Part("architecture", architecture, here, architecture == here, "compile again on this kind of machine"),
            Part("instruction set", " ".join(features) or "none beyond the architecture's",
                 f"all but {' '.join(missing)}" if missing else "all of them", not missing,
                 f"compile again here, or with --isa {wider} for a wider range of machines"),
            Part("glibc", version(glibc), version(libc), libc >= glibc, "compile again on this machine"),
        ]  # fmt: skip

    def _pin(self) -> None:
        """Binds worker threads to cores, where this process uses every core that it may use. With fewer threads than cores
        there may be others beside us, who must not be met on the same ones. TILEWORK_PIN=0 turns it off."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1 and torch.get_num_threads() == len(cores) and os.environ.get("TILEWORK_PIN", "1") != "0":
            self.driver.tilework_pin((c_int32 * len(cores))(*cores), len(cores))

    def meter(self, page: Slot) -> bool:
        """Time is written to the page by native code. False: this artifact's driver is older than the page's layout."""
        if not hasattr(self.driver, "tilework_count_at"):
            return False
        use_native(_ENTER(ctypes.cast(self.driver.tilework_enter, c_void_p).value or 0))  # a library is never unloaded
        self.driver.tilework_count_at.argtypes = [c_void_p, c_void_p]
        self.driver.tilework_count_at.restype = None
        if page.is_own:
            self.driver.tilework_count_at(page.record, page.address)
        self._page = page  # must outlive the driver's pointers
        _METERED.add(self)
        return True

    def _handle(self, name: str) -> c_void_p:
        """A native tensor over the session's memory, made once."""
        if name not in self.handles:
            t, handle = self.buffers[name], c_void_p()
            shape, stride = (c_int64 * t.dim())(*t.shape), (c_int64 * t.dim())(*t.stride())
            dtype = self.driver.tilework_dtype(str(t.dtype).removeprefix("torch.").encode())
            if self.driver.tilework_tensor(t.data_ptr(), t.dim(), shape, stride, dtype, ctypes.byref(handle)):
                raise BugError("native-tensor", f"no native tensor could be made for {name}")
            self.handles[name] = handle
        return self.handles[name]

    def seed(self, base: int, counter: int = 0, inferred: int = 0) -> None:
        training, inference = self.randoms["next"], self.randoms["own"]
        training.base, training.counter = base & 0xFFFFFFFFFFFFFFFF, counter
        inference.base, inference.counter = inference_base(base), inferred

    def random_state(self) -> tuple[int, int, int]:
        return self.randoms["next"].base, self.randoms["next"].counter, self.randoms["own"].counter

    def backup(self, name: str) -> _Backup:
        """Memory for a copy of a buffer, as it lies; one for all calls, which come one at a time."""
        buffer = self.buffers[name]
        size = buffer.untyped_storage().nbytes()
        if name not in self._backups:
            self._backups[name] = torch.empty(size, dtype=torch.uint8)
        return _Backup(buffer.data_ptr(), self._backups[name].data_ptr(), size)

    def bind(self, call: Call) -> _Bound:
        return _Bound(self, call)

    def sum_over(self, group: Group, algorithm: Algorithm) -> None:
        """Programs that ask for sums over all replicas get those of this group from now on."""
        from ...parallel.exchange import Sums

        asking = [library for library in self.libraries.values() if hasattr(library, "tilework_sum_with")]
        if asking:
            self.sums = Sums(open_code("exchange", self._artifact.native["native/exchange.so"]), group, algorithm=algorithm)
            for library in asking:
                self.sums.give_to(library)

    def join(self, group: Group, *, mean: bool, algorithm: Algorithm, overlap: bool) -> Exchange | None:
        """Calls with `reduce` from now on include the other ranks. None: this artifact was not compiled for replicas."""
        code = self._artifact.native.get("native/exchange.so")
        if code is None:
            return None
        from ...parallel.exchange import Exchange

        manifest = self._artifact.manifest
        watched = {name: p.completes for name, p in manifest.programs.items() if p.completes}
        # Sums in the middle of a program and gradients on their way beside it would meet on the same connections.
        overlap = overlap and self.sums is None
        ready = next(iter(watched.values())) if overlap and len(watched) == 1 and len(manifest.buckets) > 1 else None
        self.exchange = Exchange(open_code("exchange", code), group, self.memory.buckets, mean=mean, algorithm=algorithm,
                                 ready_after=ready)  # fmt: skip
        if ready is not None:
            name = next(iter(watched))
            watch = self.libraries[str(manifest.programs[name].code)][f"tilework_watch_{name}"]
            watch.argtypes = [c_void_p, c_void_p]
            watch(*self.exchange.watch())
        return self.exchange

    def close(self) -> None:
        for exchange in (self.exchange, self.sums):
            if exchange is not None:
                exchange.close()
        for release in self._release:
            release()
        for handle in self.handles.values():
            self.driver.tilework_free(handle)
        self.handles.clear()
        self.programs.clear()


class _Bound:
    """A call as the driver takes it, made once. Running it sets the caller's addresses and makes one native call."""

    def __init__(self, device: Device, call: Call) -> None:
        self._num_addresses = 0
        inputs = self._copies(device, call.inputs, call.taken or ["each"] * len(call.inputs))
        scheduled = self._copies(device, call.scheduled, ["all"] * len(call.scheduled))
        outputs = self._copies(device, call.outputs, call.how or ["all"] * len(call.outputs))
        zeroed = self._copies(device, call.zeroed, ["all"] * len(call.zeroed))
        watched = self._copies(device, call.watched, ["all"] * len(call.watched))
        restored = (_Backup * len(call.restored))(*[device.backup(name) for name in call.restored])
        native = self.native = _Call()
        native.num_steps, native.num_micro_batches = call.num_steps, call.num_micro_batches
        native.micro = device.programs[call.micro]
        if call.update:
            native.update = device.programs[call.update]
        native.inputs, native.num_inputs = inputs, len(inputs)
        native.scheduled, native.num_scheduled = scheduled, len(scheduled)
        native.outputs, native.num_outputs = outputs, len(outputs)
        native.zeroed, native.num_zeroed = zeroed, len(zeroed)
        native.watched, native.num_watched = watched, len(watched)
        native.restored, native.num_restored = restored, len(restored)
        random = device.randoms.get(call.seeds)
        if random is not None and random.seed:
            native.random = ctypes.pointer(random)
        native.counts = int(call.counts)
        if call.reduce and device.exchange is not None:
            native.reduction = _Reduction(*device.exchange.functions())
        self._exchange, self._sums = device.exchange, device.sums
        if call.shown_loss:
            loss = device.buffers[call.shown_loss]
            native.shown_loss = loss.data_ptr() if loss.dtype == torch.float32 and loss.dim() == 0 else None
        self.addresses = (c_int64 * max(1, self._num_addresses))()
        self.error = device.error
        self._function = device.driver.tilework_call
        # Prepared once: a call from Python then converts nothing.
        self._arguments = (
            ctypes.addressof(native),
            ctypes.addressof(self.addresses),
            ctypes.addressof(device.error),
            _ERROR_SIZE,
        )
        self._alive = (device, inputs, scheduled, outputs, zeroed, watched, restored)  # must outlive this

    def _copies(self, device: Device, names: Sequence[str], how: Sequence[str]) -> ctypes.Array[_Copy]:
        made = []
        for name, way in zip(names, how, strict=True):
            target = device.buffers[name]
            size = target.numel() * target.element_size()
            made.append(_Copy(target.data_ptr(), self._num_addresses, size, _HOW[way], _DTYPES.get(target.dtype, 0)))
            self._num_addresses += 1
        return (_Copy * len(made))(*made)

    def point(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scheduled: Sequence[torch.Tensor] = ()
    ) -> None:
        """Takes the addresses of the caller's tensors, which must stay alive until execute() has returned."""
        addresses, i = self.addresses, 0
        for tensors in (inputs, scheduled, outputs):
            for tensor in tensors:
                addresses[i] = tensor.data_ptr()
                i += 1

    def execute(self) -> None:
        """The one native call."""
        status = self._function(*self._arguments)
        if status:
            self._explain(status)

    def _explain(self, status: int) -> None:
        if status == _NAN:
            raise NotANumber(self.native.steps_done)
        text = self.error.value.decode("utf-8", "replace")
        if status == _ALONE and self._exchange is not None:
            raise self._exchange.failed(text)
        if self._sums is not None and self._sums.has_failed:
            raise self._sums.failed(text)
        if "out of bounds" in text:
            raise UserError("input-values", "an index in the inputs is out of range", found=text[:100].split("\n")[0],
                            fix="correct the class labels or token numbers; load the weights again, "
                            "because this step may be half done")  # fmt: skip
        raise MachineError("native-run", f"a program failed: {text}",
                           fix="if memory is short, use a smaller batch; otherwise report this")  # fmt: skip

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scheduled: Sequence[torch.Tensor] = ()
    ) -> None:
        addresses, i = self.addresses, 0  # as in point(), but a call less: this is what every step from Python pays
        for tensors in (inputs, scheduled, outputs):
            for tensor in tensors:
                addresses[i] = tensor.data_ptr()
                i += 1
        status = self._function(*self._arguments)
        if status:
            self._explain(status)
