"""Command lines as vendors' programs have them: their own flags, the program's flags, and many that mean nothing here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """Errors in the house's form, exit code 2. A flag that is defined again replaces the one before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"conflict_handler": "resolve", "allow_abbrev": False, **kwargs})

    def error(self, message: str) -> Any:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n  fix:      {self.prog} --help lists the flags\n")


class Ignored(argparse.Action):
    """Takes its value and says that it does nothing here. `say` gets the words."""

    def __init__(self, *args: Any, say: Callable[[str], Any] = lambda _: None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.say = say

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        self.say(f"{option} has no meaning here and is ignored")
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def prefer_the_programs(parser: argparse.ArgumentParser, vendors: Sequence[argparse.Action]) -> None:
    """A program that defines only one spelling of a flag again (--batch-size, but not -b) means both: its default, type and
    whether it is required hold for what is left of the vendor's."""
    own = {a.dest: a for a in parser._actions if a not in vendors and a.option_strings}
    for left in [a for a in parser._actions if a in vendors and a.dest in own]:
        program = own[left.dest]
        left.default, left.type, left.choices, left.required = program.default, program.type, program.choices, False
        if program.required:
            program.required = not left.option_strings
