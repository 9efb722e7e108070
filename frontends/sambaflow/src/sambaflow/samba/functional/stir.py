"""The vendor's loop language. Refused by name: rewrite with torch operators."""

from __future__ import annotations

from typing import Any

from ..refusals import refused


def sn_zipmapreduce(*_: Any, **__: Any) -> Any:
    raise refused("functional.stir (sn_zipmapreduce, sn_select, sn_imm, sn_iteridx)")


sn_select = sn_imm = sn_iteridx = sn_zipmapreduce
