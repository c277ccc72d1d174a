"""Order of a mixture: the source of the sample at each position, by shares, and the row of that source.

The order is one endless sequence, a pure function of seed and position; an epoch is a section of it. Let S_k(t) be the
integral of the share of source k up to position t. Sample j of source k is due at the time t with S_k(t) = j + 1/2, and
samples come in the order of these times. With constant shares these are Webster's quotients (2 j + 1) / share: after n
samples a source has n times its share, give or take about one sample, at any n. The times are computed, not
counted up, so that the order begins anywhere.

A source is read in a shuffled order (`FeistelOrder`), reshuffled for each pass; its j-th sample is row
j % rows of pass j // rows, whatever the epoch.

Shares change along a `ShareCurve` over positions in samples. A resume with another batch size uses the curve of the
checkpoint; a resume with another mixture uses it up to its position, and the new curve after that. Sources continue
where they are, so no row is repeated before the rest of its source has been seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch.utils.data import Sampler

from trainwright._types import is_count
from trainwright.capabilities.mixture.dataset import MixtureDataset, SourceUse
from trainwright.capabilities.mixture.plan import MixturePlan
from trainwright.capabilities.mixture.rules import parse_share
from trainwright.data.cursor import Cursor, OrderKind
from trainwright.data.length_sampler import Lengths
from trainwright.data.order import Exclusion, FeistelOrder, Order
from trainwright.data.seeding import derive_seed
from trainwright.errors import CheckpointError, DataError
from trainwright.support.door import MALFORMED, parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
Integers: TypeAlias = "NDArray[np.int64]"
BLOCK = 65_536  # positions computed at once
ROUNDING = 1e-6  # of shares and their sums
LINES = 32  # linear pieces that approximate shares of samples for linearly changing shares of tokens


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Shares from a position on, up to the next breakpoint."""

    position: int
    first: tuple[float, ...]  # shares of samples, one for each source; they sum to 1
    last: tuple[float, ...]  # shares just before the next breakpoint, with linear change in between


