"""The interface, row by row: what is here, what is accepted without effect, what is refused. docs/sambaflow.md has it as a table
(scripts/write_sambaflow_table.py), and a test holds every row against the code."""

from __future__ import annotations

import importlib
from typing import Any

from tilework.frontend.surface import HERE, IGNORED, REFUSED, code, names_table, variables_table
from tilework.frontend.surface import table as markdown

_S, _U = "sambaflow.samba", "sambaflow.samba.utils"
# (where, names, status, what to know)
ROWS: list[tuple[str, str, str, str]] = [
    ("sambaflow", "__version__ is_demo", HERE, "the version can be compared: `1.24.1+tilework...`; is_demo() is False"),
    (_S, "from_torch_model_ from_torch_", HERE, "in place; parameters stay the same objects; the model returns SambaTensors"),
    (_S, "from_torch_tensor from_torch from_named_dict", HERE, "memory is shared"),
    (_S, "to_torch to_torch_tensor", HERE, "idempotent"),
    (_S, "randn rand randint randn_like", HERE, "both forms of randint"),
    (_S, "SambaTensor SambaParameter", HERE, "a torch tensor and a torch parameter, with names and the device's copy"),
    (_S, "addmm triu_fill", HERE, ""),
    (_S, "cat sigmoid matmul stack softmax", HERE, "any function of torch under samba.NAME"),
    (_S, "patched_torch is_internal", HERE, "a plain context; False"),
    (_S, "lazy_param", HERE, "initialisation is left out"),
    (_S, "groupby", REFUSED, "no public description of what it computes"),
    (f"{_S}.sambatensor", "DimInfo", HERE, ""),
    (f"{_S}.session", "compile trace run to_cpu to_rdu to_device get_tensors get_tensors_by_name", HERE, ""),
    (f"{_S}.session", "setup reset tracing profiler", HERE, "tracing can be assigned; it changes nothing"),
    (f"{_S}.session", "start_samba_profile end_samba_profile start_runtime_profile end_runtime_profile", HERE,
     "the profiler's events, as text"),
    (f"{_S}.SambaTensor", "torch torch_tensor cpu rdu sn_name name sn_region_name sn_grad sn_data has_data batch_dim named_dims "
     "sized_dims", HERE, "and everything that a torch tensor has; SambaParameter too"),
    (f"{_S}.SambaTensor", "host_memory", IGNORED, ""),
    (f"{_S}.SambaParameter", "torch torch_tensor cpu rdu sn_name name sn_grad sn_data", HERE, ""),
    (f"{_S}.oldmodel", "run write_host_params", HERE,
     "methods of a converted model; write_host_params copies to the device what the host has changed, else the other way"),
    (f"{_S}.session", "tensor_dict output_dict _traced_tensors", HERE, ""),
    (f"{_S}.session", "buffer_dict optim_dict enabled_pinned_memory set_tensors ctx", HERE, ""),
    (f"{_S}.session", "add_aux_tensor is_valid_aux_tensor_name disable_graphamp", HERE, ""),
    (f"{_S}.session", "_add_directives _context_directives dynamic_dims", IGNORED, ""),
    (f"{_S}.session", "add_graph compile_multigraph init_multigraph_runtime", HERE,
     "forward graphs over one model's weights, run with graph_name=; tensors that share a region are refused"),
    (f"{_S}.session", "create_dynamic_dim load_dynamic_dims_config", REFUSED, "compile a graph for each size"),
    (f"{_S}.optim", "SGD AdamW Adam", HERE, "torch's own, with max_grad_norm"),
    (f"{_S}.nn", "Module Linear functional SambaParameter", HERE, "torch.nn"),
    (f"{_S}.nn.parameter", "SambaParameter Parameter", HERE, ""),
    (_U, "trace_graph set_seed get_file_dir assert_close init_output_grads weight_norm_", HERE, ""),
    (_U, "measure_performance measure_sections common_app_driver", HERE, ""),
    (_U, "get_rank get_world_size is_main_process SNType parse_dtype compile", HERE, ""),
    (_U, "fix_rdu_affinity create_mac_resource_report", IGNORED, ""),
    (_U, "trace_multigraph", HERE, "returns what the model returns, in its structure"),
    (f"{_U}.utils", "trace_graph", HERE, ""),
    (f"{_U}.argparser", "parse_app_args parse_yaml_to_args", HERE, ""),
    (f"{_U}.common", "common_app_driver", HERE, "does nothing for run and test"),
    (f"{_U}.pef_utils", "get_pefmeta get_pefmeta_dict get_pef_info PefInfoStruct", HERE, ""),
    (f"{_U}.dataset.mnist", "dataset_transform prepare_dataloader", HERE, "uses the built-in digits if there are no files"),
    (f"{_U}.benchmark_acc", "AccuracyReport", HERE, ""),
    (f"{_U}.checkpoint", "load_sharded_checkpoint", HERE, ""),
    (f"{_U}.numeric", "MAX_BF16_TRUNCATE_NORMAL_REL", HERE, ""),
    (f"{_U}.tensorboard_debug", "dump_accuracy_debug_info", HERE, "norms of weights and gradients, as JSON lines"),
    (f"{_U}.trainer.samba", "train", HERE, ""),
    (f"{_S}.sambaloader", "SambaLoader", HERE, ""),
    (f"{_S}.env", "use_mock_samba_runtime enable_conv_grad_accum_stoc enable_addbias_grad_accum_stoc disable_sgd_stoc", HERE,
     "no mock runtime, no stochastic rounding"),
    (f"{_S}.lazy_param", "RNGProvider RNGProviderFactory", HERE, ""),
    (f"{_S}.materialize", "materialize", HERE, ""),
    (f"{_S}.graph", "FwdGraph", HERE, ""),
    (f"{_S}.profiler", "Profiler", HERE, ""),
    (f"{_S}.test", "consistency_test", IGNORED, "runs the function as it is"),
    (f"{_S}.directives", "op_fusion sdpa_directives", IGNORED, ""),
    (f"{_S}.argconf.args", "CommonArgs CompileArgs RunArgs", HERE, "plain objects with every flag as an attribute"),
    (f"{_S}.functional.stir", "sn_zipmapreduce sn_select sn_imm sn_iteridx", REFUSED, "write it with torch operators"),
    (f"{_S}.sn_private", "sn_gather sn_scatter sn_multinomial", HERE, "torch's operators"),
    ("sambaflow.sambacollections", "OrderedSet", HERE, ""),
    ("sambaflow.logging", "samba_logger", HERE, "log_limit= works"),
    ("sambaflow.mac.metadata", "ConvTilingMetadata TilingMetadata", IGNORED, "kept in the PEF's metadata"),
]  # fmt: skip

