"""Orders of samples, their shares among processes, and batches of indices from them that can start anywhere.

The shuffled order of an epoch is a pure function of (seed, epoch): the permutation that a fresh torch generator with
seed + epoch draws. A resume computes it and starts in the middle; nothing is read or drawn to get there.

An order is cut into chunks of `num_processes * batch_size` samples, and process r takes part r of each chunk. Example,
two processes with batches of 3 over the order 0..13: chunks 0-5 and 6-11 are full, so process 0 trains on 012, 678 and
process 1 on 345, 9ab; the tail cd (two samples) is shared out evenly: c to process 0, d to process 1. Were the tail one
sample only, process 1 would get it again as a batch that stands in: it keeps the processes in step and weighs nothing.
So every process has the same number of batches, and every sample of the epoch counts once.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from trainwright.data.cursor import Cursor, OrderKind
from trainwright.data.quarantine import substitutes, without
from trainwright.data.seeding import EpochIndices, SeededIndices

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class Order(ABC):
    """The indices of each epoch, of samples or of groups of them."""

    seed: int | None = None  # base of the order; None where it comes from elsewhere
    unit: str | None = None  # the settings that decide what a group is; None for an index of a single sample
    is_counted = False  # its length is a claim that is compared with what it gives
    is_permutation = False  # an epoch has each sample once, in an order that can be computed at any time

    samples_per_epoch: int | None = None  # where that is another number than the dataset has
    source_starts: Sequence[int] = (0,)  # first samples of the sources whose shares it keeps

    @abstractmethod
    def indices(self, epoch: int) -> Iterable[Any]:
        """The indices of an epoch, in order."""

    @abstractmethod
    def __len__(self) -> int:
        """Indices in an epoch, the same number in each."""

    @abstractmethod
    def describe(self) -> OrderKind:
        """Everything that the order depends on besides seed and epoch; lies in checkpoints."""

    def indices_from(self, epoch: int, first: int) -> Iterator[Any]:
        """The indices of an epoch from position `first` on."""
        return itertools.islice(self.indices(epoch), first, None)

    def continue_from(self, cursor: Cursor) -> str:
        """Takes over from an order of its kind in a checkpoint what decides its samples; returns what to say of it."""
        return ""

    def draw(self, epoch: int) -> Iterator[Any] | None:
        """The indices of an epoch, where random numbers of this process decide them; None where they do not."""
        return None


@dataclass(eq=False)
class Permutation(Order):
    """A new permutation for each epoch, a function of seed and epoch."""

    num_samples: int
    seed: int
    is_permutation = True

    def __len__(self) -> int:
        return self.num_samples


class ShuffledOrder(Permutation):
    """A new permutation for each epoch, drawn from `seed + epoch`."""

    def indices(self, epoch: int) -> Iterable[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def describe(self) -> OrderKind:
        return {"kind": "permutation"}


ROUNDS = 8
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # of 64 bits; its multiples are spread evenly
BLOCK = 8192  # indices computed at a time: 64 KiB
Numbers: TypeAlias = "NDArray[np.uint64]"


class FeistelOrder(Permutation):
    """A new permutation for each epoch in constant memory, computed index by index from seed, epoch and position.

    A Feistel network is a permutation of the numbers of so many bits, whatever its round function is (M. Luby and C.
    Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Computing 17(2), 1988).
    For n samples it runs on the least number of bits that holds n - 1; a result of n or more is put through again until
    it is below n, which makes it a permutation of 0 to n - 1 ("cycle walking": J. Black and P. Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002). Less than half of the numbers are too large, so a number takes two passes
    on average at most. The round function is the finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, OOPSLA 2014),
    keyed by seed, epoch and round.
    """

    def describe(self) -> OrderKind:
        return {"kind": "feistel_permutation"}

    def indices(self, epoch: int) -> Iterator[int]:
        return self.indices_from(epoch, 0)

    def indices_from(self, epoch: int, first: int) -> Iterator[int]:
        keys = self._keys(epoch)
        for start in range(first, self.num_samples, BLOCK):
            yield from self.at(np.arange(start, min(start + BLOCK, self.num_samples), dtype=np.uint64), keys).tolist()

    def _keys(self, epoch: int) -> Numbers:
        keys = np.random.SeedSequence([self.seed % 2**64, epoch]).generate_state(ROUNDS, np.uint64)
        return keys.astype(np.uint64)

    def of_passes(self, positions: Numbers, passes: Numbers) -> Numbers:
        """The samples at some positions, each of a pass of its own, in another order than the epochs'."""
        return self.at(positions, random_bits(self._keys(0)[:, None] + (passes + np.uint64(1)) * GOLDEN_RATIO))

    def at(self, positions: Numbers, keys: Numbers) -> Numbers:
        """The samples at some positions, of one permutation or, with keys for each position, of several."""
        bits = max((self.num_samples - 1).bit_length(), 2)
        found = _network(positions, bits, keys)
        while len(outside := np.flatnonzero(found >= self.num_samples)):
            found[outside] = _network(found[outside], bits, keys if keys.ndim == 1 else keys[:, outside])
        return found


