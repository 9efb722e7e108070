"""common_app_driver: what most apps do for compile and measure-performance. Harmless for run and test."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..sambasession import session
from .measuring import measure_performance, measure_sections
from .utils import trace_graph


def common_app_driver(
    args: argparse.Namespace,
    model: Any = None,
    inputs: Any = None,
    optim: Any = None,
    name: str | None = None,
    app_dir: str | None = None,
    init_output_grads: bool | None = None,
    squeeze_bs_dim: bool = False,
    get_output_grads: bool = True,
    metadata: Mapping[str, Any] | None = None,
    optimizers: Any = None,
    **more: Any,
) -> Any:
    optim = optim if optim is not None else optimizers
    command = getattr(args, "command", None)
    if command == "compile":
        return session.compile(model, inputs, optim, name=name, app_dir=app_dir, config_dict=vars(args),
                               squeeze_bs_dim=squeeze_bs_dim, metadata=metadata,
                               loss_indices=more.get("loss_indices"))  # fmt: skip
    if command not in ("measure-performance", "measure-sections"):
        return None
    trace_graph(model, inputs, optim, pef=args.pef, mapping=getattr(args, "mapping", None))
    report = getattr(args, "json", None) or getattr(args, "bench_report_json", None)
    if command == "measure-sections":
        return measure_sections(model, inputs, num_sections=args.num_sections, n_iterations=args.num_iterations,
                                batch_size=args.batch_size, json=report)  # fmt: skip
    return measure_performance(
        model, inputs, args.batch_size, getattr(args, "n_chips", 1), args.inference, run_graph_only=args.run_graph_only,
        n_iterations=args.num_iterations, json=report, min_duration=args.min_duration,
        compiled_stats_json=getattr(args, "compiled_stats_json", None),
        data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu,
    )  # fmt: skip
