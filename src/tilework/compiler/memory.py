"""Where a program's temporaries lie: their lifetimes are read from the generated code, and places are planned once.

Inductor's code allocates every temporary in every step and frees it as early as it can. Here each gets a place in one block
of memory that the program keeps; two share a place if their lifetimes do not meet. With TILEWORK_OWN_TEMPORARIES=1 each is an
allocation of its own instead, of exactly its size: AddressSanitizer then sees a kernel that leaves its temporary.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

_ARRAY = re.compile(r"static constexpr int64_t (\w+)\[\] = \{([^}]*)\};")
_ALLOCATION = re.compile(
    r"^ *AtenTensorHandle (\w+)_handle;\n"
    r" *AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_empty_strided\((\d+), (\w+), (\w+), cached_torch_dtype_(\w+), "
    r"cached_torch_device_type_cpu, 0, &\1_handle\)\);\n"
    r" *RAIIAtenTensorHandle \1\(\1_handle\);$",
    re.M,
)
_NAMED = re.compile(
    r"^ *(?:const )?(?:auto|RAIIAtenTensorHandle|AtenTensorHandle|std::array<\w+, \d+>) (\w+)(?:\[\])?(?: = |\(|\{)(.*)$", re.M
)
_RETURNED = re.compile(r"^ *AOTI_TORCH_ERROR_CODE_CHECK\((\w+)\((.*), &(\w+)_handle\)\);$", re.M)
_FRESH = re.compile(r"convolution|attention|_conv|linear|mkldnn")  # library calls whose results are memory of their own
_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
          "int16": 2, "int8": 1, "uint8": 1, "bool": 1}  # fmt: skip
_LINE = 64  # bytes: places begin at cache lines


@dataclass
class Place:
    name: str
    size: int  # bytes
    first: int  # lifetime: positions in the text
    last: int
    offset: int = 0


def own_temporaries() -> bool:
    """Whether every temporary is to be an allocation of its own. Decided when code is generated; part of the cache key."""
    return os.environ.get("TILEWORK_OWN_TEMPORARIES", "0") not in ("", "0")


# Every line of a generated body is of one of these forms; lifetimes and shared memory are read from them. A line of another form
# might hold on to memory in a way that is not known here.
_FORMS = re.compile(
    r"|".join(
        [
            r"", r"//.*", r"[{}]",
            r"const tilework::Borrowed& \w+ = workspace\.borrowed\[\d+\];",
            r"static constexpr int64_t \w+\[\] = \{[^}]*\};", r"static constexpr int64_t \*\w+=nullptr;",
            r"(?:int32_t|int64_t|double|bool) \w+ = [\w.+-]+;",
            r"AtenTensorHandle \w+;", r"RAIIAtenTensorHandle \w+\(\w+\);",
            r"AOTI_TORCH_ERROR_CODE_CHECK\(.*\);",
            r"auto \w+ = (?:wrap_with_raii_handle_if_needed|std::move|reinterpret_tensor_wrapper)\(.*\);"
            r"(?: \w+\.reset\(\);)?(?:  // .*)?",
            r"\w+\.reset\(\);", r"\w*cpp_fused_\w+\(.*\);", r"tilework::[\w<>:{}, -]+\(.*\);",
            r"(?:const )?AtenTensorHandle \w+\[\] = \{.*\};", r"std::array<\w+, \d+> \w+\{.*\};",
            r"RAIIAtenTensorHandle \w+ = .*;",
        ]
    )
)  # fmt: skip


def unknown_form(body: str) -> str | None:
    """The first line that is of no known form."""
    return next((line.strip() for line in body.splitlines() if not _FORMS.fullmatch(line.strip())), None)


def plan_temporaries(body: str, declarations: str, own: bool = False) -> tuple[str, int, int]:
    """The body with its allocations replaced, how many there were, and how many bytes they need together. `own`: each is
    replaced by an allocation of its own, and together they need nothing."""
    arrays = {name: [int(v.strip().rstrip("L")) for v in values.split(",") if v.strip()]
              for name, values in _ARRAY.findall(declarations + body)}  # fmt: skip
    found = []
    for match in _ALLOCATION.finditer(body):
        name, dims, shape, stride, dtype = match.groups()
        known = int(dims) == 0 or (shape in arrays and stride in arrays)
        if known and dtype in _BYTES and f"{name}.release()" not in body:
            found.append((match, _size(arrays.get(shape, []), arrays.get(stride, []), int(dims), _BYTES[dtype])))
    ends = _last_uses(body, [match.group(1) for match, _ in found])
    places = [Place(m.group(1), whole_lines(size), m.start(), ends[m.group(1)]) for m, size in found]
    total = 0 if own else arrange(places)
    numbers = [size for _, size in found] if own else [p.offset for p in places]
    known_as = {p.name: (i, number) for i, (p, number) in enumerate(zip(places, numbers, strict=True))}
    method = "own_temporary" if own else "temporary"

    def replacement(match: re.Match[str]) -> str:
        name, dims, shape, stride, dtype = match.groups()
        if name not in known_as:
            return match.group(0)
        index, number = known_as[name]
        at = f"{index}, {number}, {dims}, {shape}, {stride}, cached_torch_dtype_{dtype}"
        return f"    tilework::Temporary {name} = workspace.{method}({at});"

    return _ALLOCATION.sub(replacement, body), len(places), total


def _size(shape: list[int], stride: list[int], dims: int, bytes_each: int) -> int:
    shape, stride = shape[:dims], stride[:dims]
    if 0 in shape:
        return 0
    return bytes_each * (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))


def whole_lines(size: int) -> int:
    """Bytes of whole cache lines, at least one."""
    return max(1, math.ceil(size / _LINE)) * _LINE


def _links(body: str) -> list[tuple[str, set[str]]]:
    """(new name, names that it is made from), in the order of the text: all that may share memory."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"\b\w+\b", text))

    links = [(m.start(), m.group(1), words(m.group(2))) for m in _NAMED.finditer(body)]
    links += [(m.start(), m.group(3), words(m.group(2))) for m in _RETURNED.finditer(body) if not _FRESH.search(m.group(1))]
    return [(new, sources) for _, new, sources in sorted(links)]


