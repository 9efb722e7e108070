"""Makes the list of operators that a graph in an artifact may name, from torch's own list.

It was made once by this script and is kept by hand since: where the file is there, the script only shows what it would write
otherwise with the torch that is installed. An operator belongs to it if it computes tensors from tensors and numbers and does
nothing else: it changes none of its arguments, and reaches no file, no process, no random state, no Python object, no other
device, and no memory but its arguments' own. Loading refuses operators whose schema says that they change something, too.
"""

import re
import textwrap
from pathlib import Path

import torch
import torch._prims  # registers prims.*

TARGET = Path(__file__).parents[1] / "src" / "tilework" / "runtime" / "devices" / "data" / "operators.txt"
HEAD = """\
# Operators that a graph may name on the reference device: they compute tensors from tensors and numbers, and do nothing else.
# A graph in an artifact is data from outside. Made by scripts/write_operators.py (which says what belongs here), kept by hand.
"""
TYPES = re.compile(r"(Optional\[|List\[)*(Tensor|int|float|bool|number|complex|str|ScalarType|Layout|Device|MemoryFormat)\]*")
KERNELS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
UNWANTED = re.compile(
    # memory: of files, of others, or beyond what a tensor has; segment_reduce has a flag that turns its checks off
    r"from_file|storage|pin_memory|resize|\.set$|\.data$|_reshape_alias|segment_reduce|"
    # other kinds of tensors, which no graph has: sparse, nested, quantized, opaque, named; and those of other libraries
    r"sparse|spdiags|sr_to|to_csr|coalesce|_indices|\.indices|\._?values|dense|smm|sspaddmm|nested|jagged|_obs_|prune|"
    r"quantized|dequantize|\.quantize|dyn_quant|choose_qparams|"
    r"fbgemm|pack_|_4bit|int4|int8|mkldnn|cudnn|miopen|nnpack|cuda|_mps|xpu|vulkan|wrapped|efficientzero|"
    # torch's own machinery
    r"assert|_sym_|_make_|_fw_|dual|batch_dim|autocast|lazy|_test|foobar|overrideable|philox|token|device_put|_amp_|same_feature|sobol"
)
NEEDED = {"aten.embedding_dense_backward", "aten._embedding_bag_dense_backward", "aten.tril_indices", "aten.triu_indices",
          "aten._pack_padded_sequence", "aten._pack_padded_sequence_backward", "aten._pad_packed_sequence",
          *(f"aten.max_pool{d}d_with_indices{b}" for d in (1, 2, 3) for b in ("", "_backward"))}  # fmt: skip


def belongs(op: torch._ops.OpOverload, known: set[str]) -> bool:
    schema = op._schema
    return (
        op.name() in known
        and not schema.is_mutable
        and len(schema.returns) > 0
        and all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns)
        and all(TYPES.fullmatch(str(a.real_type)) for a in schema.arguments)
        # attention is marked as random for its dropout, which a captured graph never asks it for
        and (torch.Tag.nondeterministic_seeded not in op.tags or "scaled_dot_product" in op.name())
        and any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in KERNELS)
    )


def allowed() -> list[str]:
    known = set(torch._C._dispatch_get_all_op_names())
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(("aten::", "prims::"))}
    found = []
    for name in sorted(names):
        namespace, base = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), base)
        dotted = f"{namespace}.{base}"
        if UNWANTED.search(dotted) and dotted not in NEEDED:
            continue
        if any(belongs(getattr(packet, overload), known) for overload in packet.overloads()):
            found.append(dotted)
    return found


if __name__ == "__main__":
    new = allowed()
    if not TARGET.exists():
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(HEAD + textwrap.fill(" ".join(new), 128, break_on_hyphens=False) + "\n")
        print(f"{TARGET}: {len(new)} operators")
    else:
        old = set(re.sub("#.*", "", TARGET.read_text()).split())
        print("not in the file, but in torch:", *sorted(set(new) - old))
        print("in the file, but not made from this torch:", *sorted(old - set(new)))
