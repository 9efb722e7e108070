"""What the verbs share: finding the user's function, progress on stderr, JSON on stdout.

Torch is imported when a verb does its work, not before: --help and the shell's completion answer at once."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Place, TileworkError, UserError, did_you_mean
from .output import err as err
from .output import out as out
from .output import print_json as print_json

if TYPE_CHECKING:
    from ..step import Step


def devices(incomplete: str) -> list[str]:
    """For the shell's completion of --device."""
    from ..found import device_names

    return [name for name in device_names() if name.startswith(incomplete)]


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with the current activity and the time it takes, on a terminal; a line for each activity otherwise."""
    start = time.perf_counter()
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        with err.status("starting") as status:
            yield lambda text: status.update(f"{text} ({time.perf_counter() - start:.0f} s)")
    else:
        yield lambda text: err.print(f"[{time.perf_counter() - start:5.1f} s] {text}", markup=False)


def find_function(reference: str) -> Callable[..., Any]:
    """FILE.py:function or package.module:function."""
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise UserError("reference", "expected FILE.py:function or package.module:function", found=reference,
                        fix="for example: tilework compile model.py:build")  # fmt: skip
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [k for k, v in vars(module).items() if inspect.isfunction(v) and not k.startswith("_")]
        raise UserError("reference", f"{source} has no function {name!r}", found=did_you_mean(name, functions))
    return function  # type: ignore[no-any-return]


def _pretrained(folder: str) -> Callable[..., Any]:
    """hf:FOLDER, a model of transformers."""
    from ..zoo.pretrained import build

    return functools.partial(build, folder)


def _load_file(path: Path) -> Any:
    if not path.exists():
        raise UserError("reference", f"{path}: there is no such file", found=os.getcwd(), expected="a Python file")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with user_code(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    with user_code(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name and (name == e.name or name.startswith(f"{e.name}.")):
                raise UserError("reference", f"there is no module {e.name!r}", expected="an installed module, or FILE.py") from e
            raise


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """An exception in the user's own code is the user's: shown with its place, not as our traceback.

    What that code prints goes to stderr: stdout is for results."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except TileworkError:
        raise
    except SyntaxError as e:
        place = Place(f"{e.filename}:{e.lineno}", (e.text or "").strip(), f"SyntaxError: {e.msg}", "correct this line")
        raise UserError("user-code", f"{doing} failed", places=[place]) from e
    except Exception as e:
        from ..capture.source import is_user_file

        trail = traceback.extract_tb(e.__traceback__)
        last = next((f for f in reversed(trail) if is_user_file(f.filename)), trail[-1])
        place = Place(f"{last.filename}:{last.lineno}", last.line or "", f"{type(e).__name__}: {e}", "correct this line")
        raise UserError("user-code", f"{doing} failed", places=[place]) from e


def load_step(reference: str, arguments: list[str]) -> Step:
    """Calls the user's build function with the --set name=value arguments that it takes."""
    from ..step import as_step

    function = _pretrained(reference.partition(":")[2]) if reference.startswith("hf:") else find_function(reference)
    parameters = inspect.signature(function).parameters
    known = [k for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())  # **kwargs: the function itself knows which
    given = {}
    for argument in arguments:
        name, eq, text = argument.partition("=")
        if not eq or (name not in known and not takes_any):
            raise UserError("build-argument", f"--set {argument}", expected=f"name=value; {did_you_mean(name, known)}")
        try:
            given[name] = json.loads(text)
        except ValueError:
            given[name] = text
    with user_code(f"calling {reference}"):
        return as_step(function(**given))
