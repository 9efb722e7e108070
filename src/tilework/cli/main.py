"""tilework: one verb per file. Errors become one clear message and an exit code:

0 ok, 1 the check failed, 2 the user's mistake, 3 the environment, 4 our bug.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import threading
import traceback
import types
from typing import Annotated

import typer

from .. import __version__
from ..errors import TileworkError

# One line for each verb, short enough for `tilework --help` on 80 columns. The verb's module has the rest; it is imported
# when the verb is used, because most of them import torch.
VERBS = {
    "compile": "Compile a training step into an artifact (.pef).",
    "run": "Train: run an artifact over data and save the weights.",
    "test": "Compare an artifact with your model in eager PyTorch.",
    "measure": "Time an artifact: the step, its sections, inference.",
    "launch": "Run several ranks of a command on this machine.",
    "runs": "List the runs below a folder.",
    "report": "Compare runs on one HTML page with their curves.",
    "export": "Write trained weights under the model's own names.",
    "estimate": "Predict how fast many replicas train.",
    "inspect": "Show what an artifact contains, without running it.",
    "cache": "Show, trim or clear the compile cache.",
    "doctor": "Check what this machine can do and what is missing.",
    "job": "Queue commands: submit, list, show, logs, cancel, wait.",
    "tiles": "List the tiles of this machine and the sessions on them.",
    "top": "Watch tiles and sessions live; q quits.",
    "daemon": "Run, install or query the service that leases tiles.",
    "site": "Create or remove the folders that a site's scripts expect.",
    "explain": "Explain an error by its id, or list all error ids.",
}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compile a whole PyTorch training step into one file, and run it on tiles.",
    epilog="Exit codes: 0 ok, 1 check failed, 2 usage error, 3 environment, 4 bug.",
)


def _version(value: bool) -> None:
    if value:
        print(f"tilework {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def _register(argv: list[str]) -> None:
    """The verb that is asked for, alone: most of them import torch, and `tilework tiles` must not wait for that.

    Where no verb is named (help, completion of its name, a misspelt one), each is only a name and a line of help."""
    verb = next((word for word in argv if not word.startswith("-")), None)
    if verb in VERBS:
        module = importlib.import_module(f".{verb}", __package__)
        if hasattr(module, "app"):  # a verb with verbs of its own
            app.add_typer(module.app, name=module.NAME, help=module.HELP, epilog=module.EXAMPLE)
            return
        settings = getattr(module, "SETTINGS", None)
        app.command(module.NAME, help=module.HELP, epilog=module.EXAMPLE, context_settings=settings)(module.command)
        return
    for name, line in VERBS.items():
        app.command(name, help=line)(_only_a_name)


def _only_a_name() -> None:
    raise AssertionError("a verb that is named on the command line is registered with its own function")


def _words_to_complete() -> list[str]:
    """What has been typed after `tilework`, where the shell asks for completions."""
    words = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()
    return [word for word in words[1:] if word in VERBS][:1]


def main(argv: list[str] | None = None) -> None:
    """The entry point. Every way out has its exit code, and no traceback unless it is our bug."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    interrupts = _count_interrupts()
    try:
        code = _run(argv, interrupts)
    except (KeyboardInterrupt, typer.Abort):  # wherever it struck, also while another way out was being taken
        code = 130
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is over: nothing is left to interrupt
    if code == 130 or (interrupts and code != 0):
        # Torch's imports swallow interrupts and fail later with an error of their own; the user only pressed Ctrl-C.
        print("tilework: stopped", file=sys.stderr)
        code = 130
        exec("")  # CPython kills itself by SIGINT at exit if one ever struck inside exec(str), unless a later exec went well
    sys.exit(code)


def _count_interrupts() -> list[int]:
    """Interrupts still raise KeyboardInterrupt. They are also noted here, because libraries may swallow the exception."""
    noted: list[int] = []

    def note(number: int, frame: types.FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    return noted


def _run(argv: list[str], interrupts: list[int]) -> int:
    try:
        _register(_words_to_complete() if "_TILEWORK_COMPLETE" in os.environ else argv)
        code = app(args=argv, prog_name="tilework", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TileworkError as e:
        if "--json" in argv:
            print(json.dumps(e.as_json()))
        print(f"tilework: error {e}", file=sys.stderr)
        return _told_ranks(e) or e.exit_code
    except typer.Exit as e:
        return e.exit_code
    except typer.TyperException as e:  # a wrong flag or argument
        verb = f"{argv[0]} " if argv[0] in VERBS else ""
        print(f"tilework: error {e.format_message()}\n  see: tilework {verb}--help", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except Exception as e:
        _told_ranks(e)
        if interrupts:
            return 130
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:  # verbs say so of their own files: this is where we print to
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            print(f"tilework: error [disk-full] nothing more can be printed\n  found: {e}", file=sys.stderr)
            return 3
        traceback.print_exc()
        print(
            f"tilework: this is a bug in Tilework: {type(e).__name__}: {e}\n  please report it with the text above",
            file=sys.stderr,
        )
        return 4


def _told_ranks(error: Exception) -> int | None:
    """Where this is one rank of several, the others learn that it stops. The exit code of one that stops because of another."""
    group = sys.modules.get("tilework.parallel.group")
    found: int | None = group.failing(error) if group is not None else None
    return found


if __name__ == "__main__":
    main()