@dataclass(frozen=True)
class ShareCurve:
    """Shares of the sources by position, from 0 on; the first shares of the last breakpoint hold forever."""

    breakpoints: tuple[Breakpoint, ...]

    @cached_property
    def _starts(self) -> Floats:
        return np.array([point.position for point in self.breakpoints], dtype=np.float64)

    @cached_property
    def _slopes(self) -> Floats:
        widths = np.diff(self._starts)[:, None]
        changes = np.array([np.subtract(point.last, point.first) for point in self.breakpoints])
        changes[-1] = 0.0
        changes[:-1] /= widths
        return changes

    @cached_property
    def _first(self) -> Floats:
        return np.array([point.first for point in self.breakpoints])

    @cached_property
    def _sums(self) -> Floats:
        """Returns the integrals of the shares up to each breakpoint."""
        widths = np.diff(self._starts)[:, None]
        parts = np.array([np.add(point.first, point.last) / 2 for point in self.breakpoints])[:-1] * widths
        return np.concatenate([np.zeros((1, len(self.breakpoints[0].first))), np.cumsum(parts, axis=0)])

    def shares_at(self, position: float, *, is_before: bool = False) -> Floats:
        """Returns the share of each source at a position, or just before it."""
        piece = int(np.searchsorted(self._starts, position, side="left" if is_before else "right")) - 1
        shares: Floats = self._first[piece] + self._slopes[piece] * (position - self._starts[piece])
        return shares

    def samples_before(self, time: float) -> Floats:
        """Returns the integral of each share up to a time."""
        piece = int(np.searchsorted(self._starts, time, side="right")) - 1
        since = time - self._starts[piece]
        sums: Floats = self._sums[piece] + self._first[piece] * since + self._slopes[piece] * since * since / 2
        return sums

    def times(self, source: int, numbers: Integers) -> Floats:
        """Returns the times at which samples of a source are due; infinity for samples that are never due."""
        sums = self._sums[:, source]
        aim = numbers + 0.5
        piece = np.searchsorted(sums, aim, side="right") - 1
        rest = aim - sums[piece]
        share = self._first[piece, source]
        slope = self._slopes[piece, source]
        # The root of share * t + slope * t² / 2 = rest, in the form that avoids cancellation.
        below = share + np.sqrt(np.maximum(share * share + 2 * slope * rest, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            times: Floats = self._starts[piece] + np.where(rest > 0, 2 * rest / below, 0.0)
        return times

    def counts_before(self, time: float) -> list[int]:
        """Returns the number of samples of each source that are due before a time, consistent with `times`."""
        counts = []
        for source, near in enumerate(np.rint(self.samples_before(time)).astype(np.int64).tolist()):
            first = max(near - 2, 0)
            counts.append(first + int((self.times(source, np.arange(first, near + 2)) < time).sum()))
        return counts

    def sources(self, first: int, stop: int) -> tuple[Integers, Integers]:
        """Returns the source of each position from `first` up to `stop`, and the sample number within it."""
        # samples are at most half this number of positions away from their times
        margin = len(self.breakpoints[0].first) + 1
        low, high = (self.counts_before(max(time, 0.0)) for time in (first - margin, stop + margin))
        numbers = [np.arange(a, b) for a, b in zip(low, high, strict=True)]
        times = np.concatenate([self.times(source, of_source) for source, of_source in enumerate(numbers)])
        chosen = np.argsort(times, kind="stable")[first - sum(low) : stop - sum(low)]
        owners = np.repeat(np.arange(len(numbers)), [len(of_source) for of_source in numbers])
        return owners[chosen], np.concatenate(numbers)[chosen]

    def then(self, other: ShareCurve, position: int) -> ShareCurve:
        """Returns a curve that follows this one up to a position, and another one after it.

        The past does not change.
        """
        position += len(self.breakpoints[0].first) + 1  # samples before the position may be due a little later
        before = [point for point in self.breakpoints if point.position < position]
        before[-1] = Breakpoint(
            before[-1].position, before[-1].first, tuple(self.shares_at(position, is_before=True).tolist())
        )
        after = [point for point in other.breakpoints if point.position > position]
        end = tuple(other.shares_at(after[0].position, is_before=True).tolist()) if after else ()
        here = tuple(other.shares_at(position).tolist())
        return ShareCurve((*before, Breakpoint(position, here, end or here), *after))

    def to_json(self) -> str:
        """Returns the curve as text for a checkpoint."""
        return json.dumps([[point.position, point.first, point.last] for point in self.breakpoints])

    @classmethod
    def from_json(cls, text: str) -> ShareCurve:
        """Returns the curve from a checkpoint's text; CheckpointError if no run writes such a text."""
        try:
            return cls(_read_breakpoints(parse_json(text)))
        except MALFORMED as error:
            raise CheckpointError(
                f"The shares of a mixture in the checkpoint are invalid: {error}. Resume from another checkpoint."
            ) from error


def _read_breakpoints(values: Any) -> tuple[Breakpoint, ...]:  # Any: of a file
    """Returns the breakpoints in a checkpoint; one of `MALFORMED` if they are not those of a curve."""
    points = tuple(Breakpoint(position, tuple(first), tuple(last)) for position, first, last in values)
    positions = [point.position for point in points]
    if not all(map(is_count, positions)) or positions[:1] != [0] or positions != sorted(set(positions)):
        raise ValueError("the positions do not rise from 0")
    for shares in (shares for point in points for shares in (point.first, point.last)):
        if len(shares) != len(points[0].first):
            raise ValueError("the number of sources differs")
        if not (min(shares) >= -ROUNDING and abs(sum(shares) - 1) <= ROUNDING):
            raise ValueError("the shares of the sources do not sum to 1")
    return points


class MixtureOrder(Order, Sampler[int]):
    """Global indices of a `MixtureDataset` by shares.

    An epoch has `num_samples` samples: all rows if only shares are given; if sources are given by passes ("all", "2
    epochs"), as many as it takes for each source to make its passes in every epoch.
    """

    seed: int
    exclusion = Exclusion.SAME_SHARES

    def __init__(
        self, dataset: MixtureDataset, curve: ShareCurve, num_samples: int, *, seed: int, settings: str, shuffles: bool
    ) -> None:
        super().__init__()
        self.names = dataset.names
        self.source_starts = dataset.offsets
        self.offsets = np.array(dataset.offsets, dtype=np.int64)
        self.rows = [len(source) for source in dataset.sources.values()]
        self.curve = curve
        self.num_samples = num_samples
        self.seed = seed
        self.samples_per_epoch = num_samples
        self.settings = settings  # the settings that define the curve, as text
        self.shuffles = shuffles  # whether to shuffle the rows of a source
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Starts the next iteration at this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.epoch))

    def indices(self, epoch: int) -> Iterator[int]:
        return self.indices_from(epoch, 0)

    def indices_from(self, epoch: int, first: int) -> Iterator[int]:
        start = epoch * self.num_samples + first
        stop = (epoch + 1) * self.num_samples
        for position in range(start, stop, BLOCK):
            yield from self.at(position, min(position + BLOCK, stop)).tolist()

    def at(self, first: int, stop: int) -> Integers:
        """Returns the global indices at positions of the run, from `first` up to `stop`."""
        owners, numbers = self.curve.sources(first, stop)
        found = np.empty(stop - first, dtype=np.int64)
        for source in np.unique(owners).tolist():
            mine = owners == source
            found[mine] = self.offsets[source] + self._rows(source, numbers[mine])
        return found

    def _rows(self, source: int, numbers: Integers) -> Integers:
        passes, places = np.divmod(numbers.astype(np.uint64), np.uint64(self.rows[source]))
        if self.shuffles:  # keyed by the name of the source, so that adding another source does not change its order
            seed = derive_seed((self.seed, *self.names[source].encode()))
            places = FeistelOrder(self.rows[source], seed).order_passes(places, passes)
        return places.astype(np.int64)

    def describe(self) -> OrderKind:
        sources = json.dumps(dict(zip(self.names, self.rows, strict=True)))
        shuffles = "shuffled" if self.shuffles else "in order"
        return {
            "kind": "mixture",
            "sources": sources,
            "rows": shuffles,
            "settings": self.settings,
            "shares": self.curve.to_json(),
        }

    def continue_from(self, cursor: Cursor) -> str:
        before = cursor.order or {}
        here = self.describe()
        if any(before.get(name) != here[name] for name in ("kind", "sources", "rows")):
            return ""
        position = cursor.epoch * self.num_samples + cursor.samples
        then = ShareCurve.from_json(str(before["shares"]))
        if before["settings"] == self.settings:
            self.curve = then
            return ""
        self.curve = then.then(self.curve, position)
        return f"the new mixture from sample {position + 1} on; each source continues in its own order"

    def uses(self, num_epochs: float) -> list[SourceUse]:
        """Returns the use of each source in a run of `num_epochs` epochs."""
        end = num_epochs * self.num_samples
        shares = self.curve.shares_at(0.0)
        last = self.curve.shares_at(end)
        counts = self.curve.counts_before(end)
        return [
            SourceUse(name, rows, float(shares[i]), float(last[i]), counts[i] / rows if rows else 0.0)
            for i, (name, rows) in enumerate(zip(self.names, self.rows, strict=True))
        ]


