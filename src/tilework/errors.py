"""Three kinds of error: the user's mistake, the environment, our bug.

Every error has an id. The id is a heading in errors.md beside this file, where its cause, an example and the fix are described;
`tilework explain ID` prints it.
A `Place` is one spot in the user's own source; an error can carry many, because we report all mistakes at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

not_the_users: list[str] = []  # folders of frontends, with a separator at the end: a place in a message is never there


@dataclass(frozen=True)
class Place:
    """One spot in the user's program: where it is, what stands there, why it is a problem, and what to write instead."""

    where: str  # "model.py:14" or a parameter's path
    source: str  # the line of text at that spot, "" where there is none
    why: str
    fix: str

    def __str__(self) -> str:
        lines = [f"  {self.where}"]
        if self.source:
            lines.append(f"      {self.source}")
        lines.append(f"    why: {self.why}")
        lines.append(f"    fix: {self.fix}")
        return "\n".join(lines)


class TileworkError(Exception):
    """Base of all errors that Tilework raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 4
    kind = "bug"

    def __init__(
        self,
        id: str,
        summary: str,
        *,
        found: str = "",
        expected: str = "",
        fix: str = "",
        places: Sequence[Place] = (),
    ) -> None:
        super().__init__(summary)
        self.id = id
        self.summary = summary
        self.found = found
        self.expected = expected
        self.fix = fix
        self.places = tuple(places)

    def __str__(self) -> str:
        lines = [f"[{self.id}] {self.summary}"]
        lines += [str(place) for place in self.places]
        if self.found:
            lines.append(f"  found:    {self.found}")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.fix:
            lines.append(f"  fix:      {self.fix}")
        lines.append(f"  see:      tilework explain {self.id}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        return {
            "error": self.id,
            "kind": self.kind,
            "summary": self.summary,
            "found": self.found,
            "expected": self.expected,
            "fix": self.fix,
            "places": [vars(place) for place in self.places],
        }


class UserError(TileworkError):
    """The user's mistake: a model, an input, a flag or a file that cannot be used as it is."""

    exit_code = 2
    kind = "user"


class MachineError(TileworkError):
    """The environment: a missing compiler, a full disk, a machine that cannot run this artifact."""

    exit_code = 3
    kind = "environment"


class BugError(TileworkError):
    """Ours: something that should not be possible."""

    exit_code = 4
    kind = "bug"


class TileworkWarning(UserWarning):
    """Something that works, and probably not as it was meant."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean x?' for a misspelt name, or the list of what there is."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}? Known: {', '.join(known)}"
    return f"known: {', '.join(known) or 'none'}"
