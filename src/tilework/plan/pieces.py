"""Cutting a program into pieces, so that code for what repeats is generated and compiled once.

The layers of a transformer, the steps of a recurrent network and the updates of hundreds of parameters are the same few lines
over and over. A stretch of the program's graph that repeats (repeats.py) becomes one piece, called with other buffers each time;
what lies between becomes a piece too; and updates that work element by element become one loop over all their parameters
(together.py). A small program in which little repeats is not cut.

A piece is a Graph like any other, with names that do not depend on where it is used. Values that cross from one piece to another
get memory of the program's; views of them (a transposed weight, a time step of the input) are made once, not by the pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ..artifact.graph import Graph, Node, Ref, TensorType
from ..artifact.names import Kind
from .gathered import Gathered, find_gathered, picked
from .layout import layouts_across
from .repeats import IN_PLACE, RANDOM, Listing, Segment
from .together import Updates, find_updates
from .views import View, find_views

ENOUGH = 100  # nodes that need no code of their own: with fewer, a program is not cut for their sake
_RANDOM_AT = "tilework.random_bits_at.default"
_NUMBER = TensorType("int64", (), ())


@dataclass(frozen=True)
class Call:
    piece: int
    values: tuple[str, ...]  # of the program, in the order of the piece's buffers


@dataclass
class Cut:
    """How a program is put together. Its values are its buffers, `temporaries`, `views` of both, and `numbers`."""

    graph: Graph
    pieces: list[Graph] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    updates: list[Updates] = field(default_factory=list)
    temporaries: dict[str, TensorType] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # sites of random numbers, which differ from call to call
    lifetimes: dict[str, tuple[int, int]] = field(default_factory=dict)  # of temporaries: first and last call; updates come last

    def base(self, value: str) -> str:
        return self.views[value].base if value in self.views else value

    def digest(self) -> str:
        """SHA-256 of how the program is put together; of what it computes there is its graph's."""
        text = [*(p.digest() for p in self.pieces), repr(self.calls), repr(self.updates), repr(self.views), repr(self.numbers)]
        return hashlib.sha256(" ".join(text).encode()).hexdigest()

    def __str__(self) -> str:
        loops = f", {sum(len(u.instances) for u in self.updates)} updates in {len(self.updates)} loops" if self.updates else ""
        return f"{len(self.calls)} calls of {len(self.pieces)} pieces{loops}"


def cut(graph: Graph, size: int) -> Cut | None:
    """The program in pieces, what does not repeat in pieces of about `size` nodes. None where little would be gained, or where it
    cannot be done."""
    graph = picked(graph)
    views = find_views(graph)
    across = layouts_across(graph, views)
    updates = find_updates(graph, views, across)
    by_updates = {name for u in updates for name in u.nodes}
    apart: set[str] = set()  # what is gathered within a stretch that repeats
    while True:
        changed, gathered = find_gathered(graph, views, across, by_updates | apart)
        listing = Listing(changed, views, {*by_updates, *gathered.wholes}, across)
        segments, repeated = listing.segments(size)
        if repeated + sum(len(u.nodes) for u in updates) < ENOUGH and len(listing.nodes) < 1.5 * size:
            return None
        segments, within = _divided(segments, listing, gathered)
        if not within:
            break
        apart |= within
    return _Cutting(listing, segments, updates, gathered).run()


def _divided(segments: Sequence[Segment], listing: Listing, gathered: Gathered) -> tuple[list[Segment], set[str]]:
    """The segments, none of which makes a part of something gathered and also reads the whole: a piece stores its results at its
    end. And what cannot be divided so, because the stretch repeats."""
    made = dict.fromkeys(gathered.wholes, 0)  # whole -> where its last part has been made
    for part, place in gathered.parts.items():
        made[place.base] = max(made[place.base], listing.position[part] + 1)
    read = {name: [i for i, n in enumerate(listing.nodes) if name in map(listing.base, n.refs())] for name in made}
    fences: set[int] = set()
    within = set()
    for segment in segments:
        both = {name for name, at in made.items() if segment.start < at and any(at <= i < segment.stop for i in read[name])}
        both &= {place.base for part, place in gathered.parts.items() if segment.start <= listing.position[part] < segment.stop}
        fences |= {made[name] for name in both}
        within |= both if segment.family >= 0 else set()
    found = []
    for segment in segments:
        cuts = [segment.start, *sorted(at for at in fences if segment.start < at < segment.stop), segment.stop]
        found += [replace(segment, start=a, stop=b) for a, b in pairwise(cuts)]
    return found, within


