"""cuda: an NVIDIA GPU. Kernels are machine code from the artifact; between them stand calls of torch's library. Whole steps, and
many at a time, are CUDA graphs, or one kernel that keeps the weights on the chip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...artifact.fingerprint import Part
from ...artifact.reader import Artifact
from ...errors import UserError
from ...gpu import Module
from ...tiles.page import Slot
from ..cuda.loop import Bound, Table, explained
from ..cuda.memory import CudaMemory
from ..cuda.plan import Plan, read_plan
from ..cuda.whole import Whole
from . import Call, Needs, inference_base

LOOP = "native/loop.cubin"


class _Random:
    def __init__(self, base: int, counter: int) -> None:
        self.base, self.counter = base, counter


class Device:
    replays, computes = False, True
    places = ("cpu", "cuda")  # where inputs may be

    def __init__(self, artifact: Artifact, num_threads: int | None) -> None:
        manifest = artifact.manifest
        if LOOP not in artifact.native or any(p.code is None for p in manifest.programs.values()):
            raise UserError("artifact-manifest", f"{artifact.path}: an artifact for the cuda device lacks machine code",
                            fix="compile the model again")  # fmt: skip
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        plans = {name: read_plan(artifact.native[str(p.code)], artifact.path) for name, p in manifest.programs.items()}
        temporary = max((int(p["temporary_bytes"]) for p in plans.values()), default=0)
        results = max((int(p["result_bytes"]) for p in plans.values()), default=0)
        self.memory = CudaMemory(artifact, self.torch_device, temporary + results)
        self.temporary = torch.empty(temporary + 256, dtype=torch.uint8, device=self.torch_device)
        options = manifest.fingerprint.options
        self.tf32 = bool(options.get("tf32"))
        self.deterministic = os.environ.get("TILEWORK_DETERMINISTIC", "") not in ("", "0")
        self.searching = not self.deterministic and os.environ.get("TILEWORK_CUDNN") != "heuristic"
        self.stream, self.copies = (torch.cuda.Stream(self.torch_device) for _ in range(2))
        self.pool = torch.cuda.graph_pool_handle()
        self.uncapturable: set[str | None] = set()  # programs that need the host in between
        self._modules: dict[str, Module] = {}
        self._scratch: Tensor | None = None
        self._artifact = artifact
        self.plans: dict[str, Plan] = {}
        try:
            self.loop = self.module(LOOP)
            for name, plan in plans.items():
                self.plans[name] = Plan(plan, self.memory.tensors, self.temporary, self.module)
        except BaseException:
            self.close()
            raise
        if self.deterministic and any("cudnn_attention" in str(s.get("call")) for p in plans.values() for s in p["steps"]):
            raise UserError("options", f"{artifact.path}: its attention has no fixed order of sums",
                            found="TILEWORK_DETERMINISTIC", fix="compile again with TILEWORK_DETERMINISTIC=1")  # fmt: skip
        self._whole = {name: plan["whole"] for name, plan in plans.items() if plan.get("whole")}
        self.seed(0)
        torch.cuda.synchronize(self.torch_device)

    @staticmethod
    def fits(needs: Needs) -> list[Part]:
        wanted = str(needs.get("architecture", ""))
        if not torch.cuda.is_available():
            what = "no GPU" if torch.version.cuda else "a build of torch without CUDA"
            return [Part("gpu", wanted, what, False, "run it where there is a GPU, or compile with --device cpu")]
        major, minor = torch.cuda.get_device_capability()
        has = f"sm_{major}{minor}"
        number = int(wanted.removeprefix("sm_") or 0)
        fits = number // 10 == major and number % 10 <= minor
        return [Part("gpu", wanted, f"{has} ({torch.cuda.get_device_name()})", fits, "compile again for this GPU")]

    def module(self, member: str) -> Module:
        if member not in self._modules:
            self._modules[member] = Module(self._artifact.native[member], member)
        return self._modules[member]

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Of torch's library, while its operators are called: full float32 unless the artifact says otherwise."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic
        strict = torch.are_deterministic_algorithms_enabled()
        cudnn.allow_tf32 = matmul.allow_tf32 = self.tf32
        cudnn.benchmark, cudnn.deterministic = self.searching, self.deterministic
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with torch.autocast("cuda", enabled=False):  # the caller's, which would change what operators compute
                yield
        except RuntimeError as e:
            raise explained(e) from e
        finally:
            cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
            if self.deterministic:
                torch.use_deterministic_algorithms(strict)

    def finish(self) -> None:
        """All that was asked for is done; what failed in a kernel is raised here."""
        self.stream.synchronize()

    def whole_for(self, call: Call, table: Table) -> Whole | None:
        """All steps of a call in one kernel, where the program has one and the call is of its kind."""
        entry = self._whole.get(call.micro)
        plain = not call.update and call.num_micro_batches == 1 and not call.watched
        if entry is None or not plain or call.seeds == "keep" or os.environ.get("TILEWORK_WHOLE_LOOP", "1") == "0":
            return None
        if not Whole.fits(self, entry):
            return None
        return Whole(self, entry, call, table)

    def scratch(self, size: int) -> Tensor:
        """Memory of kernels that are a whole loop: one for all, which run one after the other."""
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.zeros(size, dtype=torch.uint8, device=self.torch_device)
        return self._scratch

    def meter(self, page: Slot) -> bool:
        return False

    def seed(self, base: int, counter: int = 0, inferred: int = 0) -> None:
        self.randoms = {"next": _Random(base, counter), "own": _Random(inference_base(base), inferred)}

    def random_state(self) -> tuple[int, int, int]:
        return self.randoms["next"].base, self.randoms["next"].counter, self.randoms["own"].counter

    def bind(self, call: Call) -> Bound:
        with torch.cuda.device(self.torch_device):  # whose memory the kernels' code goes to
            return Bound(self, call)

    def close(self) -> None:
        self.plans.clear()
        if self._modules:
            torch.cuda.synchronize(self.torch_device)
        with torch.cuda.device(self.torch_device):
            for module in self._modules.values():
                module.close()
        self._modules.clear()


__all__ = ["Bound", "Device"]
