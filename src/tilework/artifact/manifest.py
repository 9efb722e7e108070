"""manifest.json: the artifact's table of contents. This schema is published as docs/manifest.schema.json."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from . import structure
from .graph import DTYPES, TensorType

FORMAT_VERSION = (1, 2)  # major: readers of another major refuse; minor: newer readers accept older files

Size = Annotated[int, Meta(ge=0, lt=2**40)]
Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Sizes = Annotated[list[Size], Meta(max_length=16)]
Version = Annotated[list[int], Meta(min_length=2, max_length=2)]


def is_dropout(hyperparameter: str) -> bool:
    """Hyperparameters belong to an optimizer group (opt0.g1.lr), to clipping, or else to a dropout (encoder.drop.p)."""
    return not re.match(r"opt\d+\.g\d+\.(?!p$|p#)\w+$", hyperparameter) and hyperparameter not in ("clip_norm", "clip_value")


class _Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is decoded is checked: every field, its type and its bounds, and __post_init__."""


class Tensor(_Table, frozen=True):
    """A tensor's type. Strides are in elements."""

    dtype: str
    shape: Sizes
    stride: Sizes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        if len(self.shape) != len(self.stride):
            raise ValueError("shape and stride differ in length")

    def type(self) -> TensorType:
        return TensorType(self.dtype, tuple(self.shape), tuple(self.stride))

    @classmethod
    def of(cls, kind: TensorType) -> Tensor:
        return cls(dtype=kind.dtype, shape=list(kind.shape), stride=list(kind.stride))


class Argument(_Table, frozen=True):
    """An input or an output of the step, in the order of the flattened structure."""

    name: Name
    type: Tensor


class Parameter(_Table, frozen=True):
    name: Name
    type: Tensor
    trainable: bool
    group: str | None  # the optimizer group that updates it


class Group(_Table, frozen=True):
    """One parameter group of one optimizer. Its hyperparameters are named <prefix>.<name>."""

    prefix: Name
    optimizer: Name
    rule: Literal["sgd", "adam", "adamw", "rmsprop", "lamb", "adagrad", "adamax", "adadelta", "nadam", "radam", "muon"]
    params: list[Name]
    state: list[Name]
    initial: dict[Name, float] = {}  # state that does not start at zero


class Program(_Table, frozen=True):
    """Code for one section, or for several fused into one: a function over named buffers."""

    sections: list[Literal["fwd", "bwd", "reduce", "opt", "infer"]]
    buffers: list[Name]  # the order in which the native function takes them
    writes: list[Name]
    graph: Name  # member with the graph, graphs/<name>.json
    code: str | None  # member with native code, None where the device needs none
    abi: str  # SHA-256 of the buffers' types and order; native code carries the same
    flops: Count
    bytes: Count
    temporary_bytes: Count
    called: list[str] = []  # operators that it calls through torch's dispatcher; ["*"]: all of them


class Fingerprint(_Table, frozen=True):
    """What a machine must have to run this artifact. Compared part by part; each part says needs <= has."""

    format: Version
    device: Literal["cpu", "cuda", "reference", "null"]
    torch: Annotated[list[int], Meta(min_length=2, max_length=3)]
    architecture: str  # "x86_64"
    features: list[str]  # instruction-set extensions, as /proc/cpuinfo names them
    glibc: Annotated[list[int], Meta(max_length=3)]
    options: dict[str, str | int | bool | list[str]]


class Weights(_Table, frozen=True):
    """Where the initial weights are: inside, in the file of this name beside the artifact, or nowhere."""

    where: Literal["inside", "separate", "none"]
    file: Annotated[str, Meta(pattern=r"^[^/\\]+$")] | None = None  # a plain name, never a path
    sha256: str | None = None  # of that file, as it was written; None before format 1.1


class Verification(_Table, frozen=True):
    """What one step beside eager PyTorch showed before the artifact was written."""

    note: str  # "on the example inputs", or why nothing was compared
    compared: bool
    retreats: list[str] = []  # what was given up to compute what the model computes


