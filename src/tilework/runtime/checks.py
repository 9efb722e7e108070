"""The model's own checks of values, at run time: which one has failed, and what the model says then."""

from __future__ import annotations

from typing import Literal

from ..artifact.manifest import Signature
from ..artifact.names import Kind
from ..errors import TileworkError, UserError
from .sync import Buffers


def raise_failed(
    signature: Signature,
    memory: Buffers,
    section: Literal["fwd", "infer"],
    error: Exception,
    *,
    undone: bool = False,
) -> None:
    """The model's error for the first check that has failed; nothing where none has."""
    buffer = signature.buffer(Kind.CHECK, section)
    failed = memory.read(buffer).isnan().nonzero().flatten().tolist() if buffer in memory else []
    if not failed:
        return
    check = signature.checks[section][failed[0]]
    step = "the step was undone" if undone else "the step has changed the weights"
    raise UserError(
        "run-check",
        check.text,
        found=f"a check of the model fails at {check.where}; {step if section == 'fwd' else 'nothing was changed'}",
        fix="check the inputs of this call. With nan_error=True, a step that fails changes nothing",
    ) from error


def broken_off(error: TileworkError, signature: Signature) -> TileworkError:
    """The error of a step whose native code gave up; with the model's checks where it has any, since one of them may be why."""
    checks = signature.checks.get("fwd")
    if error.id not in ("input-values", "native-run") or not checks:
        return error
    said = "".join(f"\n    {c.text} ({c.where})" for c in checks)  # whether they held is not known
    return UserError(
        "run-check",
        f"the step failed: {error.summary}. The model requires of its inputs:{said}",
        found=error.found,
        fix="check the inputs of this call; load the weights again, because this step may be half done",
    )