def families(body: str) -> dict[str, str]:
    """Name of a tensor -> one name for all that may share its memory. Names that are not here share with nobody."""
    head: dict[str, str] = {}

    def find(name: str) -> str:
        while head.get(name, name) != name:
            name = head[name]
        return name

    tensors = {name for name, _ in _links(body)} | set(re.findall(r"\b(?:arg|buf)\w+\b", body))
    for new, sources in _links(body):
        for source in sources & tensors:
            head[find(new)] = find(source)
    return {name: find(name) for name in tensors}


def _last_uses(body: str, names: list[str]) -> dict[str, int]:
    """Position of the last mention of each temporary, or of anything that may share its memory."""
    shares: dict[str, set[str]] = {name: {name} for name in names}
    mentions: dict[str, int] = {}
    for m in re.finditer(r"\b\w+\b", body):
        mentions[m.group(0)] = m.start()
    for new, sources in _links(body):  # in the order of the text, so chains are followed
        for family in shares.values():
            if family & sources:
                family.add(new)
    return {name: max(mentions.get(n, 0) for n in family) for name, family in shares.items()}


def arrange(places: list[Place]) -> int:
    """Gives every place its offset, the largest first, each as low as its lifetime allows. Returns the total size."""
    done: list[Place] = []
    for place in sorted(places, key=lambda p: (-p.size, p.first)):
        offset = 0
        for other in sorted((p for p in done if p.first <= place.last and place.first <= p.last), key=lambda p: p.offset):
            if other.offset - offset >= place.size:
                break
            offset = max(offset, other.offset + other.size)
        place.offset = offset
        done.append(place)
    return max((p.offset + p.size for p in places), default=0)
