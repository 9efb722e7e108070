"""What this frontend does not have, and what it accepts without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tilework

from ..logging import samba_logger


def refused(what: str) -> Exception:
    return tilework.UserError("sambaflow-refused", f"Tilework does not have this part of SambaFlow: {what}",
                              fix="docs/sambaflow.md lists what is supported and what to use instead")  # fmt: skip


def say_ignored(where: str, arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        samba_logger.info(f"{where}: {name} has no meaning here and is ignored", log_limit=1)
