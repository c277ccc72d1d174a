"""Curricula: an order of samples by weights from a function of the user, which `extension.py` calls.

Like the order of a mixture, it is one endless sequence, a pure function of the seed, the position and the weights in
force there. It consists of segments: each begins at a position and lasts until the next one begins.

- Shares of sources: a mixture with these shares. A source continues in its own order across segments.
- Weights of samples: let W be the sum of N weights, laid out on a line one after another. A round of N positions takes
  the samples at the points (p + u) * W / N, for p = 0 to N - 1 in a shuffled order and u drawn for the round
    (systematic sampling: W. G. Cochran, "Sampling Techniques", chapter 8). So a sample with weight w is drawn N * w / W
  times per round on average, rounded down or up each time; with equal weights, each once. A segment begins a new round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler

from trainwright._types import DatasetLike, JSONObject, counted, has_length, is_count
from trainwright.capabilities.ledger.table import Array, Ledger
from trainwright.capabilities.mixture.dataset import MixtureDataset
from trainwright.capabilities.mixture.order import Breakpoint, Floats, Integers, MixtureOrder, ShareCurve
from trainwright.data.cursor import OrderKind
from trainwright.data.order import GOLDEN_RATIO, Exclusion, FeistelOrder, Order, random_bits
from trainwright.data.seeding import derive_seed
from trainwright.errors import ArgumentError, DataError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 65_536  # positions computed at once
MAX_DELAY = 32  # default limit for the steps between calling the function and applying its weights
NAN_CURE = "Losses of samples without a visit are NaN: choose a value for them, such as np.nan_to_num(losses, nan=10)."

Shares: TypeAlias = tuple[float, ...]  # shares of the sources; they sum to 1
Weights: TypeAlias = "Shares | NDArray[np.float32]"


@dataclass(frozen=True, slots=True)
class LedgerColumns:
    """The ledger of a run as passed to a curriculum's function: one entry per sample of the training data.

    Attributes:
        step: optimizer step after which the function is called; 0 before the first step.
        sources: names of the datasets; `("train",)` if no dict was given.
        sample: index of each sample, from 0.
        source: name of its dataset.
        row: its row in that dataset.
        visits: how often it was trained on; 0 for never.
        tokens: labels that entered its loss, over all visits; 1 per visit if labels are not tokens.
        mean_loss: mean of its loss over these labels; NaN without a visit.
        last_loss: mean loss at its last visit; NaN without a visit.
        last_step: optimizer step of its last visit, 0 without one.
    """

    step: int
    sources: tuple[str, ...]
    sample: Array
    source: Array
    row: Array
    visits: Array
    tokens: Array
    mean_loss: Array
    last_loss: Array
    last_step: Array

    @classmethod
    def from_ledger(cls, ledger: Ledger, dataset: MixtureDataset, *, step: int) -> LedgerColumns:
        """Copies the columns of a ledger, extended to all samples."""
        num = len(dataset)
        rows = [len(source) for source in dataset.sources.values()]
        ledger.reach(num)
        names = ("visits", "tokens", "mean_loss", "last_loss", "last_step")
        return cls(
            step,
            tuple(dataset.names),
            np.arange(num),
            np.repeat(np.array(dataset.names), rows),
            np.concatenate([np.arange(size) for size in rows]),
            *(getattr(ledger, name)[:num].copy() for name in names),
        )

    @classmethod
    def made_up(cls, dataset: MixtureDataset, *, step: int, every: int = 1) -> LedgerColumns:
        """Returns sample columns with distinct losses and one visit for each `every`-th sample."""
        ledger = Ledger()
        visited = np.arange(0, len(dataset), every)
        ones = np.ones(len(visited), np.int64)
        losses = np.linspace(0.5, 2.0, len(visited))
        ledger.add(visited, step=ones, visits=ones, tokens=ones, loss_sum=losses)
        return cls.from_ledger(ledger, dataset, step=step)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Training data in an order by weights, from a function called during training: `train_dataset=Curriculum(...)`.

    Args:
        dataset: a dataset with a length, or a dict of such datasets.
        weights_fn: takes `LedgerColumns` and returns a weight for each sample (an array), or for each dataset of the
            dict (a dict by name). Weights are relative; 0 excludes.
        every: optimizer steps between two calls, and before the first; or a sorted list of the steps after which to
            call it, where 0 means before the first step.
        delay: optimizer steps after which weights come into force. Default: 32, or the distance between two calls if
            that is less.

    Raises:
        DataError: a dataset without a length.
        ArgumentError: `every` or `delay` is invalid.

    Example:
        >>> def hard_first(ledger):
        ...     return np.nan_to_num(ledger.mean_loss, nan=10.0)  # samples not seen yet count as hard
        >>> Trainer(model=model, args=args, train_dataset=Curriculum(samples, hard_first, every=200))
    """

    dataset: DatasetLike
    weights_fn: Callable[[LedgerColumns], object]
    every: int | Sequence[int] = field(kw_only=True)
    delay: int | None = field(kw_only=True, default=None)

    def __post_init__(self) -> None:
        sources = self.dataset if self.has_sources else {"": self.dataset}
        for name, source in sources.items():
            if isinstance(source, IterableDataset) or not has_length(source):
                said = f"The source {name!r} of a Curriculum" if name else "The dataset of a Curriculum"
                raise DataError(
                    f"{said} is a {type(source).__name__} without a length, and the samples of a stream cannot be "
                    "chosen by weights. Pass a dataset with a length and indices; mixture_schedule changes shares of "
                    "streams."
                )
        if not callable(self.weights_fn):
            raise ArgumentError(f"weights_fn={self.weights_fn!r} of a Curriculum cannot be called; pass a function.")
        steps: list[int] = [*self.every] if isinstance(self.every, (list, tuple)) else [0, self.every]  # type: ignore[list-item]
        if not steps or not all(map(is_count, steps)) or any(a >= b for a, b in pairwise(steps)):
            raise ArgumentError(
                f"every={self.every!r} of a Curriculum must be a number of optimizer steps, 1 or more, or a list of "
                "steps in order, such as [0, 500, 2000]."
            )
        if self.delay is not None and not (is_count(self.delay) and self.delay > 0):
            raise ArgumentError(f"delay={self.delay!r} of a Curriculum must be a number of optimizer steps, 1 or more.")

    def make_order(self, data: MixtureDataset, *, seed: int, shuffles: bool) -> CurriculumOrder:
        """Returns the order of the samples, by the weights in force."""
        return CurriculumOrder(data, seed=seed, shuffles=shuffles)

    @property
    def has_sources(self) -> bool:
        """Returns True if its data is several named datasets."""
        return isinstance(self.dataset, Mapping) and all(isinstance(name, str) for name in self.dataset)

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.weights_fn, "__name__", type(self.weights_fn).__name__)

    @property
    def lead(self) -> int:
        """Number of steps between a call and its weights coming into force."""
        if self.delay is not None:
            return self.delay
        steps = [self.every] if isinstance(self.every, int) else self.every
        return min([MAX_DELAY, *(b - a for a, b in pairwise((0, *steps)) if b)])

    def step_after(self, step: int) -> int | None:
        """Returns the first step after `step` at which the function is called; None if it is not called again."""
        if isinstance(self.every, int):
            return max(step // self.every + 1, 1) * self.every
        return next((one for one in self.every if one > step), None)

    def __str__(self) -> str:
        if isinstance(self.every, int):
            when = f"after each {counted(self.every, 'step')}"
        else:
            when = f"after step {', '.join(map(str, self.every))}"
        return f"by {self.name}, called {when}; they hold {counted(self.lead, 'step')} later"


# -- weights -----------------------------------------------------------------------------------------------------------


def read_weights(
    given: object,
    dataset: MixtureDataset,
    name: str,
    *,
    visits: Array,
    excluded: Collection[int] = (),
    is_made_up: bool = False,
) -> Weights:
    """Reads the weights returned by the function `name`, 0 for samples in quarantine; DataError if they are invalid.

    `visits` counts how often each sample was trained on. Of weights for a ledger that `is_made_up`, only type and
    number are checked, and that they are not NaN for all samples without a visit; the result is empty.
    """
    num = len(dataset)
    names = dataset.names
    by_source = isinstance(given, Mapping)
    listed = ", ".join(map(repr, names))
    if isinstance(given, Mapping):
        for unknown in (one for one in given if one not in names):
            guess = did_you_mean(unknown, names)
            raise DataError(f"{name} gives a weight to {unknown!r}, and the training data has {listed}.{guess}")
        for missing in (one for one in names if one not in given):
            raise DataError(f"{name} gives no weight to {missing!r}; a weight of 0 excludes it from training.")
        given = [given[one] for one in names]
    try:
        values = np.array(given.tolist() if isinstance(given, torch.Tensor) else given, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.zeros(())
    if values.shape != (len(names) if by_source else num,):
        what = f"an array of shape {values.shape}" if values.ndim else f"a {type(given).__name__}"
        form = f", or a dict with one for each of {listed}" if len(names) > 1 else ""
        raise DataError(f"{name} returned {what}. Return an array with a weight for each of {num} samples{form}.")
    if is_made_up:
        if not visits.all() and np.isnan(values if by_source else values[visits == 0]).all():
            raise DataError(f"{name} returned nan for samples without a visit (called before training). {NAN_CURE}")
        return ()
    wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(wrong):
        which = repr(names[wrong[0]]) if by_source else f"sample {wrong[0]}"
        cure = "Return numbers that are not negative."
        if np.isnan(values[wrong]).any() and (by_source or not visits[wrong].all()):
            cure = NAN_CURE
        said = f"{len(wrong)} of {len(values)} weights that are not numbers >= 0: {values[wrong[0]]} for {which}"
        raise DataError(f"{name} returned {said}. {cure}")
    if by_source:
        values[[not len(source) for source in dataset.sources.values()]] = 0.0
    else:
        values[list(excluded)] = 0.0
    if not values.any():
        rest = "all that are not in quarantine" if excluded else "all of the data"
        raise DataError(f"{name} returned 0 for {rest}. At least one weight must be positive.")
    return tuple((values / values.sum()).tolist()) if by_source else (values / values.max()).astype(np.float32)


# -- the order ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """The weights or shares that define the order from a position on."""

    start: int
    given: int  # samples chosen by shares of sources before it
    weights: NDArray[np.float32] | None = None  # weights of samples; None if shares of sources decide

    @cached_property
    def sums(self) -> Floats:
        """Returns the end of each sample's interval on the line."""
        return np.cumsum(self.weights, dtype=np.float64)  # type: ignore[arg-type]


class CurriculumOrder(Order, Sampler[int]):
    """Global indices of a curriculum's data; until weights come into force, each row is drawn once per epoch.

    Attributes:
        segments: the segments that are still needed, in order.
        end: first position for which weights are not known yet; None if there is none.
    """

    seed: int
    exclusion = Exclusion.SAME_SHARES

    def __init__(self, dataset: MixtureDataset, *, seed: int, shuffles: bool) -> None:
        super().__init__()
        self.seed = seed
        self.num_samples = len(dataset)
        self.samples_per_epoch = len(dataset)
        rows = np.array([len(source) for source in dataset.sources.values()])
        self._of_sources = MixtureOrder(
            dataset,
            _constant(tuple((rows / max(rows.sum(), 1)).tolist())),
            len(dataset),
            seed=seed,
            settings="",
            shuffles=shuffles,
        )
        self._shuffles = shuffles
        self.source_starts = dataset.offsets
        self.segments = [Segment(0, 0)]
        self.end: int | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return self.indices(0)

    def indices(self, epoch: int) -> Iterator[int]:
        return self.indices_from(epoch, 0)

    def indices_from(self, epoch: int, first: int) -> Iterator[int]:
        position = epoch * self.num_samples + first
        stop = (epoch + 1) * self.num_samples
        while position < stop:
            known = min(position + BLOCK, stop, stop if self.end is None else self.end)
            if known <= position:
                raise DataError(
                    f"Sample {position + 1} of the run was read before the curriculum's weights for it were "
                    "known: get_batch_samples or another override reads ahead. Pass a larger delay to Curriculum."
                )
            yield from self.at(position, known).tolist()
            position = known

    def at(self, first: int, stop: int) -> Integers:
        """Returns the global indices at positions of the run, from `first` up to `stop`."""
        starts = [segment.start for segment in self.segments]
        parts = []
        while first < stop:
            number = bisect_right(starts, first) - 1
            segment = self.segments[number]
            end = min(stop, starts[number + 1]) if number + 1 < len(starts) else stop
            start = first - segment.start
            end_there = end - segment.start
            if segment.weights is None:
                self._of_sources.seed = self.seed
                parts.append(self._of_sources.at(segment.given + start, segment.given + end_there))
            else:
                parts.append(self._by_weight(segment, np.arange(start, end_there, dtype=np.uint64)))
            first = end
        return np.concatenate(parts)

    def _by_weight(self, segment: Segment, positions: NDArray[np.uint64]) -> Integers:
        rounds, places = np.divmod(positions, np.uint64(self.num_samples))
        seed = derive_seed((self.seed, segment.start))
        sums = segment.sums
        if self._shuffles:
            places = FeistelOrder(self.num_samples, seed).order_passes(places, rounds)
        shifts = (random_bits((rounds + np.uint64(seed)) * GOLDEN_RATIO) >> np.uint64(11)) * 2.0**-53
        found: Integers = np.searchsorted(sums, (places + shifts) * (sums[-1] / self.num_samples), side="right")
        found[found == self.num_samples] = np.searchsorted(sums, sums[-1])  # rounding may reach the end of the line
        return found

    def add(self, start: int, weights: Weights, *, position: int) -> None:
        """Applies weights from a position on. Keeps the segments from the one before `position` on."""
        last = self.segments[-1]
        start = max(start, last.start)
        given = last.given + (start - last.start if last.weights is None else 0)
        if isinstance(weights, tuple):
            curve = _constant(weights)
            self._of_sources.curve = self._of_sources.curve.then(curve, given) if given else curve
        number = bisect_right([segment.start for segment in self.segments], position) - 1
        new = Segment(start, given) if isinstance(weights, tuple) else Segment(start, given, weights)
        self.segments = [*self.segments[max(number - 1, 0) :], new]

    def describe(self) -> OrderKind:
        kind = self._of_sources.describe()
        return {"kind": "curriculum", "sources": kind["sources"], "rows": kind["rows"]}

    def state_dict(self) -> JSONObject:
        """Returns segments and shares, as numbers, text and tensors."""
        return {
            "curve": self._of_sources.curve.to_json(),
            "segments": [
                {
                    "start": one.start,
                    "given": one.given,
                    "weights": None if one.weights is None else torch.from_numpy(one.weights),
                }
                for one in self.segments
            ],
        }

    def load_state_dict(self, state: JSONObject, *, position: int) -> None:
        """Restores segments and shares, for positions from `position` on.

        ValueError and other errors for invalid ones.
        """
        curve = ShareCurve.from_json(state["curve"])
        segments = []
        for one in state["segments"]:
            weights = None if one["weights"] is None else one["weights"].numpy()
            if weights is not None and weights.shape != (self.num_samples,):
                raise ValueError(f"weights of {len(weights)} samples")
            segments.append(Segment(int(one["start"]), int(one["given"]), weights))
        if position < segments[0].start:  # `ignore_data_skip` returns to the beginning of an epoch
            segments.insert(0, Segment(position, max(segments[0].given - segments[0].start + position, 0)))
        self._of_sources.curve = curve
        self.segments = segments


def _constant(shares: Shares) -> ShareCurve:
    return ShareCurve((Breakpoint(0, shares, shares),))