def _network(numbers: Numbers, bits: int, keys: Numbers) -> Numbers:
    """One pass; with an odd number of bits the halves differ by one, and change places with every round."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = numbers >> np.uint64(low_bits), numbers & np.uint64((1 << low_bits) - 1)
    for key in keys:  # (high, low) -> (low, high xor f(low)), with their widths
        high, low = low, high ^ (random_bits(low + key) & np.uint64((1 << high_bits) - 1))
        high_bits, low_bits = low_bits, high_bits
    numbers = (high << np.uint64(low_bits)) | low
    return numbers


def random_bits(numbers: Numbers) -> Numbers:
    """Numbers of 64 bits that look random, each a function of one number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers = numbers ^ (numbers >> np.uint64(31))
    return numbers


class SamplerOrder(Order):
    """The order that a sampler gives; it may draw from the random generators of this process when an epoch starts."""

    is_counted = True

    def __init__(self, sampler: Any, describe: Callable[[], OrderKind] | None = None) -> None:
        self.sampler = sampler  # has a length and can be iterated once per epoch
        self.is_permutation = isinstance(sampler, range) or type(sampler) is SequentialSampler
        self._describe = describe  # returns the kind of the order; default: the name of the sampler's class
        self._kind: OrderKind | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def indices(self, epoch: int) -> Iterable[int]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        return self.sampler  # type: ignore[no-any-return]

    def draw(self, epoch: int) -> Iterator[int]:
        return iter(list(self.indices(epoch)))

    def describe(self) -> OrderKind:
        if self._kind is None:
            name = type(self.sampler).__qualname__
            self._kind = {"kind": "sampler", "sampler": name} if self._describe is None else self._describe()
        return self._kind


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Positions of a chunk, from `start` to before `stop`, that fall to one process."""

    start: int
    stop: int
    num_samples: int  # of them count; 0 where a batch only stands in
    # by which a mean over the part is multiplied, so that the mean over all processes is that over the chunk
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One process among those that share an order."""

    batch_size: int  # samples of a full batch on each process
    rank: int = 0
    num_processes: int = 1
    # a tail is split into parts that differ by one sample at most; otherwise the first processes get full batches, the
    # next one what is left, and the others stand in
    even: bool = True

    @property
    def chunk_size(self) -> int:
        """Samples in a batch of all processes."""
        return self.batch_size * self.num_processes

    def num_batches(self, num_samples: int, *, drop_last: bool) -> int:
        """Batches that each process makes of so many samples."""
        full, rest = divmod(num_samples, self.chunk_size)
        return full + int(rest > 0 and not drop_last)

    def part(self, size: int) -> ChunkPart:
        """This process's part of a chunk of `size` samples (at least one)."""
        start, stop = self._bounds(size)
        num_samples = stop - start
        weight = num_samples * self.num_processes / size
        return ChunkPart(start, stop, num_samples, weight) if num_samples else ChunkPart(0, 1, 0, 0.0)

    def _bounds(self, size: int) -> tuple[int, int]:
        if self.even:
            small, larger = divmod(size, self.num_processes)
            start = self.rank * small + min(self.rank, larger)
            return start, start + small + int(self.rank < larger)
        return min(self.rank * self.batch_size, size), min((self.rank + 1) * self.batch_size, size)