class _Cutting:
    def __init__(self, listing: Listing, segments: Sequence[Segment], updates: list[Updates], gathered: Gathered) -> None:
        self.listing, self.segments, self.updates, self.gathered = listing, segments, updates, gathered
        self.graph, self.made, self.nodes, self.position = listing.graph, listing.made, listing.nodes, listing.position
        self.segment_of = {i: s for s, segment in enumerate(segments) for i in range(segment.start, segment.stop)}
        self.crossing = self._crossing()
        self.bound: dict[str, str] = {}  # values that lie in their buffer from the start
        self.inside: dict[int, dict[str, str]] = {}  # segment -> buffer -> value that its own piece stores there
        self.late: list[tuple[str, str]] = []  # what is stored when all pieces are done: somebody reads what was there until then
        self.result = Cut(self.graph)

    def run(self) -> Cut | None:
        if not self._arrange_writes():
            return None
        forms: dict[int, tuple[int, _Form]] = {}
        for s, segment in enumerate(self.segments):
            if segment.family < 0 or segment.family not in forms:
                alike = [other for other in self.segments if other.family == segment.family] if segment.family >= 0 else [segment]
                form = self._form(alike, self.inside.get(s, {}))
                forms[segment.family] = (len(self.result.pieces), form)
                self.result.pieces.append(form.graph)
            index, form = forms[segment.family]
            self.result.calls.append(Call(index, self._values(segment, form)))
        if self.late:
            self._store()
        self.result.updates = [u.with_values(self._value) for u in self.updates]
        self._find_lifetimes()
        return self.result if self._is_in_order() else None

    # ---- what crosses, and what is written ----

    def _crossing(self) -> set[str]:
        """Nodes whose results are used outside their segment: elsewhere, by updates, or by the program's writes."""
        found = set()
        for i, node in enumerate(self.nodes):
            for ref in node.refs():
                base = self.listing.base(ref)
                if base in self.position and self.segment_of[self.position[base]] != self.segment_of[i]:
                    found.add(base)
        found |= {self.listing.base(name) for u in self.updates for name in u.inputs()}
        found |= {self.listing.base(value) for _, value in self.graph.writes}
        return (found | set(self.gathered.parts)) & set(self.position)

    def _arrange_writes(self) -> bool:
        """Decides how each write of the program is done. False: there is no way."""
        last_read: dict[str, int] = {}  # buffer -> segment
        through_view: set[tuple[str, int]] = set()
        for i, node in enumerate(self.nodes):
            for ref in node.refs():
                base = self.listing.base(ref)
                if self.listing.is_buffer(base):
                    last_read[base] = max(last_read.get(base, -1), self.segment_of[i])
                    if base != ref:
                        through_view.add((base, self.segment_of[i]))
        for _, value in self.graph.writes:
            base = self.listing.base(value)
            if self.listing.is_buffer(base):  # copied to another buffer, at the end
                last_read[base] = len(self.segments)
        by_updates = {buffer for u in self.updates for buffer in u.writes()}
        read_by_updates = {self.listing.base(name) for u in self.updates for name in u.inputs()}
        for buffer, value in self.graph.writes:
            if buffer in by_updates:
                continue
            if buffer in read_by_updates:  # they come last, and must see what was there before
                return False
            at = self.segment_of[self.position[value]] if value in self.position else len(self.segments)
            read = last_read.get(buffer, -1)
            alone = at < len(self.segments) and self.segments[at].family < 0 and (buffer, at) not in through_view
            if (
                read < at < len(self.segments)
                and self.listing.type(value) == self.graph.types[buffer]
                and value not in self.bound
            ):
                self.bound[value] = buffer
            elif alone and read == at and value not in self.inside.get(at, {}).values():
                self.inside.setdefault(at, {})[buffer] = value
            else:
                self.late.append((buffer, value))
        stored = {value for values in self.inside.values() for value in values.values()}
        used = {ref for n in self.nodes for ref in n.refs()}
        return all(n.name in stored and n.name not in used for n in self.nodes if n.op == IN_PLACE)

    # ---- pieces ----

    def _form(self, alike: Sequence[Segment], inside: dict[str, str]) -> _Form:
        """The piece for segments that are the same."""
        first = alike[0]
        form = _Form()
        slots = self._slots(alike)
        rename: dict[str, str] = {}
        nodes: list[Node] = []
        reads: dict[str, TensorType] = {}
        where = {buffer: f"in/{slots[slot]}" for slot, buffer in self._whole_buffers(first) if buffer in inside}

        def internal(name: str) -> str:
            """The name of a value of this segment, or of a view of one: the way from the base to the view is repeated here."""
            if name not in rename:
                copied = self.made[name].map_refs(internal)
                rename[name] = f"v{len(nodes)}"
                nodes.append(replace(copied, name=rename[name]))
            return rename[name]

        for i in range(first.start, first.stop):
            node = self.nodes[i]
            args, kwargs = node.args, node.kwargs
            if node.op == RANDOM:
                name = f"in/{slots[i - first.start, 'site']}"
                reads[name] = _NUMBER
                form.inputs[name] = (i - first.start, "site")
            for k, ref in enumerate(node.refs()):
                if self._is_inside(ref, first):
                    internal(ref)
                else:
                    name = f"in/{slots[i - first.start, k]}"
                    reads.setdefault(name, self.listing.type(ref))
                    form.inputs.setdefault(name, (i - first.start, k))
            counter = iter(range(len(node.refs())))

            def mapped(v: Any, i: int = i, counter: Any = counter) -> Any:
                if isinstance(v, Ref):
                    k = next(counter)
                    return Ref(rename[v.name] if self._is_inside(v.name, first) else f"in/{slots[i - first.start, k]}")
                if isinstance(v, dict):
                    return {key: mapped(x) for key, x in v.items()}
                if isinstance(v, (list, tuple)):
                    return type(v)(mapped(x) for x in v)
                return v

            args, kwargs = mapped(args), mapped(kwargs)
            new = f"v{len(nodes)}"
            if node.op == RANDOM:
                site = f"in/{slots[i - first.start, 'site']}"
                nodes.append(replace(node, name=new, op=_RANDOM_AT, args=(args[0], args[1], Ref(site))))
            else:
                nodes.append(replace(node, name=new, args=args, kwargs=kwargs))
            rename[node.name] = new
        writes: list[tuple[str, str]] = []
        types = dict(reads)
        for j in range(first.stop - first.start):
            if any(self.nodes[segment.start + j].name in self.crossing for segment in alike):
                node = self.nodes[first.start + j]
                only_inside = node.name in inside.values() and not self._needed_beyond(node.name)
                if not only_inside:
                    name = Kind.SAVED.of(str(j))
                    writes.append((name, rename[node.name]))
                    types[name] = self.listing.type(node.name)
                    form.outputs[name] = j
        for buffer, value in inside.items():
            writes.append((where[buffer], internal(value) if value in self.made else where[value]))
        form.graph = Graph("piece", tuple(reads), tuple(nodes), tuple(writes), types)
        form.graph.verify()
        return form

    def _needed_beyond(self, name: str) -> bool:
        """Whether another segment or an update uses a value that its own segment stores."""
        own = self.segment_of[self.position[name]]
        used = any(self.listing.base(r) == name and self.segment_of[i] != own for i, n in enumerate(self.nodes) for r in n.refs())
        by_update = any(self.listing.base(value) == name for u in self.updates for value in u.inputs())
        return used or by_update or sum(self.listing.base(v) == name for _, v in self.graph.writes) > 1

    def _is_inside(self, ref: str, segment: Segment) -> bool:
        return segment.start <= self.position.get(self.listing.base(ref), -1) < segment.stop

    def _whole_buffers(self, segment: Segment) -> Iterable[tuple[Any, str]]:
        for i in range(segment.start, segment.stop):
            for k, ref in enumerate(self.nodes[i].refs()):
                if ref in self.graph.types and ref not in self.made:
                    yield (i - segment.start, k), ref

    def _slots(self, alike: Sequence[Segment]) -> dict[Any, int]:
        """(node, which of its references) -> number of the piece's input. Two share one if they do in every segment."""
        known: dict[Any, int] = {}
        found: dict[Any, int] = {}
        first = alike[0]
        for j in range(first.stop - first.start):
            here = [self.nodes[s.start + j] for s in alike]
            refs = [n.refs() for n in here]
            for k in range(len(refs[0])):
                if not self._is_inside(refs[0][k], first):
                    found[j, k] = known.setdefault(tuple(r[k] for r in refs), len(known))
            if here[0].op == RANDOM:
                found[j, "site"] = known.setdefault(("site", *(n.args[2] for n in here)), len(known))
        return found

    def _values(self, segment: Segment, form: _Form) -> tuple[str, ...]:
        values = []
        for buffer in form.graph.buffers:
            if buffer in form.outputs:
                values.append(self._value(self.nodes[segment.start + form.outputs[buffer]].name))
                continue
            j, k = form.inputs[buffer]
            node = self.nodes[segment.start + j]
            if k == "site":
                values.append(f"site {node.args[2]}")
                self.result.numbers[values[-1]] = node.args[2]
            else:
                values.append(self._value(node.refs()[k]))
        return tuple(values)

    def _value(self, name: str) -> str:
        """The value of the program behind a name of the graph."""
        view = self.listing.views.get(name) or self.gathered.parts.get(name)
        if view is not None:
            base = self._value(view.base)
            outer = self.result.views.get(base)
            start = (outer.base, outer.offset) if outer else (base, 0)
            self.result.views[name] = View(start[0], view.type, start[1] + view.offset)
        elif name in self.bound:
            return self.bound[name]
        elif name in self.made:
            self.result.temporaries[name] = self.listing.type(name)
        return name

    def _store(self) -> None:
        """A last piece that stores what could not be stored before."""
        sources = {value: f"in/{i}" for i, value in enumerate(dict.fromkeys(value for _, value in self.late))}
        targets = {f"out/{i}": buffer for i, (buffer, _) in enumerate(self.late)}
        types = {name: self.listing.type(value) for value, name in sources.items()}
        types |= {name: self.graph.types[buffer] for name, buffer in targets.items()}
        writes = tuple((name, sources[value]) for name, (_, value) in zip(targets, self.late, strict=True))
        graph = Graph("piece", tuple(sources.values()), (), writes, types)
        value_of = targets | {name: self._value(value) for value, name in sources.items()}
        self.result.calls.append(Call(len(self.result.pieces), tuple(value_of[b] for b in graph.buffers)))
        self.result.pieces.append(graph)

    def _find_lifetimes(self) -> None:
        result = self.result
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for at, call in enumerate(result.calls):
            for value in map(result.base, call.values):
                first.setdefault(value, at)
                last[value] = at
        for update in result.updates:
            last |= {result.base(value): len(result.calls) for value in update.inputs()}
        result.lifetimes = {value: (first[value], last[value]) for value in result.temporaries}

    def _is_in_order(self) -> bool:
        """Whether no piece reads memory that it also writes under another name, or that was written before its time: a last look
        at the whole, whatever was decided above."""
        result, own = self.result, set(self.graph.buffers)
        written: set[str] = set()
        for call in result.calls:
            graph = result.pieces[call.piece]
            value = dict(zip(graph.buffers, call.values, strict=True))
            now = [value[b] for b in graph.buffers if b in graph.written]
            seen = [value[b] for b in graph.reads if b not in graph.written]
            read = set(map(result.base, seen))
            values_of_buffers = set(self.bound.values())
            if len(set(now)) < len(now) or read & set(now) or (read & written & own) - values_of_buffers:
                return False
            if any(self._meet(a, b) for a in now if a in self.gathered.parts for b in seen):
                return False
            written |= set(now)
        return True

    def _meet(self, part: str, other: str) -> bool:
        """Whether another value lies where a part of something gathered does."""
        place = self.result.views[part]
        if self.result.base(other) != place.base:
            return False
        view = self.result.views.get(other)
        return view is None or (view.offset < place.offset + place.type.extent and place.offset < view.offset + view.type.extent)


@dataclass
class _Form:
    """A piece, and where its buffers come from: (node, which of its references) for inputs, node for outputs."""

    graph: Graph = field(default_factory=lambda: Graph("piece", (), (), ()))
    inputs: dict[str, tuple[int, Any]] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