# -- from arguments ----------------------------------------------------------------------------------------------------


def mixture_order(
    dataset: MixtureDataset, plan: MixturePlan, *, seed: int, shuffles: bool, lengths: Lengths | None = None
) -> MixtureOrder:
    """Returns the order for a plan; `lengths` of all rows are needed if shares are of tokens.

    Such shares count samples by the mean length of their source.
    """
    rows = [len(source) for source in dataset.sources.values()]
    weights = [1.0] * len(rows)
    if plan.unit == "tokens":
        assert lengths is not None
        parts = np.split(lengths, dataset.offsets[1:])
        weights = [float(part.mean()) if len(part) else 1.0 for part in parts]
    stages = [_shares(shares, dataset.names, rows, weights) for _, shares in plan.stages]
    num_samples = stages[0][1]
    curve = _curve(plan, [shares for shares, _ in stages], weights, num_samples)
    return MixtureOrder(dataset, curve, num_samples, seed=seed, settings=collect_settings(plan), shuffles=shuffles)


def collect_settings(plan: MixturePlan) -> str:
    """Returns the settings that define the shares, as text."""
    return json.dumps([plan.stages, plan.unit, plan.is_linear])


def make_stream_curve(names: Sequence[str], plan: MixturePlan) -> ShareCurve:
    """Returns the shares of sources of unknown length.

    Raises DataError for passes, shares of tokens, and a run without `max_steps`.
    """
    if plan.unit == "tokens" or any(parse_share(value)[1] for value in plan.stages[0][1].values()):
        raise DataError("A mixture with a stream must be given by shares of samples, since its length is unknown.")
    if plan.num_steps is None:
        raise DataError("A mixture with a stream never ends, since sources restart when they end. Set max_steps.")
    weights = [1.0] * len(names)
    stages = [_shares(shares, names, [0] * len(names), weights)[0] for _, shares in plan.stages]
    return _curve(plan, stages, weights, 0)


