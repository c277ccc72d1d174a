"""Compares two records of values: which one parts first, in the order in which a step computes them.

A module is recorded when it ends, so the modules within it come before it. Hence the first record that differs names
the place: the module itself if its inputs are equal, else the operations of the module around it, between two modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright._types import VALUES_FILE, JSONObject, counted
from trainwright.capabilities.recorded_values.fingerprint import MODULUS, NUM_SKETCHES, distance, only_place
from trainwright.errors import ArgumentError, DataError
from trainwright.support.door import parse_json, parse_number, parse_step, without_halves

SHARED = ("weight", "clipped", "optimizer", "update")  # the same in runs of different numbers of processes
PASSES = ("forward", "loss", "backward", "gradient", "clipped", "optimizer", "update")  # void after a rewind
MOST_NAMED = 4
MAX_LINE = 1 << 26  # bytes of a record: a batch has the names of its samples
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON has not
CAUSES = ("random", "data", "weights", "optimizer")  # they are no consequence of values before
WORDS = {
    "begin": "random",
    "data": "data",
    "weight": "weights",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "gradient": "gradient",
    "clipped": "gradient",
    "optimizer": "optimizer",
    "update": "update",
    "prediction": "prediction",
}


class Key(NamedTuple):
    """Place of a record in a run."""

    step: int
    micro_batch: int
    phase: str
    name: str  # module or parameter; empty for the model itself
    call: int  # counts the calls of a module in a micro-batch, from 0
    part: str = ""  # the output of a module that a gradient belongs to


Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record of one process."""

    settings: JSONObject
    num_processes: int
    records: dict[Key, Record] = field(repr=False)

    @property
    def steps(self) -> set[int]:
        return {key.step for key in self.records}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A value in which two runs differ.

    Attributes:
        step: from 1.
        micro_batch: of the step, from 0.
        phase: random, data, weights, forward, loss, backward, gradient, optimizer, update or prediction.
        name: of the module or parameter; empty for the model itself, and for other values.
        kind: class of the module in both runs, or of the optimizer; empty for others.
        text: the difference, as a sentence.
        distance: norm of the difference relative to the larger norm of both, estimated; None if it has none.
        rank: process.
    """

    step: int
    micro_batch: int
    phase: str
    name: str
    kind: str
    text: str
    distance: float | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesReport:
    """Where the values of two runs part.

    Attributes:
        first: the first value that differs; None if all are the same.
        others: the first one of each later phase of that step.
        settings: facts about the runs that differ: name -> both values.
        steps: steps that both have recorded.
        num_compared: records compared before the first parting, or in all.
        notes: parts that were skipped, or compared in another way.
    """

    first: Divergence | None
    others: tuple[Divergence, ...]
    settings: dict[str, tuple[Any, Any]]
    steps: tuple[int, ...]
    num_compared: int
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Returns True if no value differs."""
        return self.first is None

    def to_dict(self) -> JSONObject:
        """Returns plain values, for JSON."""
        return {"is_same": self.is_same, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report for the console."""
        steps = ", ".join(map(str, self.steps))
        if self.first is None:
            yield f"{'same':<10}{counted(self.num_compared, 'record')} of step {steps}"
        else:
            yield f"{'parts':<10}{_where(self.first)}"
            yield f"{self.first.phase:<10}{self.first.text}"
            causes = [one for one in self.others if one.phase in CAUSES]
            for cause in causes:
                yield f"{cause.phase:<10}{cause.text}"
            if effects := [one.phase for one in self.others if one not in causes]:
                yield f"{'then':<10}{', '.join(effects)} of the same step"
        for name, (one, other) in self.settings.items():
            yield f"{'setting':<10}{name}: {one} | {other}"
        for note in self.notes:
            yield f"{'note':<10}{note}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _where(one: Divergence) -> str:
    rank = f", process {one.rank}" if one.rank else ""
    if one.phase in ("weights", "random"):
        return f"before step {one.step}{rank}"
    micro = f", micro-batch {one.micro_batch}" if one.phase in ("data", "forward", "loss", "backward") else ""
    return f"step {one.step}{micro}{rank}"


def values_file(folder: str | Path, rank: int) -> Path:
    """Returns the file with the records of a process."""
    return Path(folder) / f"values-rank{rank}.jsonl"


def read_values(folder: Path) -> dict[int, Recorded]:
    """Returns the records of a run, by process.

    Raises:
        ArgumentError: the run has recorded none.
        DataError: a file is damaged.
    """
    found = {int(match[1]): path for path in folder.glob("*.jsonl") if (match := VALUES_FILE.match(path.name))}
    if not found:
        raise ArgumentError(
            f"{folder} has no values-rank0.jsonl. Train with record_values=2, which records the values of the first "
            "two steps, and name the output directory."
        )
    return {rank: _read(path) for rank, path in sorted(found.items())}


def _read(path: Path) -> Recorded:
    about: Record = {}
    records: dict[Key, Record] = {}
    calls: dict[Key, int] = {}  # of places that are there more than once
    for number, line in enumerate(_lines(path), 1):
        try:
            key, one = _parse(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if not line.endswith(b"\n") and len(line) < MAX_LINE:  # the process was killed while it wrote
                break
            raise DataError(f"{path}:{number} is not a line of recorded values ({error}). Record them again.") from None
        if key.phase == "run":
            about = one.get("facts", {})
            continue
        if key.phase == "begin":  # a step that a resumed run trains again
            records = {old: value for old, value in records.items() if old.step != key.step}
        if key.phase == "rewound":
            records = {o: v for o, v in records.items() if o.step != key.step or o.phase not in PASSES}
            continue
        if key in records:  # a parameter that got gradients twice in a backward pass
            first = key
            while key in records:
                calls[first] = max(calls.get(first, first.call), first.call) + 1
                key = first._replace(call=calls[first])
        records[key] = one
    return Recorded(about.get("settings", {}), about.get("num_processes", 1), records)


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file; DataError if it is a pipe or a device."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file, so it has no recorded values.")
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE):
            yield line


def _parse(line: bytes) -> tuple[Key, Record]:
    """Returns the place and the content of a record; ValueError, KeyError or TypeError if a value has another form."""
    one = without_halves(parse_json(line))
    place = Key(one["step"], one["micro_batch"], one["phase"], one["name"], one.get("call", 0), one.get("part", ""))
    for number in (place.step, place.micro_batch, place.call):
        parse_step(number)
    if place.phase not in (*WORDS, "run", "rewound") or not all(
        isinstance(text, str) for text in (place.name, place.part, one.get("kind", ""))
    ):
        raise ValueError("a name or a phase is none")
    for part in ("given", "values"):
        for tensor in one.get(part, {}).values():
            _check_tensor(tensor)
    facts = one.get("facts", {})
    for name in ("samples", "rows") if place.phase == "data" else ():
        names = facts.get(name, [])
        if not isinstance(names, list) or not all(isinstance(text, str) for text in names):
            raise ValueError(f"{name} have a wrong form")
    if not isinstance(facts.get("settings", {}), dict):
        raise TypeError("the settings have a wrong form")
    parse_step(facts.get("num_processes", 1))
    return place, one


def _check_tensor(tensor: Record) -> None:
    """Raises ValueError, KeyError or TypeError if an object is not the fingerprint of a tensor."""
    if not isinstance(getattr(torch, tensor["dtype"], None), torch.dtype) or not isinstance(tensor["hash"], str):
        raise ValueError("a type or a hash is none")
    for size in tensor["shape"]:
        parse_step(size)
    if "sketch" in tensor:
        for value in (*tensor["sketch"], tensor["norm"]):
            parse_number(0.0 if value in NOT_FINITE else value)
        if len(tensor["sketch"]) != NUM_SKETCHES:
            raise ValueError("a sketch has another length")
    sums = tensor.get("sums", (0, 0, 0))
    if len(sums) != 3 or not all(type(value) is int and 0 <= value < MODULUS for value in sums):
        raise ValueError("the sums are not three numbers")


def compare_values(
    ones: Mapping[int, Recorded], others: Mapping[int, Recorded], *, tolerance: float | None = None
) -> ValuesReport:
    """Compares the records of two runs, by process.

    Args:
        ones: the first run's, from `read_values`.
        others: the second run's.
        tolerance: difference of a tensor, relative to its norm, that counts as none; types may differ then. None: all
            bits must be the same.

    Raises:
        ArgumentError: they have no step in common.
    """
    one = next(iter(ones.values()))
    other = next(iter(others.values()))
    steps = sorted(one.steps & other.steps)
    if not steps:
        raise ArgumentError(
            f"The runs have no recorded step in common: {_listed(one.steps)} and {_listed(other.steps)}. Record the "
            "same steps: record_values='1-2'."
        )
    notes = []
    phases: tuple[str, ...] = tuple(WORDS)
    ranks = sorted(ones.keys() & others.keys())
    if one.num_processes != other.num_processes:
        phases = SHARED
        ranks = ranks[:1]
        notes.append(
            f"{one.num_processes} and {other.num_processes} processes: compared are weights, gradients of the update, "
            "and optimizer."
        )
    compared = [
        _Pair(_select_steps(ones[rank], steps, phases), _select_steps(others[rank], steps, phases), rank, tolerance)
        for rank in ranks
    ]
    found = [pair.partings() for pair in compared]
    partings = min((one for one in found if one), key=lambda one: _place(one[0]), default=[])
    differing_types = next((pair.types for pair in compared if pair.types), "")
    if differing_types:
        notes.append(f"{differing_types}; compared by a tolerance of {tolerance:g}.")
    names = [*dict.fromkeys([*one.settings, *other.settings])]
    both = {name: (one.settings.get(name), other.settings.get(name)) for name in names}
    return ValuesReport(
        first=partings[0] if partings else None,
        others=tuple(partings[1:]),
        settings={name: pair for name, pair in both.items() if pair[0] != pair[1]},
        steps=tuple(steps),
        num_compared=sum(pair.num_compared for pair in compared),
        notes=tuple(notes),
    )


def _select_steps(recorded: Recorded, steps: Sequence[int], phases: Sequence[str]) -> dict[Key, Record]:
    first = steps[0]
    return {
        key: one
        for key, one in recorded.records.items()
        if key.step in steps and key.phase in phases and (key.phase != "weight" or key.step == first)
    }


def _place(one: Divergence) -> tuple[int, int, int]:
    return one.step, one.micro_batch, list(dict.fromkeys(WORDS.values())).index(one.phase)


def _listed(values: Iterable[object]) -> str:
    texts = [str(value) for value in sorted(values, key=str)]
    return ", ".join(texts[:MOST_NAMED]) + (f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else "")


@dataclass(slots=True)
class _Pair:
    """Two records of the same process."""

    ones: dict[Key, Record]
    others: dict[Key, Record]
    rank: int
    tolerance: float | None
    num_compared: int = 0
    types: str = ""  # the first types that differ and are compared all the same

    def partings(self) -> list[Divergence]:
        """Returns the first parting, and the first one of each other phase of its step."""
        found: list[Divergence] = []
        phases: set[str] = set()
        for key in self._merged():
            if found and key.step != found[0].step:
                break
            if WORDS[key.phase] in phases or (gaps := self._gaps(key)) is None:
                self.num_compared += not found
                continue
            phases.add(WORDS[key.phase])
            found.append(self._parting(key, gaps))
        return found

    def _merged(self) -> list[Key]:
        """Returns the keys of both in the order of the first; keys of the second alone follow the key before them."""
        following: dict[Key | None, list[Key]] = {}
        before: Key | None = None
        for key in self.others:
            if key in self.ones:
                before = key
            else:
                following.setdefault(before, []).append(key)
        merged = list(following.get(None, ()))
        for key in self.ones:
            merged += [key, *following.get(key, ())]
        return merged

    def _gaps(self, key: Key) -> list[tuple[str, str, Record | None, Record | None]] | None:
        """Returns the differences at a key, as part (given, values, facts), name and both values; None if equal."""
        one = self.ones.get(key)
        other = self.others.get(key)
        if one is None or other is None:
            # An output, such as attention weights, may be there in one run only and change nothing.
            return None if key.phase == "backward" else [("record", "", one, other)]
        gaps = []
        for part in ("given", "values"):
            mine = one.get(part, {})
            theirs = other.get(part, {})
            for name in dict.fromkeys([*mine, *theirs]):
                a = mine.get(name)
                b = theirs.get(name)
                if a is None or b is None:
                    if key.phase in (
                        "data",
                        "prediction",
                    ):  # elsewhere, a mask or weights of attention may change nothing
                        gaps.append((part, name, a, b))
                elif not self._is_same(a, b, key):
                    gaps.append((part, name, a, b))
        mine = one.get("facts", {})
        theirs = other.get("facts", {})
        gaps += [("facts", name, mine.get(name), theirs.get(name)) for name in self._facts_apart(mine, theirs)]
        return gaps or None

    def _facts_apart(self, mine: Record, theirs: Record) -> Iterator[str]:
        for name in dict.fromkeys([*mine, *theirs]):
            a = mine.get(name)
            b = theirs.get(name)
            allowed = self.tolerance or 0.0
            is_near = isinstance(a, float) and isinstance(b, float) and abs(a - b) <= allowed * max(abs(a), abs(b))
            if a != b and not is_near:
                yield name

    def _is_same(self, one: Record, other: Record, key: Key) -> bool:
        if one["hash"] == other["hash"] and one["dtype"] == other["dtype"] and one["shape"] == other["shape"]:
            return True
        if self.tolerance is None or not distance(one, other) <= self.tolerance:
            return False
        if one["dtype"] != other["dtype"] and not self.types:
            self.types = f"From {key.name or 'the ' + WORDS[key.phase]} on, {one['dtype']} and {other['dtype']}"
        return True

    def _parting(self, key: Key, gaps: list[tuple[str, str, Any, Any]]) -> Divergence:
        name, kind, text = self._described(key, gaps)
        tensors = [(a, b) for part, _, a, b in gaps if part in ("given", "values") and a and b]
        return Divergence(
            step=key.step,
            micro_batch=key.micro_batch,
            phase=WORDS[key.phase],
            name=name,
            kind=kind,
            text=text,
            distance=distance(*tensors[0]) if tensors and key.phase != "data" else None,
            rank=self.rank,
        )

    def _described(self, key: Key, gaps: list[tuple[str, str, Any, Any]]) -> tuple[str, str, str]:
        """Returns the place of a parting, its class, and the difference."""
        part, _, one, other = gaps[0]
        if part == "record":
            side = "first" if other is None else "second"
            what = "a gradient of " if key.phase in ("gradient", "clipped") else ""
            return key.name, self._kind(key), f"only the {side} run has {what}{_title(key.name, self._kind(key))}"
        if key.phase == "begin":
            return (
                "",
                "",
                f"states of the generators differ ({', '.join(gap[1] for gap in gaps)}): the seed, or draws before",
            )
        if key.phase == "data":
            return "", "", self._data(key, gaps)
        if key.phase == "prediction" and part == "values":
            return "", "", f"{gaps[0][1]}, after step {key.step}: {_gap(one, other)}"
        if key.phase in ("weight", "update", "gradient"):
            return key.name, "", self._describe_parameters(key, gaps[0])
        if part == "facts":
            texts = [f"{name} {_number(a)} against {_number(b)}" for _, name, a, b in gaps]
            return "", self._kind(key), ", ".join(texts[:MOST_NAMED])
        if key.phase == "forward":
            return self._forward(key, gaps)
        if key.phase == "backward":
            named = _title(key.name, self._kind(key))
            after = self._before(key, "backward")
            since = "" if after is None else f"; that of {_title(after.name, self._kind(after))}, before it, does not"
            return (
                key.name,
                self._kind(key),
                f"the gradient of the output of {named} differs{since}: {_gap(one, other)}",
            )
        if key.phase == "clipped":
            return key.name, "", f"{key.name}, after averaging and clipping: {_gap(one, other)}"
        return key.name, "", f"the modules are the same, and {key.phase} is not: {_gap(one, other)}"

    def _data(self, key: Key, gaps: list[tuple[str, str, Any, Any]]) -> str:
        facts = {name: (a or [], b or []) for part, name, a, b in gaps if part == "facts"}
        if "samples" in facts:
            mine, theirs = (self._find_samples(run, key.step, "samples") for run in (self.ones, self.others))
            one, other = facts["samples"]
            if sorted(mine) != sorted(theirs):
                what = "other samples"
            elif len(one) != len(other):
                what = f"the same samples in batches of another size ({len(one)} against {len(other)})"
            else:
                what = "the same samples in another order"
            return f"{what}: {_some(one)} against {_some(other)}"
        if "rows" in facts:
            one, other = facts["rows"]
            row = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
            samples = self.ones[key].get("facts", {}).get("samples") or []
            named = f" (first: {samples[row]}, row {row})" if row < len(samples) else f" (first: row {row})"
            mine, theirs = (self._find_samples(run, None, "rows") for run in (self.ones, self.others))
            if set(theirs) & set(mine):
                return f"the rows of the data are in another order, or other rows{named}"
            return f"the samples have the same names, and other content: changed rows, tokenizer or collator{named}"
        names = ", ".join(gap[1] for gap in gaps[:MOST_NAMED])
        return f"the same samples, and another {names}: tokenizer, collator, or rows that have changed"

    def _find_samples(self, run: Mapping[Key, Record], step: int | None, fact: str) -> list[str]:
        """Returns the samples, or hashes of rows, of a step; None: of all steps."""
        facts = (one.get("facts", {}) for key, one in run.items() if key.phase == "data" and step in (key.step, None))
        return [value for one in facts for value in one.get(fact, ())]

    def _describe_parameters(self, key: Key, gap: tuple[str, str, Any, Any]) -> str:
        """Describes a parameter that differs, and how many do."""
        _, _, one, other = gap
        alike = [k for k in self.ones if k[:3] == key[:3] and k in self.others]
        differing = sum(self._gaps(k) is not None for k in alike)
        what = "tensor" if key.phase == "gradient" else "weight"
        number = f"; {differing} of {counted(len(alike), what)} {'differs' if differing == 1 else 'differ'}"
        place = only_place(one, other) if one and other else None
        where = "" if place is None else f"only the value at {list(place)} differs, "
        return f"{key.name}: {where}{_gap(one, other)}{number}"

    def _forward(self, key: Key, gaps: list[tuple[str, str, Any, Any]]) -> tuple[str, str, str]:
        kind = self._kind(key)
        given = [gap for gap in gaps if gap[0] == "given"]
        if not given:
            within = [k for k in self.ones if k[:3] == key[:3] and _is_within(k.name, key.name)]
            inner = ", and so are its modules; it is its own operations" if within else ""
            _, name, one, other = gaps[0]
            return (
                key.name,
                kind,
                f"{_title(key.name, kind)}: its inputs are the same{inner}; its output is not: {_gap(one, other)}",
            )
        around = self._around(key)
        _, name, one, other = given[0]
        before = self._before(key, "forward")
        if around is None:
            return key.name, kind, f"{_title(key.name, kind)} gets another input {name}: {_gap(one, other)}"
        after = f"after {before.name} and " if before is not None and _is_within(before.name, around.name) else ""
        text = f"{_title(around.name, self._kind(around))}, in its own operations {after}before {key.name}"
        return around.name, self._kind(around), f"{text}: {_gap(one, other)}"

    def _around(self, key: Key) -> Key | None:
        """Returns the module that calls a module: the nearest one around it that runs."""
        name = key.name
        while name:
            name = name.rpartition(".")[0]
            found = next((k for k in self.ones if k[:3] == key[:3] and k.name == name), None)
            if found is not None:
                return found
        return None

    def _before(self, key: Key, phase: str) -> Key | None:
        """Returns the record of a phase before this one, in the same micro-batch."""
        before = None
        for one in self.ones:
            if one == key:
                return before
            if one[:3] == (key.step, key.micro_batch, phase):
                before = one
        return None

    def _kind(self, key: Key) -> str:
        kinds = dict.fromkeys(run[key].get("kind", "") for run in (self.ones, self.others) if key in run)
        return " | ".join(kinds)


def _is_within(name: str, around: str) -> bool:
    return name != around and (not around or name.startswith(f"{around}."))


def _title(name: str, kind: str) -> str:
    return f"{name or 'the model'} ({kind})" if kind else name or "the model"


def _some(names: Sequence[str]) -> str:
    return f"[{', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}]"


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _gap(one: Record | None, other: Record | None) -> str:
    """Describes how two tensors differ."""
    if one is None or other is None:
        return f"only the {'first' if other is None else 'second'} run has it"
    if one["shape"] != other["shape"]:
        return f"shape {one['shape']} against {other['shape']}"
    types = f"{one['dtype']} against {other['dtype']}, " if one["dtype"] != other["dtype"] else ""
    return f"{types}{distance(one, other):.2g} of its norm apart"
