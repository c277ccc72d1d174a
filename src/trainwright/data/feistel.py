"""A shuffled order in constant memory: a permutation that is computed index by index, from any position at once.

A Feistel network is a permutation of the numbers of so many bits, whatever its round function is (M. Luby and C.
Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Computing 17(2), 1988). For
n samples it runs on the least number of bits that holds n - 1; a result of n or more is put through again until it is
below n, which makes it a permutation of 0 to n - 1 ("cycle walking": J. Black and P. Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002). Less than half of the numbers are too large, so a number takes two passes on average at
most. The round function is the finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, OOPSLA 2014), keyed by seed,
epoch and round.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from trainwright.data.cursor import OrderKind
from trainwright.data.samplers import Order

ROUNDS = 8
BLOCK = 8192  # indices computed at a time: 64 KiB

Numbers = npt.NDArray[np.uint64]


class FeistelOrder(Order):
    """A new permutation for each epoch, a function of seed, epoch and index; nothing of it is stored."""

    is_permutation = True

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed: int = seed

    def __len__(self) -> int:
        return self.num_samples

    def describe(self) -> OrderKind:
        return {"kind": "feistel_permutation"}

    def indices(self, epoch: int, first: int = 0) -> Iterator[int]:
        """The order of an epoch from position `first` on."""
        keys = np.random.SeedSequence([self.seed % 2**64, epoch]).generate_state(ROUNDS, np.uint64).astype(np.uint64)
        for start in range(first, self.num_samples, BLOCK):
            yield from self.at(np.arange(start, min(start + BLOCK, self.num_samples), dtype=np.uint64), keys).tolist()

    def indices_from(self, epoch: int, first: int) -> Iterator[int]:
        return self.indices(epoch, first)  # computes what it is asked for, so nothing has to be passed over

    def at(self, positions: Numbers, keys: Numbers) -> Numbers:
        """The samples at some positions."""
        bits = max((self.num_samples - 1).bit_length(), 2)
        found = _network(positions, bits, keys)
        while len(outside := np.flatnonzero(found >= self.num_samples)):
            found[outside] = _network(found[outside], bits, keys)
        return found


def _network(numbers: Numbers, bits: int, keys: Numbers) -> Numbers:
    """One pass; with an odd number of bits the halves differ by one, and change places with every round."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = numbers >> np.uint64(low_bits), numbers & _mask(low_bits)
    for key in keys:  # (high, low) -> (low, high xor f(low)), with their widths
        high, low = low, high ^ (_mix(low + key) & _mask(high_bits))
        high_bits, low_bits = low_bits, high_bits
    found: Numbers = (high << np.uint64(low_bits)) | low
    return found


def _mix(numbers: Numbers) -> Numbers:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _mask(bits: int) -> np.uint64:
    mask: np.uint64 = np.uint64((1 << bits) - 1)
    return mask
