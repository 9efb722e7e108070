"""The model's own checks of values, at run time: which one has failed, and what the model says then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from ..artifact.manifest import Manifest
from ..errors import TileworkError, UserError


def raise_failed(
    manifest: Manifest,
    buffers: Mapping[str, Tensor],
    section: Literal["fwd", "infer"],
    error: Exception,
    *,
    undone: bool = False,
) -> None:
    """The model's error for the first check that has failed; nothing where none has."""
    values = buffers.get(f"check/{section}")
    failed = values.isnan().nonzero().flatten().tolist() if values is not None else []
    if not failed:
        return
    check = manifest.checks[section][failed[0]]
    step = "the step was undone" if undone else "the step has changed the weights"
    raise UserError(
        "run-check",
        check.text,
        found=f"a check of the model fails at {check.where}; {step if section == 'fwd' else 'nothing was changed'}",
        fix="look at the inputs of this call. With nan_error=True a step that fails changes nothing",
    ) from error


def broken_off(error: TileworkError, manifest: Manifest) -> TileworkError:
    """The error of a step whose native code gave up; with the model's checks where it has any, since one of them may be why."""
    checks = manifest.checks.get("fwd")
    if error.id not in ("input-values", "native-run") or not checks:
        return error
    said = "".join(f"\n    {c.text} ({c.where})" for c in checks)  # whether they held is not known
    return UserError(
        "run-check",
        f"the step broke off: {error.summary}. The model asks of its inputs:{said}",
        found=error.found,
        fix="look at the inputs of this call; load the weights again, because this step may be half done",
    )
