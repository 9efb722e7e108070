"""tilework compile: a build function to an artifact."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .common import load_step, out, print_json, progress

NAME = "compile"
HELP = "Compile a training step into an artifact (.pef)."
EXAMPLE = "Example: tilework compile model.py:build -o out/model.pef --set batch_size=64"


def command(
    build: Annotated[str, typer.Argument(help="FILE.py:function or package.module:function; it returns the Step.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The artifact to write.")] = None,
    device: Annotated[str, typer.Option(help="cpu, reference, null, or one that another distribution brings.")] = "cpu",
    weights: Annotated[str, typer.Option(help="Where initial weights go: separate, inside or none.")] = "separate",
    programs: Annotated[str, typer.Option(help="Ways to run it: all, fused (fastest compile) or sections.")] = "all",
    isa: Annotated[str, typer.Option(help="native or baseline; on x86-64 also x86-64-v3 and x86-64-v4.")] = "native",
    opt_level: Annotated[int, typer.Option(help="Of the native compiler, 0 to 3.")] = 3,
    keep_momentum: Annotated[bool, typer.Option(help="Leave room for momentum although it starts at 0.")] = False,
    keep_gradients: Annotated[bool, typer.Option(help="The fused step keeps gradients for reading.")] = False,
    batch_sizes: Annotated[str, typer.Option(help="Rows of a step, such as 64,16: a signature for each.")] = "",
    infer_batch_sizes: Annotated[str, typer.Option(help="More sizes, for inference alone, such as 1,8,32.")] = "",
    replicas: Annotated[int, typer.Option(help="How many it is meant for; it runs with any number.")] = 1,
    disable: Annotated[list[str] | None, typer.Option(help="Leave out a planning pass; can be repeated.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="name=value for the build function.")] = None,
    plan_only: Annotated[bool, typer.Option(help="Print the plan and stop: nothing is built.")] = False,
    verify: Annotated[bool, typer.Option(help="Run one step beside eager PyTorch before the artifact is written.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from ..check.verified import compile, signatures_of
    from ..compiler.build import plan_step
    from ..errors import UserError
    from ..plan.options import Options

    if weights not in ("separate", "inside", "none"):
        raise UserError("options", "--weights", found=weights, expected="separate, inside or none")
    options = Options(
        device=device,
        programs=programs,  # type: ignore[arg-type]
        isa=isa,  # type: ignore[arg-type]
        opt_level=opt_level,
        keep_momentum=keep_momentum,
        keep_gradients=keep_gradients,
        num_replicas=replicas,
        disable=tuple(disable or ()),
    )
    step = load_step(build, set_ or [])
    if plan_only:
        planned = plan_step(signatures_of([step], _sizes(batch_sizes), _sizes(infer_batch_sizes)), options)
        if json:
            print_json({"programs": {p: asdict(c) for p, c in planned.costs.items()}, "memory": planned.memory})
        else:
            out.print(str(planned), markup=False)
        return
    path = output or Path("out") / f"{build.split(':')[0].removesuffix('.py').split('/')[-1].split('.')[-1]}.pef"
    if path.is_dir() or not path.name:
        raise UserError("options", f"--output {path} is a folder", expected="a file name, such as out/model.pef")
    with progress(quiet=json) as report:
        done = compile(step, path, options=options, weights=weights, report=report, verify=verify,  # type: ignore[arg-type]
                       batch_sizes=_sizes(batch_sizes), infer_batch_sizes=_sizes(infer_batch_sizes))  # fmt: skip
    if json:
        print_json({"artifact": str(done.path), "weights": str(done.weights) if done.weights else None,
                    "digest": done.digest, "seconds": done.seconds, "programs": done.notes,
                    "memory": done.plan.memory, "verified": done.verification.compared, "verification": done.verification.note,
                    "retreats": done.verification.retreats})  # fmt: skip
        return
    out.print(str(done.plan), markup=False)
    for program, note in done.notes.items():
        out.print(f"{program}: {note}", markup=False)
    seen = done.verification
    out.print(f"verified {seen.note} ({done.seconds.get('verify', 0.0):.1f} s)" if seen.compared else seen.note, markup=False)
    out.print(f"artifact {done.path}  ({done.path.stat().st_size / 1e6:.2f} MB, {sum(done.seconds.values()):.1f} s)")
    if done.weights:
        out.print(f"weights  {done.weights}")


def _sizes(text: str) -> list[int]:
    from ..errors import UserError

    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError("signatures", "batch sizes", found=text, expected="whole numbers with commas, such as 64,16") from None
