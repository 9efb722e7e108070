"""manifest.json: the artifact's table of contents. This schema is published as docs/manifest.schema.json."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from . import structure
from .graph import DTYPES, TensorType
from .names import Kind

FORMAT_VERSION = (2, 1)  # major: readers of another major refuse; minor: newer readers accept older files

Size = Annotated[int, Meta(ge=0, lt=2**40)]
Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Sizes = Annotated[list[Size], Meta(max_length=16)]
PART = r"opt_(\d+|rest)"  # parts of the update, which replicas share out
ROLES = ("step", "accumulate", "fwd", "bwd", "reduce", "opt", "infer")  # what a program does for its signature
Version = Annotated[list[int], Meta(min_length=2, max_length=2)]


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
    counter: str = ""  # whose steps are counted apart, as state/<counter>/step; empty: the prefix


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
    parallel: bool  # whether more than one thread pays
    called: list[str] = []  # operators that it calls through torch's dispatcher; ["*"]: all of them
    synchronises: bool = False  # whether it waits for the other replicas in its middle, for statistics of all of them
    completes: list[Count] = []  # of each bucket, the call of its pieces after which the gradients are complete; empty: the last


class Bucket(_Table, frozen=True):
    """Gradients that lie side by side in memory, in this order: what replicas reduce in one go."""

    dtype: str
    buffers: list[Name]


class Fingerprint(_Table, frozen=True):
    """What a machine must have to run this artifact. Compared part by part; each part says needs <= has."""

    format: Version
    device: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    torch: Annotated[list[int], Meta(min_length=2, max_length=3)]
    needs: dict[str, str | list[int | str]]  # what else the device's code needs; the device knows what it means
    options: dict[str, str | int | bool | list[str]]


class Weights(_Table, frozen=True):
    """Where the initial weights are: inside, in the file of this name beside the artifact, or nowhere."""

    where: Literal["inside", "separate", "none"]
    file: Annotated[str, Meta(pattern=r"^[^/\\]+$")] | None = None  # a plain name, never a path
    sha256: str | None = None  # of that file, as it was written


class Verification(_Table, frozen=True):
    """What one step beside eager PyTorch showed before the artifact was written."""

    note: str  # "on the example inputs", or why nothing was compared
    compared: bool
    retreats: list[str] = []  # what was given up to compute what the model computes


class Check(_Table, frozen=True):
    """A check of values in the model: where it is, and what the model says when it fails."""

    where: str
    text: str


class Skip(_Table, frozen=True):
    """A part of the model that a random number leaves out: which one, compared to what, and which others go with it."""

    site: Count  # of the number
    index: Count  # among those that are drawn there
    test: Literal["lt", "le", "gt", "ge"]
    limit: float
    called: bool  # the outcome with which the part is called
    first: Count  # the sites inside the part: from here
    last: Count  # up to here, which is not one of them
    dropouts: Count  # how many of them are dropouts with a probability of their own


class Signature(_Table, frozen=True):
    """One use of the weights, with its own shapes: training at some batch size, inference at another."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,60}$")]  # its batch size, unless it was given another name
    prefix: str  # of its own buffers: empty for the first signature, its name for the others
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
    checks: dict[Literal["fwd", "infer"], list[Check]] = {}  # check/fwd and check/infer have a number for each: NaN if it fails
    programs: dict[str, Name] = {}  # by role
    skips: list[Skip] = []

    def __post_init__(self) -> None:
        if self.prefix not in ("", self.name):
            raise ValueError(f"signature {self.name}: its prefix is neither empty nor its name")
        for found in (self.input_structure, self.output_structure, self.infer_structure):
            structure.check(found)
        if any(role not in ROLES and not re.fullmatch(PART, role) for role in self.programs):
            raise ValueError(f"signature {self.name}: programs have roles among {', '.join(ROLES)}, and parts of opt")
        if not set(self.losses) <= {o.name for o in self.outputs}:
            raise ValueError("a loss is not among the outputs")
        for what, arguments, shape in (
            ("input", self.inputs, self.input_structure),
            ("output", self.outputs[1:] if self.separate_loss else self.outputs, self.output_structure),
            ("inference output", self.infer_outputs, self.infer_structure),
        ):
            if len(structure.names(shape, "x")) != len(arguments):
                raise ValueError(f"the {what} structure and the {what} list differ in length")
        if self.num_model_inputs > len(self.inputs):
            raise ValueError("more model inputs than inputs")

    def buffer(self, kind: Kind, name: str) -> str:
        """The name of one of its own buffers."""
        return kind.of(name, self.prefix)

    @property
    def num_rows(self) -> int | None:
        """Rows of one whole step: the batch times the micro-batches; None where inputs have no batch."""
        dim = self.batch_dim
        sizes = [a.type.shape[dim] for a in self.inputs if len(a.type.shape) > dim] if dim is not None else []
        return sizes[0] * self.num_micro_batches if sizes else None


