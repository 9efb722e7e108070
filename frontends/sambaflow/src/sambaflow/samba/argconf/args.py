"""CommonArgs, CompileArgs, RunArgs: the command line's flags as objects, for programs that configure themselves otherwise."""

from __future__ import annotations

import argparse
from typing import Any

from tilework.frontend.arguments import Parser

from ..utils.argparser import _vendor_flags


class CommonArgs(argparse.Namespace):
    """Every flag of the command with its default; keyword arguments override them, and may be new."""

    command = "run"

    def __init__(self, **given: Any) -> None:
        parser = Parser(add_help=False)
        _vendor_flags(parser, self.command, False)
        for action in parser._actions:
            action.required = False
        defaults = vars(parser.parse_args([]))
        super().__init__(**{**defaults, "command": self.command, **given})

    def model_dump(self) -> dict[str, Any]:
        return dict(vars(self))

    dict = model_dump


class CompileArgs(CommonArgs):
    command = "compile"


class RunArgs(CommonArgs):
    command = "run"
