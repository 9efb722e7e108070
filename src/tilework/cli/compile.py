"""tilework compile: a build function to an artifact."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from .common import devices, load_step, out, print_json, progress

NAME = "compile"
HELP = "Compile a training step into an artifact (.pef). BUILD is a function that returns the step."
EXAMPLE = "Example: tilework compile model.py:build -o out/model.pef"


def _passes(incomplete: str) -> list[str]:
    from ..plan.options import PASSES

    return [name for name in PASSES if name.startswith(incomplete)]


def command(
    build: Annotated[str, typer.Argument(metavar="BUILD", help="FILE.py:function, package.module:function or hf:FOLDER.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="The artifact to write.")] = None,
    device: Annotated[str, typer.Option(metavar="NAME", autocompletion=devices,
                                        help="Device to compile for: cpu, cuda, reference, null, or an installed one.")] = "cpu",
    weights: Annotated[Literal["separate", "inside", "none"],
                       typer.Option(help="Where to put the initial weights.")] = "separate",
    programs: Annotated[Literal["all", "fused", "sections"],
                        typer.Option(help="Which programs to build. fused compiles fastest.")] = "all",
    isa: Annotated[Literal["native", "x86-64-v3", "x86-64-v4", "baseline",
                           "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"],
                   typer.Option(metavar="NAME", help="Instruction set: native, x86-64-v3, x86-64-v4, baseline; "
                                                     "of a GPU: native, or sm_90 and the like.")] = "native",
    tf32: Annotated[bool, typer.Option("--tf32", help="GPUs: faster products with 10 bits of the mantissa.")] = False,
    opt_level: Annotated[Literal[0, 1, 2, 3], typer.Option(help="Optimization level of the native compiler.")] = 3,
    keep_momentum: Annotated[bool, typer.Option("--keep-momentum", help="Reserve room for momentum, even if it is 0.")] = False,
    keep_gradients: Annotated[bool, typer.Option("--keep-gradients", help="Keep gradients readable after a fused step.")] = False,
    grad_norm: Annotated[bool, typer.Option("--grad-norm", help="Compute the norm of each step's gradients.")] = False,
    batch_sizes: Annotated[str, typer.Option(metavar="N,N", help="Also compile for these batch sizes, e.g. 64,16.")] = "",
    infer_batch_sizes: Annotated[str, typer.Option(metavar="N,N", help="Batch sizes for inference only, e.g. 1,8,32.")] = "",
    replicas: Annotated[int, typer.Option(metavar="N", help="Replicas to plan for. Any number can run the file.")] = 1,
    shards: Annotated[int, typer.Option(metavar="N", help="Parts of the update that replicas can share out (run --shard).")] = 1,
    sync_batch_norm: Annotated[bool, typer.Option("--sync-batch-norm",
                                                  help="Batch normalization over the rows of all replicas.")] = False,
    disable: Annotated[list[str] | None, typer.Option(metavar="PASS", autocompletion=_passes,
                                                      help="Turn off a planning pass. Can be repeated.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE",
                                                   help="Argument for the build function. Can be repeated.")] = None,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Print the plan and stop. Builds nothing.")] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare one step with eager PyTorch first.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    from ..check.verified import compile, signatures_of
    from ..compiler.build import plan_step
    from ..errors import UserError
    from ..plan.options import Options

    options = Options(
        device=device,
        programs=programs,
        isa=isa,
        tf32=tf32,
        opt_level=opt_level,
        keep_momentum=keep_momentum,
        keep_gradients=keep_gradients,
        grad_norm=grad_norm,
        num_replicas=replicas,
        num_shards=shards,
        sync_batch_norm=sync_batch_norm,
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
    if output is None and build.startswith("hf:"):
        output = Path("out") / f"{Path(build.removeprefix('hf:')).name}.pef"
    path = output or Path("out") / f"{build.split(':')[0].removesuffix('.py').split('/')[-1].split('.')[-1]}.pef"
    if path.is_dir() or not path.name:
        raise UserError("options", f"--output {path} is a folder", expected="a file name, such as out/model.pef")
    with progress(quiet=json) as report:
        done = compile(step, path, options=options, weights=weights, report=report, verify=verify,
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