def _curve(
    plan: MixturePlan, stages: Sequence[Sequence[float]], weights: Sequence[float], num_samples: int
) -> ShareCurve:
    """Returns the curve of shares of samples by stage, for a given number of samples per epoch."""
    run = round(plan.num_epochs * num_samples) if plan.num_steps is None else plan.num_steps * plan.samples_per_step
    positions = [
        round(start * run) if isinstance(start, float) else start * plan.samples_per_step for start, _ in plan.stages
    ]
    for i in range(1, len(positions)):
        positions[i] = max(positions[i], positions[i - 1] + 1)
    return ShareCurve(_breakpoints(positions, stages, weights, is_linear=plan.is_linear))


def order_again(kind: OrderKind, dataset: MixtureDataset, *, num_samples: int, seed: int) -> MixtureOrder:
    """Returns the order that a checkpoint describes, for this dataset."""
    curve = ShareCurve.from_json(str(kind["shares"]))
    shuffles = kind["rows"] == "shuffled"
    return MixtureOrder(dataset, curve, num_samples, seed=seed, settings=str(kind["settings"]), shuffles=shuffles)


def _shares(
    asked: Mapping[str, float | str], names: Sequence[str], rows: Sequence[int], weights: Sequence[float]
) -> tuple[list[float], int]:
    """Returns shares of samples, and the number of samples per epoch."""
    amounts = [parse_share(asked[name]) for name in names]
    fixed = [round(amount * num) if by_pass else 0 for (amount, by_pass), num in zip(amounts, rows, strict=True)]
    shares = [0.0 if by_pass else amount for amount, by_pass in amounts]
    if not any(by_pass for _, by_pass in amounts):
        counts = [share / weight for share, weight in zip(shares, weights, strict=True)]
        return [count / sum(counts) for count in counts], sum(rows)
    whole = sum(num * weight for num, weight in zip(fixed, weights, strict=True)) / (1 - sum(shares))
    num = [one or round(share * whole / weight) for one, share, weight in zip(fixed, shares, weights, strict=True)]
    return [one / sum(num) for one in num], sum(num)


def _breakpoints(
    positions: Sequence[int], shares: Sequence[Sequence[float]], weights: Sequence[float], *, is_linear: bool
) -> tuple[Breakpoint, ...]:
    if not is_linear:
        return tuple(Breakpoint(at, tuple(one), tuple(one)) for at, one in zip(positions, shares, strict=True))
    places: list[tuple[int, list[float]]] = []
    for i in range(len(positions) - 1):
        ends = [np.multiply(shares[i + one], weights) for one in (0, 1)]
        ends = [end / end.sum() for end in ends]  # linearly changing shares of the unit
        pieces = 1 if len(set(weights)) == 1 else min(LINES, positions[i + 1] - positions[i])
        for piece in range(pieces):
            part = piece / pieces
            mixed = (ends[0] * (1 - part) + ends[1] * part) / weights
            at = positions[i] + round((positions[i + 1] - positions[i]) * part)
            places.append((at, (mixed / mixed.sum()).tolist()))
    places.append((positions[-1], list(shares[-1])))
    after = [*places[1:], places[-1]]
    return tuple(Breakpoint(at, tuple(one), tuple(then)) for (at, one), (_, then) in zip(places, after, strict=True))
