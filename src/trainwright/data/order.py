"""Orders: the sample at each position of an epoch.

An order is a pure function of seed, epoch and position wherever possible, so that a resume computes it and begins in
the middle, without reading or drawing anything on the way. Processes, batches and excluded samples are handled
elsewhere (`shards.py`, `batches.py`, `filter.py`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from trainwright.data.cursor import Cursor, OrderKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Any: samplers are the user's own types, and they yield indices into the user's dataset.


class Exclusion(Enum):
    """How an epoch changes without excluded samples; each kind has its `Filter`."""

    SHORTER_EPOCHS = auto()
    SMALLER_BATCHES = auto()
    SAME_SHARES = auto()


class Order(ABC):
    """The indices of each epoch, of samples or of groups of samples."""

    seed: int | None = None  # base of the order; None if the order comes from elsewhere
    unit: str | None = None  # the settings that define a group; None if an index is a single sample
    gives_groups: ClassVar[bool] = False  # an index is a group of samples that forms a batch
    is_counted = False  # its length is only a claim, which is compared with the number of indices it yields
    is_computable = True  # the indices of an epoch can be computed at any time, any number of times
    exclusion = Exclusion.SMALLER_BATCHES

    samples_per_epoch: int | None = None  # set if it differs from the dataset's number of samples
    source_starts: Sequence[int] = (0,)  # first samples of the sources whose shares it keeps

    @abstractmethod
    def indices(self, epoch: int) -> Iterable[Any]:
        """Returns the indices of an epoch, in order."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of indices in an epoch, the same for every epoch."""

    @abstractmethod
    def describe(self) -> OrderKind:
        """Returns everything that the order depends on besides seed and epoch; stored in checkpoints."""

    def indices_from(self, epoch: int, first: int) -> Iterator[Any]:
        """Yields the indices of an epoch from position `first` on."""
        return itertools.islice(self.indices(epoch), first, None)

    def continue_from(self, cursor: Cursor) -> str:
        """Adopts the settings that define the samples from a checkpoint's order of its kind.

        Returns a message about it.
        """
        return ""

    def draw(self, epoch: int) -> Iterator[Any] | None:
        """Returns the indices of an epoch if random numbers of this process decide them, else None."""
        return None


@dataclass(eq=False)
class Permutation(Order):
    """Each sample once per epoch, in an order that is a function of seed and epoch."""

    num_samples: int
    seed: int
    exclusion = Exclusion.SHORTER_EPOCHS

    def __len__(self) -> int:
        return self.num_samples


class ShuffledOrder(Permutation):
    """A new permutation for each epoch, as drawn by a fresh torch generator with `seed + epoch`."""

    def indices(self, epoch: int) -> Iterable[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def describe(self) -> OrderKind:
        return {"kind": "permutation"}


ROUNDS = 8
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # in 64 bits; its multiples are spread evenly
BLOCK = 8192  # indices computed at once: 64 KiB
Numbers: TypeAlias = "NDArray[np.uint64]"


class FeistelOrder(Permutation):
    """A new permutation for each epoch in constant memory, computed index by index from seed, epoch and position.

    A Feistel network permutes the numbers of a given bit width, whatever its round function is (M. Luby and C.
    Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Computing 17(2), 1988).
    For n samples it uses the smallest bit width that holds n - 1; a result of n or more is passed through again until
    it is below n, which makes it a permutation of 0 to n - 1 ("cycle walking": J. Black and P. Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002). Fewer than half of the numbers are too large, so a number takes two passes
    on average, at most. The round function is the finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, OOPSLA
    2014), keyed by seed, epoch and round.
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

    def order_passes(self, positions: Numbers, passes: Numbers) -> Numbers:
        """Returns the samples at some positions, each of its own pass, in an order different from the epochs'."""
        return self.at(positions, random_bits(self._keys(0)[:, None] + (passes + np.uint64(1)) * GOLDEN_RATIO))

    def at(self, positions: Numbers, keys: Numbers) -> Numbers:
        """Returns the samples at some positions, of one permutation or, with a key per position, of several."""
        bits = max((self.num_samples - 1).bit_length(), 2)
        found = _network(positions, bits, keys)
        while len(outside := np.flatnonzero(found >= self.num_samples)):
            found[outside] = _network(found[outside], bits, keys if keys.ndim == 1 else keys[:, outside])
        return found


def _network(numbers: Numbers, bits: int, keys: Numbers) -> Numbers:
    """Runs one pass; with an odd number of bits, the halves differ by one bit and swap sizes every round."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high = numbers >> np.uint64(low_bits)
    low = numbers & np.uint64((1 << low_bits) - 1)
    for key in keys:  # (high, low) -> (low, high xor f(low)), with their widths
        mixed = high ^ (random_bits(low + key) & np.uint64((1 << high_bits) - 1))
        high = low
        low = mixed
        high_bits, low_bits = low_bits, high_bits
    numbers = (high << np.uint64(low_bits)) | low
    return numbers


def random_bits(numbers: Numbers) -> Numbers:
    """Returns 64-bit numbers that look random, each a function of its input number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers = numbers ^ (numbers >> np.uint64(31))
    return numbers


class SamplerOrder(Order):
    """The order of a sampler, which may use this process's random generators when an epoch starts."""

    is_counted = True

    def __init__(self, sampler: Any, describe: Callable[[], OrderKind] | None = None) -> None:
        self.sampler = sampler  # has a length and can be iterated once per epoch
        if isinstance(sampler, range) or type(sampler) is SequentialSampler:
            self.exclusion = Exclusion.SHORTER_EPOCHS
            self.is_counted = False
        else:
            self.is_computable = False
        self._describe = describe  # returns the kind of the order; default: the class name of the sampler
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
            own: OrderKind = {"kind": "sampler", "sampler": name}
            self._kind = own if self._describe is None else self._describe()
        return self._kind