class Manifest(_Table, frozen=True):
    format: Version
    name: Name
    created: str  # ISO 8601, UTC
    producer: str
    signatures: Annotated[list[Signature], Meta(min_length=1, max_length=256)]  # over one set of weights and state
    precision: Literal["float32", "bfloat16"]
    num_replicas: Annotated[int, Meta(ge=1, le=2**20)]  # that it was compiled for; it runs with any number
    parameters: list[Parameter]
    groups: list[Group]
    hyperparameters: dict[str, float]
    programs: dict[str, Program]  # of all signatures
    native: list[Name]  # members below native/: what the device's backend has made
    buffers: dict[str, Tensor]
    buckets: list[Bucket]
    weights: Weights
    metadata: dict[str, Any]
    fingerprint: Fingerprint
    verification: Verification | None = None
    aliases: dict[str, str] = {}  # other names of a tensor in the model (tied weights) -> the name that it has here
    transient: list[str] = []  # buffers that the model's state_dict leaves out; their values are among the constants

    def __post_init__(self) -> None:
        """Every name that one part mentions is defined by another."""
        for name, program in self.programs.items():
            missing = [b for b in program.buffers if b not in self.buffers]
            if missing:
                raise ValueError(f"program {name} takes buffers that are not in the table: {missing[:5]}")
            if len(set(program.buffers)) != len(program.buffers):
                raise ValueError(f"program {name} takes a buffer twice")
            if not set(program.writes) <= set(program.buffers):
                raise ValueError(f"program {name} writes buffers that it does not take")
        for parameter in self.parameters:
            if Kind.PARAM.of(parameter.name) not in self.buffers:
                raise ValueError(f"parameter {parameter.name} has no buffer")
        known = {p.name for p in self.parameters}
        for group in self.groups:
            if not set(group.params) <= known:
                raise ValueError(f"group {group.prefix} has parameters that are not in the table")
        if (
            len({s.name for s in self.signatures}) != len(self.signatures)
            or [not s.prefix for s in self.signatures].count(True) != 1
        ):
            raise ValueError("two signatures have the same name or the same buffers")
        for signature in self.signatures:
            self._check_signature(signature)
        held = [b for bucket in self.buckets for b in bucket.buffers]
        if len(set(held)) != len(held) or not set(held) <= set(self.buffers):
            raise ValueError("a bucket holds a buffer twice, or one that is not in the table")

    def _check_signature(self, s: Signature) -> None:
        unknown = [p for p in s.programs.values() if p not in self.programs]
        if unknown:
            raise ValueError(f"signature {s.name} has programs that are not there: {unknown[:5]}")
        sections = {section for p in s.programs.values() for section in self.programs[p].sections}
        for kind, arguments in ((Kind.INPUT, s.inputs), (Kind.OUTPUT, s.outputs), (Kind.INFER, s.infer_outputs)):
            for argument in arguments:
                buffer = self.buffers.get(s.buffer(kind, argument.name))
                dense = TensorType.dense(argument.type.dtype, argument.type.shape)
                if buffer is not None and not buffer.type() == argument.type.type() == dense:
                    raise ValueError(f"{kind} {argument.name} and its buffer have different types, or are not dense")
                if buffer is None and ("infer" if kind == Kind.INFER else "fwd") in sections:
                    raise ValueError(f"{kind} {argument.name} has no buffer")
        for section, checks in s.checks.items():
            buffer = self.buffers.get(s.buffer(Kind.CHECK, section))
            if buffer is None or buffer.type() != TensorType.dense("float32", (len(checks),)):
                raise ValueError(f"the checks of {section} have no buffer, or not a number for each")

    @property
    def signature(self) -> Signature:
        """The first one: the step as it was given."""
        return self.signatures[0]

    def as_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Raises msgspec.ValidationError, with the place and the reason, or msgspec.DecodeError."""
        return _decoder.decode(text)


# Made at import, under its lock: where two threads are the first to decode a type, msgspec may read what is half made, and crash.
_decoder = msgspec.json.Decoder(Manifest)