class EpochBatches(Sampler[list[int]]):
    """Batches of indices for one epoch at a time, those of one process; `seek` says which epoch and where in it."""

    def __init__(
        self,
        order: Order,
        batch_size: int,
        *,
        drop_last: bool = False,
        worker_seed: int | None = None,
        share: RankShare | None = None,
    ) -> None:
        self.order = order  # gives the indices of an epoch, to all processes the same
        self.batch_size = batch_size  # indices per batch
        self.drop_last = drop_last  # leave out a last batch that is smaller, or that not every process could fill
        self.worker_seed = worker_seed  # base of the seeds that workers get with each batch; None leaves them alone
        # which part of the order is this process's; default all of it
        self.share = RankShare(batch_size=batch_size) if share is None else share
        assert self.share.batch_size == batch_size
        self.tells_epoch = False  # batches say of which epoch they are
        self.fetched: deque[list[Any]] | None = None  # batches given, for who takes them out; None: nobody does
        # the same as the order had them, over all processes, where the order cannot be computed again
        self.ahead: deque[list[int]] | None = None
        self._source: Iterator[int] = iter(())  # what is left of the order of the epoch under way
        self._rest: Iterator[int] | None = None  # what the next iteration gives, of an epoch that is begun again
        self.left_out: frozenset[int] = frozenset()  # samples in quarantine
        self._substitutes: dict[int, int] = {}  # and those that take their places where these stay
        self.parts: dict[int, ChunkPart] = {}  # this process's, of batches that lost samples, by number from 1
        self._places: tuple[object, list[int]] = (None, [])  # of what is left out of one epoch; made when asked for
        self.epoch = 0
        self.first_sample = 0
        self._has_warned = False
        self._drawn: Iterator[int] | None = None
        self._finished: tuple[int, Order] = (-1, order)  # an epoch, and the order in which it was begun

    @property
    def sampler(self) -> Any:
        """Sampler that the order was made from; torch's DataLoader and others look for it here."""
        return getattr(self.order, "sampler", self.order)

    def seek(self, epoch: int, first_sample: int = 0) -> None:
        """The next iteration begins with this sample of the order (counted over all processes)."""
        self.epoch = epoch
        self.first_sample = first_sample

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its first sample on."""
        self.seek(epoch)

    def finish(self, epoch: int, order: Order) -> None:
        """One epoch keeps the order in which it was begun; all others have this one's."""
        assert len(order) == len(self.order)
        self._finished, self._places = (epoch, order), (None, [])

    def order_of(self, epoch: int) -> Order:
        """The order of an epoch."""
        return self._finished[1] if epoch == self._finished[0] else self.order

    def leave_out(self, samples: Collection[int], num_samples: int) -> None:
        """Leaves samples out of the batches of the next iteration."""
        self._substitutes = substitutes(samples, num_samples, self.order.source_starts)
        self.left_out = frozenset(self._substitutes)

    @property
    def num_left_out(self) -> int:
        """Samples by which the next epochs are shorter."""
        return len(self.left_out) if self.order.is_permutation else 0

    def left_out_of(self, epoch: int) -> frozenset[int]:
        """Samples by which an epoch is shorter."""
        return self.left_out if self.order_of(epoch).is_permutation else frozenset()

    @property
    def loses_samples(self) -> bool:
        """Returns True if the batches of the next iteration get smaller by what is left out, and stay as many."""
        order = self.order_of(self.epoch)
        return bool(self.left_out) and not order.is_permutation and order.samples_per_epoch is None

    def places_left_out(self, epoch: int) -> list[int]:
        """Their positions in its order, in order."""
        left_out = self.left_out_of(epoch)
        if not left_out:
            return []
        if self._places[0] != (epoch, left_out):
            indices = self.order_of(epoch).indices(epoch)
            self._places = (epoch, left_out), [place for place, index in enumerate(indices) if index in left_out]
        return self._places[1]

    def num_kept(self, epoch: int, before: int) -> int:
        """Samples before a position of an epoch that are not left out."""
        return before - bisect_left(self.places_left_out(epoch), before)

    def place_after(self, epoch: int, num_kept: int) -> int:
        """The position after so many samples of an epoch that are not left out."""
        position = num_kept
        for place in self.places_left_out(epoch) if num_kept > 0 else ():
            if place > position:
                break
            position += 1
        return position

    def __len__(self) -> int:
        return self.share.num_batches(len(self.order) - self.num_left_out, drop_last=self.drop_last)

    def num_left(self, first_sample: int, epoch: int) -> int:
        """Samples of an epoch from a position on."""
        kept = self.num_kept(epoch, first_sample) if first_sample > 0 else 0
        return max(len(self.order) - len(self.left_out_of(epoch)) - kept, 0)

    def num_batches(self, first_sample: int = 0, epoch: int | None = None) -> int:
        """Batches of an epoch from a position on; default the next one that is iterated."""
        num = self.num_left(first_sample, self.epoch if epoch is None else epoch)
        return self.share.num_batches(num, drop_last=self.drop_last)

    def last_part(self, first_sample: int = 0) -> ChunkPart | None:
        """Returns this process's part of a tail that is shared unevenly; None where all batches are full."""
        rest = self.num_left(first_sample, self.epoch) % self.share.chunk_size
        if rest == 0 or self.drop_last or self.share.num_processes == 1:
            return None
        part = self.share.part(rest)
        return None if rest % self.share.num_processes == 0 and self.share.even else part

    def indices_of(self, epoch: int, first_sample: int, num_batches: int) -> list[list[Any]]:
        """Returns the indices of some batches of this process; none where making the order draws random numbers.

        Nor are there any of a batch of which samples are left out and others are not.
        """
        order, share = self.order_of(epoch), self.share
        if type(order).draw is not Order.draw and not order.is_permutation:
            return []
        left_out = self.left_out_of(epoch)
        indices = (one for one in order.indices_from(epoch, first_sample) if not left_out or one not in left_out)
        chunks = [list(itertools.islice(indices, share.chunk_size)) for _ in range(num_batches)]
        parts = [share.part(len(chunk)) for chunk in chunks if chunk]
        batches = [chunk[part.start : part.stop] for chunk, part in zip(chunks, parts, strict=False)]
        if not self.left_out or order.is_permutation:
            return batches
        whole = [all(self._substituted(index, 0) == index for index in chunk) for chunk in chunks]
        return [batch if is_whole else [] for batch, is_whole in zip(batches, whole, strict=False)]

    def draw(self) -> None:
        """Draws the order of the epoch now, not with the first batch: random states may be set in between."""
        if self._rest is None:
            self._drawn = self.order_of(self.epoch).draw(self.epoch)

    def keep_rest(self) -> None:
        """Begins the next iteration with the indices of `ahead`, where the order cannot be computed again."""
        if self.ahead is not None:
            self._rest = itertools.chain(list(itertools.chain.from_iterable(self.ahead)), self._source)

    def __iter__(self) -> Iterator[list[int]]:
        order, drawn, rest, loses = self.order_of(self.epoch), self._drawn, self._rest, self.loses_samples
        self._drawn = self._rest = None
        indices: Iterator[int]
        if rest is not None:
            indices = rest
        elif drawn is not None:
            indices = itertools.islice(drawn, self.first_sample, None)
        else:
            indices = order.indices_from(self.epoch, self.first_sample)
        share, chunk_size = self.share, self.share.chunk_size
        epoch, first = self.epoch, self.first_sample
        left_out = self.left_out_of(epoch)
        number = begun = (self.num_kept(epoch, first) if left_out and first > 0 else first) // chunk_size
        self.epoch, self.first_sample = epoch + 1, 0  # a plain `for` loop over epochs gets a new order each time
        if left_out:
            indices = (index for index in indices if index not in left_out)
        position, is_counted, num = first, order.is_counted and not left_out, len(self.order)
        self._source, self.parts = indices, {}
        while batch := list(itertools.islice(indices, chunk_size)):
            position += len(batch)
            if position > num and is_counted:
                self._check_length(position)
            if len(batch) < chunk_size and self.drop_last:
                return
            if self.ahead is not None:
                self.ahead.append(batch)
            if loses:
                batch = self._without(batch, epoch, number - begun + 1)
            elif share.num_processes > 1:
                part = share.part(len(batch))
                batch = batch[part.start : part.stop]
            if self._substitutes and not (loses or left_out):
                batch = [self._substituted(index, epoch) for index in batch]
            if self.tells_epoch:
                batch = EpochIndices(batch, epoch)
            elif self.worker_seed is not None:
                batch = SeededIndices(batch, (self.worker_seed, epoch, number * share.num_processes + share.rank))
            if self.fetched is not None:
                self.fetched.append(batch)
            yield batch
            number += 1
        if is_counted and first < num:
            self._check_length(position, is_end=True)

    def _without(self, chunk: list[Any], epoch: int, number: int) -> list[Any]:
        """Returns this process's part of what is left of a chunk, which is shared out like a tail."""
        share, kept = self.share, without(chunk, self.left_out)
        part = share.part(len(kept)) if kept else ChunkPart(0, 1, 0, 0.0)
        if not kept:  # a batch that stands in, so that there are as many
            kept = [self._substituted(chunk[0], epoch)]
        if (
            part.num_samples == 0
            or len(kept) % share.num_processes
            or (len(kept) < share.chunk_size and not share.even)
        ):
            self.parts[number] = part
        return kept[part.start : part.stop]

    def _substituted(self, index: Any, epoch: int) -> Any:  # Any: of a sample, or a group of them
        """Returns what takes the place of an index; of a group that would be empty, another one of its epoch."""
        if not isinstance(index, list):
            return self._substitutes.get(index, index)
        groups = itertools.chain([index], self.order_of(epoch).indices(epoch))
        return next(kept for group in groups if (kept := without(group, self.left_out)))

    def _check_length(self, position: int, *, is_end: bool = False) -> None:
        """Warns once of a sampler that gives another number of indices than it says."""
        num = len(self.order)
        if not self._has_warned and (position > num or (is_end and position < num)):
            self._has_warned = True
            seen, effect = f"at least {position}", "ends before the sampler does"
            if is_end:
                seen, effect = str(position), "ends early, and the run may end before its last step"
            logger.warning(
                "The sampler says by len() that it has %d indices, and gave %s. Steps and epochs are counted by len(): "
                "an epoch %s. Let its __len__ return how many it gives.",
                num, seen, effect,
            )  # fmt: skip