class Check(_Table, frozen=True):
    """A check of values in the model: where it is, and what the model says when it fails."""

    where: str
    text: str


class Manifest(_Table, frozen=True):
    format: Version
    name: Name
    created: str  # ISO 8601, UTC
    producer: str
    inputs: list[Argument]
    num_model_inputs: Count
    input_structure: list[Any]
    outputs: list[Argument]
    output_structure: list[Any]
    infer_outputs: list[Argument]
    infer_structure: list[Any]
    losses: list[Name]
    separate_loss: bool
    batch_dim: int | None
    num_micro_batches: Annotated[int, Meta(ge=1, le=2**20)]
    accumulate: Literal["mean", "sum"]
    precision: Literal["float32", "bfloat16"]
    parameters: list[Parameter]
    groups: list[Group]
    hyperparameters: dict[str, float]
    programs: dict[str, Program]
    buffers: dict[str, Tensor]
    weights: Weights
    metadata: dict[str, Any]
    fingerprint: Fingerprint
    verification: Verification | None = None  # None before format 1.1
    aliases: dict[str, str] = {}  # other names of a tensor in the model (tied weights) -> the name that it has here
    transient: list[str] = []  # buffers that the model's state_dict leaves out; their values are among the constants
    checks: dict[Literal["fwd", "infer"], list[Check]] = {}  # check/fwd and check/infer have a number for each: NaN if it fails

    def __post_init__(self) -> None:
        """Every name that one part mentions is defined by another."""
        for found in (self.input_structure, self.output_structure, self.infer_structure):
            structure.check(found)
        for name, program in self.programs.items():
            missing = [b for b in program.buffers if b not in self.buffers]
            if missing:
                raise ValueError(f"program {name} takes buffers that are not in the table: {missing[:5]}")
            if len(set(program.buffers)) != len(program.buffers):
                raise ValueError(f"program {name} takes a buffer twice")
            if not set(program.writes) <= set(program.buffers):
                raise ValueError(f"program {name} writes buffers that it does not take")
        for parameter in self.parameters:
            if f"param/{parameter.name}" not in self.buffers:
                raise ValueError(f"parameter {parameter.name} has no buffer")
        for prefix, arguments in (("input", self.inputs), ("output", self.outputs), ("infer", self.infer_outputs)):
            for argument in arguments:
                buffer = self.buffers.get(f"{prefix}/{argument.name}")
                dense = TensorType.dense(argument.type.dtype, argument.type.shape)
                if buffer is not None and not buffer.type() == argument.type.type() == dense:
                    raise ValueError(f"{prefix} {argument.name} and its buffer have different types, or are not dense")
                used = "infer" if prefix == "infer" else "fwd"
                if buffer is None and any(used in p.sections for p in self.programs.values()):
                    raise ValueError(f"{prefix} {argument.name} has no buffer")
        known = {p.name for p in self.parameters}
        for group in self.groups:
            if not set(group.params) <= known:
                raise ValueError(f"group {group.prefix} has parameters that are not in the table")
        if not set(self.losses) <= {o.name for o in self.outputs}:
            raise ValueError("a loss is not among the outputs")
        for what, arguments, shape in (
            ("input", self.inputs, self.input_structure),
            ("output", self.outputs[1:] if self.separate_loss else self.outputs, self.output_structure),
            ("inference output", self.infer_outputs, self.infer_structure),
        ):
            if len(structure.names(shape, "x")) != len(arguments):
                raise ValueError(f"the {what} structure and the {what} list differ in length")
        for section, checks in self.checks.items():
            buffer = self.buffers.get(f"check/{section}")
            if buffer is None or buffer.type() != TensorType.dense("float32", (len(checks),)):
                raise ValueError(f"the checks of {section} have no buffer, or not a number for each")
        if self.num_model_inputs > len(self.inputs):
            raise ValueError("more model inputs than inputs")

    def as_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Raises msgspec.ValidationError, with the place and the reason, or msgspec.DecodeError."""
        return msgspec.json.decode(text, type=cls)