# Environment variables (name, status, what to know)
VARIABLES: list[tuple[str, str, str]] = [
    ("OMP_NUM_THREADS", HERE, "threads of the CPU device"),
    ("SAMBA_SEED", HERE, "overrides set_seed"),
    ("SF_RNT_LOG_LEVEL", HERE, "CRIT, ERR, WARN, INFO, DEBUG; --log-level overrides it"),
    ("SF_RNT_TILE_AFFINITY", HERE, "which tiles to lease: docs/tiles.md"),
    ("SN_NUM_THREADS, SF_RNT_NUMA_BIND, SF_RNT_FSM_POLL_BUSY_WAIT, SF_RNT_DMA_POLL_BUSY_WAIT", IGNORED, ""),
    ("SAMBA_CCL_NUM_WORKERS, CCL_TIMEOUT, CONVFUNC_DEBUG_RUN, DISALLOW_VISUALIZE, TARGET_SAMBAFLOW_VERSION", IGNORED, ""),
]


def find(where: str, name: str) -> Any:
    """The object behind a row: of a module, or of the session."""
    if where == f"{_S}.session":
        return getattr(type(importlib.import_module(_S).session), name, None) or getattr(
            importlib.import_module(_S).session, name
        )
    module, _, owner = where.rpartition(".")
    if owner[0].isupper():
        return getattr(getattr(importlib.import_module(module), owner), name)
    return getattr(importlib.import_module(where), name)


def table() -> str:
    """All three tables: names, flags, environment variables."""
    return f"{names_table(ROWS)}\n\n### Flags\n{_flags()}\n\n### Environment variables\n{variables_table(VARIABLES)}"


def _flags() -> str:
    from .samba.utils.argparser import COMMANDS, flags_of

    found: dict[str, list[Any]] = {}  # spelled -> [commands, default, meaning]
    for command in COMMANDS:
        for spelled, default, meaning in flags_of(command):
            found.setdefault(spelled, [[], default, meaning])[0].append(command)
    rows = []
    for spelled, (commands, default, meaning) in found.items():
        where = "all" if len(commands) == len(COMMANDS) else ", ".join(commands)
        rows.append((code([spelled]), where, "" if default in (None, False) else default, meaning))
    return markdown(("flag", "commands", "default", "meaning"), rows)
