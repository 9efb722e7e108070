"""The reference pages of the site: the commands, from the typer app, and the Python API, from signatures and docstrings.

Docstrings describe arguments as `name   text` lines, indented; here they become a list.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

import tilework
import tilework.optim
from tilework.cli.main import VERBS, app

FUNCTIONS = ("compile", "load", "plan_step", "read_artifact", "recompute_from", "settled")
CLASSES = ("Step", "Options", "Session", "Result", "Loader", "Compiled", "Artifact")
RETURNED = ("Session", "Result", "Compiled", "Artifact")  # users get them from functions and never make one
ERRORS = ("TileworkError", "UserError", "MachineError", "BugError", "TileworkWarning")


def cli_page() -> str:
    parts = [
        "# Commands",
        "Every command has `--help`. `tilework --install-completion` installs completion for your shell.\n"
        "Commands that print results take `--json`. `python -m tilework` is the same as `tilework`.",
        "| command | what it does |\n|---|---|\n"
        + "\n".join(f"| [`{verb}`](#tilework-{verb}) | {line} |" for verb, line in VERBS.items()),
        "Exit codes: 0 success, 1 a check failed, 2 a usage error, 3 a problem of the environment, 4 a bug in Tilework.",
    ]
    for verb in VERBS:
        module = importlib.import_module(f"tilework.cli.{verb}")
        if hasattr(module, "app"):  # a verb with verbs of its own
            parts += [f"## tilework {verb}", module.HELP]
            for name, command in typer.main.get_command(module.app).commands.items():  # type: ignore[attr-defined]
                parts += _verb(f"{verb} {name}", command.help or "", command.epilog or "", command, level="###")
            continue
        own = typer.Typer(add_completion=False, rich_markup_mode=None)
        own.command(verb, help=module.HELP, epilog=module.EXAMPLE)(module.command)
        parts += _verb(verb, module.HELP, module.EXAMPLE, typer.main.get_command(own))
    assert app.info.help
    return "\n\n".join(parts) + "\n"


def _verb(verb: str, about: str, example: str, command: Any, level: str = "##") -> Iterator[str]:
    context = command.make_context(verb, [], resilient_parsing=True)
    usage = " ".join(piece.strip("{}") if piece.startswith("{") else piece for piece in command.collect_usage_pieces(context))
    yield f"{level} tilework {verb}"
    yield about
    yield f"```\ntilework {verb} {usage}\n```"
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            name, text = record
            code = html.escape(name).replace("|", "&#124;")  # a bar would end the cell, even in code
            rows.append(f"| <code>{code}</code> | {_cell(text)} |")
    if rows:
        yield "| argument or option | meaning |\n|---|---|\n" + "\n".join(rows)
    yield f"{example.partition(':')[0]}: `{example.partition(':')[2].strip()}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def api_page() -> str:
    parts = [
        "# Python API",
        "These are the public names of `import tilework`. Everything else may change without notice.",
        "## Functions",
    ]
    for name in FUNCTIONS:
        parts += _entry(f"tilework.{name}", getattr(tilework, name))
    parts.append("## Classes")
    for name in CLASSES:
        parts += _class(name, getattr(tilework, name))
    parts += ["## Optimizers", *_entry("tilework.optim.LAMB", tilework.optim.LAMB)]
    parts += ["## Errors", "[All error ids](errors.md) are described on a page of their own."]
    parts.append(
        "| class | meaning |\n|---|---|\n" + "\n".join(f"| `tilework.{n}` | {_first(getattr(tilework, n))} |" for n in ERRORS)
    )
    return "\n\n".join(parts) + "\n"


def _first(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _entry(name: str, value: Any, level: int = 3) -> Iterator[str]:
    yield f"{'#' * level} {name}"
    if name.removeprefix("tilework.") not in RETURNED:
        yield f"```py\n{_signature(name, value)}\n```"
    text = inspect.getdoc(value) or ""
    if not inspect.isclass(value) or not text.startswith(
        f"{value.__name__}("
    ):  # a dataclass without a docstring repeats its signature
        yield markdown(text)


def _signature(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    wanted = [p for n, p in signature.parameters.items() if n != "self"]
    words = []
    for p in wanted:
        default = (
            ""
            if p.default is p.empty
            else " = ..."
            if callable(p.default) or "factory" in repr(p.default)
            else f" = {p.default!r}"
        )
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        annotation = (
            "" if p.annotation is p.empty else f": {p.annotation if isinstance(p.annotation, str) else p.annotation.__name__}"
        )
        if p.kind is p.KEYWORD_ONLY and "*" not in words and not any(w.startswith("*") for w in words):
            words.append("*")
        words.append(f"{star}{p.name}{annotation}{default}")
    back = signature.return_annotation
    arrow = "" if back in (signature.empty, "None", None) or inspect.isclass(value) else f" -> {back}"
    line = f"{name}({', '.join(words)}){arrow}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(words) + f",\n){arrow}"


def _class(name: str, value: type) -> Iterator[str]:
    yield from _entry(f"tilework.{name}", value)
    if dataclasses.is_dataclass(value):
        notes = dict(re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(value), re.M))
        if notes:
            yield "| field | meaning |\n|---|---|\n" + "\n".join(
                f"| `{field}` | {_cell(note)} |" for field, note in notes.items()
            )
        return
    if name == "Loader":
        yield markdown(inspect.getdoc(value.__init__) or "")
    for own, member in vars(value).items():
        text = inspect.getdoc(member)
        if own.startswith("_") or not text:
            continue
        if isinstance(member, property) or not callable(member):
            yield f"#### {name}.{own}"
            yield markdown(text)
        else:
            yield from _entry(f"{name}.{own}", member, level=4)


def markdown(docstring: str) -> str:
    """`    name   text` lines become list items; the lines below them, further in, belong to them."""
    lines: list[str] = []
    for line in docstring.splitlines():
        item = re.match(r"^ *(\w[\w, ]*?) {2,}(\S.*)$", line)
        if item and (line.startswith("    ") or lines[-1:] == [""] or (lines[-1:] and lines[-1].startswith("- "))):
            lines += [""] if lines and lines[-1] and not lines[-1].startswith("- ") else []
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif lines and lines[-1].startswith("- ") and line.startswith("    "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.strip())
    return "\n".join(lines).strip()
