"""MemoryPlan: the uses of a training step's memory, and changes that would reduce it. Only values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainwright.errors import ArgumentError
from trainwright.support.html_table import html_section, html_table
from trainwright.support.units import size_text

KINDS = (
    "weights",
    "masters",
    "buffers",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "communication",
    "batch",
    "other",
)
UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The fullest moment of a training step."""

    total_bytes: int  # all tensors that are alive then
    by_kind: Mapping[str, int]  # the same bytes by purpose, a word of `KINDS`
    # activations alive at that moment, by the module that made them in its forward pass
    by_module: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""  # part of the step: "forward", "backward", "clip" or "update"
    is_measured: bool = False  # found with real tensors; else the step was gone through without computing anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The calls of one collective operation in a step, as one process makes them."""

    name: str  # "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all" or "barrier"
    calls: int
    # size of the whole tensors: the summed, the gathered, the scattered ones
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChange:
    """Settings that take less memory."""

    settings: Mapping[str, object]  # arguments to pass, by name
    price: str  # the cost of these settings
    peak_bytes: int | None  # the peak with them; None if it could not be found out
    reason: str = ""  # why it could not

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The peak of a step as the settings are, and with changes, the cheapest first."""

    peak: PeakMemory
    changes: tuple[SettingsChange, ...] = ()
    budget_bytes: int | None = None  # available memory; None if unknown
    device: str = "cpu"  # the kind of device that the step runs on

    @property
    def fits(self) -> bool | None:
        """Returns True if the step fits as it is; None without a budget."""
        return None if self.budget_bytes is None else self.peak.total_bytes <= self.budget_bytes

    @property
    def cheapest(self) -> SettingsChange | None:
        """Returns the first change with which the step fits; None if it fits already, or with no change."""
        if self.budget_bytes is None or self.fits:
            return None
        budget = self.budget_bytes
        fitting = (one for one in self.changes if one.peak_bytes is not None and one.peak_bytes <= budget)
        return next(fitting, None)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the plan for the console."""
        yield self._title()
        yield from (f"  {kind:14}{size:>12}" for kind, size in self._kinds())
        yield from (f"    {name:40}{size:>12}" for name, size in self._modules())
        if self.budget_bytes is not None:
            yield f"budget: {size_text(self.budget_bytes)}; {self._verdict()}"
        yield from (f"  {change}: {size} ({price})" for change, size, price in self._changes())

    def _repr_html_(self) -> str:
        budget = "" if self.budget_bytes is None else f"budget: {size_text(self.budget_bytes)}; {self._verdict()}"
        return html_section(
            self._title(),
            html_table(self._kinds()),
            html_section("activations by module", html_table(self._modules()), is_folded=True),
            html_section(budget, html_table(self._changes(), header=("change", "peak", "price"))),
        )

    def _title(self) -> str:
        how = "measured" if self.peak.is_measured else "predicted"
        return f"memory of a step, {how}: {size_text(self.peak.total_bytes)} at its peak, in {self.peak.moment}"

    def _kinds(self) -> list[tuple[str, str]]:
        return [(kind, size_text(self.peak.by_kind[kind])) for kind in KINDS if self.peak.by_kind.get(kind)]

    def _modules(self) -> list[tuple[str, str]]:
        largest = sorted(self.peak.by_module.items(), key=lambda one: -one[1])[:12]
        return [(name or "(model)", size_text(size)) for name, size in largest]

    def _changes(self) -> Iterator[tuple[str, str, str]]:
        for change in self.changes:
            text = f"not known: {change.reason}" if change.peak_bytes is None else size_text(change.peak_bytes)
            yield str(change), text, change.price

    def _verdict(self) -> str:
        if self.fits:
            return "it fits"
        if self.cheapest is not None:
            return f"it does not fit; the cheapest change that fits is {self.cheapest}"
        return "it does not fit, nor with any of these changes"


def parse_size(text: int | float | str | None) -> int | None:
    """Parses a size in bytes: "24GB", "80 GiB", or a number; ArgumentError: it is none."""
    if text is None or isinstance(text, (int, float)):
        return None if text is None else int(text)
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS:
        raise ArgumentError(f"budget={text!r} is not a size of memory; give bytes as a number, or '24GB', '80GiB'.")
    return int(float(found[1]) * UNITS[found[2].upper()])
