"""Random states of before a step, computed from those after it, so that no step copies them. No generator is touched.

Python's, numpy's and torch's CPU generator are a Mersenne Twister: a block of 624 words that is replaced as a whole
when all have been given out. The replacement can be inverted, so a state can be moved back by any number of words. How
many a step has drawn is counted between two states: the forward pass is run again from the state after the step.

    before the step    block 7, 600 words given out
    after it           block 8,  26 words given out       50 words were drawn: 624 - 600 + 26
    repeated from it   block 8,  76 words given out       the same 50 words, counted; so 50 words are taken back

A CUDA generator counts what it has given out, so its state is moved back by a subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

States: TypeAlias = dict[str, Any]  # generator -> its state, as `checkpoint.rng.capture` returns them
Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"

BLOCK, SHIFT = 624, 397
HIGH, LOW = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
XOR = np.uint32(0x9908B0DF)
ONE = np.uint32(1)
MOST_BLOCKS = 50_000  # that are counted: 31 million words, about two seconds

# torch's state: seed (8 bytes), words left (4), whether it is seeded (4), next word (8), 624 words of 8 bytes, rest.
LEFT, NEXT, FIRST_WORD = slice(8, 12), slice(16, 24), 24
LAST_WORD = FIRST_WORD + 8 * BLOCK


@dataclass(frozen=True, slots=True)
class Twister:
    """A Mersenne Twister: its block, and how many words of it are given out."""

    block: Words
    given: int

    def words_until(self, other: Twister) -> int | None:
        """Counts the words between this state and a later one; None if `other` is not within reach."""
        block = self.block
        for number in range(MOST_BLOCKS):
            num_words = BLOCK * number + other.given - self.given
            if num_words >= 0 and np.array_equal(block, other.block):
                return num_words
            block = next_block(block)
        return None

    def back(self, num_words: int) -> Twister:
        """Returns the state `num_words` words before this one."""
        block, given = self.block, self.given - num_words
        while given <= 0:  # torch takes a block of which nothing is given out for damaged
            block, given = block_before(block), given + BLOCK
        return Twister(block, given)


def next_block(old: Words) -> Words:
    """Returns the words that follow a block."""
    new = np.empty_like(old)
    mixed = _mix((old & HIGH) | (np.roll(old, -1) & LOW))
    for first, last in ((0, 227), (227, 454), (454, BLOCK - 1)):  # each needs the words of the one before it
        shifted = old[first + SHIFT : last + SHIFT] if first == 0 else new[first - 227 : last - 227]
        new[first:last] = shifted ^ mixed[first:last]
    new[-1] = new[SHIFT - 1] ^ _mix((old[-1:] & HIGH) | (new[:1] & LOW))[0]
    return new


def block_before(new: Words) -> Words:
    """Returns the block that `next_block` made `new` of."""
    old = np.empty_like(new)
    later = _unmix(new[227:] ^ new[:-227])  # of words 227 to 623: the high bit of each and the rest of the next one
    old[228:] = (later[1:] & HIGH) | (later[:-1] & LOW)
    sooner = _unmix(new[:227] ^ old[SHIFT:])
    old[1:228] = (np.concatenate((sooner[1:], later[:1])) & HIGH) | (sooner & LOW)
    last = _unmix(old[-1:] ^ old[SHIFT - 1 : SHIFT])  # of the block before `old`; a seed has other low bits, never used
    old[0] = (sooner[0] & HIGH) | (last[0] & LOW)
    return old


def _mix(words: Words) -> Words:
    mixed: Words = (words >> ONE) ^ np.where(words & ONE, XOR, np.uint32(0))
    return mixed


def _unmix(words: Words) -> Words:
    is_odd = (words & HIGH) != 0
    words = np.where(is_odd, ((words ^ XOR) << ONE) | ONE, words << ONE)
    return words


def rewound(after: States, repeated: States) -> States | None:
    """Returns the states of before some draws, given those after them and those after the same draws from there.

    None if a generator drew too much to count it, or was seeded.
    """
    result: States = {}
    for name, state in after.items():
        if name in ("cuda", "mps"):
            result[name] = _rewound_device(state, repeated[name]) if name == "cuda" else state
            continue
        here, there = twister_of(name, state), twister_of(name, repeated[name])
        num_words = here.words_until(there)
        if num_words is None:
            return None
        result[name] = state if num_words == 0 else with_twister(name, state, here.back(num_words))
    return result


def same(one: States, other: States) -> bool:
    """Returns True if two states give the same numbers from now on."""
    return one.keys() == other.keys() and all(_same(name, one[name], other[name]) for name in one)


def _same(name: str, one: Any, other: Any) -> bool:
    if name in ("cuda", "mps"):
        pairs = [state if isinstance(state, list) else [state] for state in (one, other)]
        return len(pairs[0]) == len(pairs[1]) and all(map(torch.equal, *pairs))
    ours, theirs = twister_of(name, one), twister_of(name, other)
    return ours.given == theirs.given and np.array_equal(ours.block, theirs.block)


def twister_of(name: str, state: Any) -> Twister:
    """Returns the Mersenne Twister in the state of a generator: "python", "numpy" or "cpu" (torch's)."""
    if name == "python":
        return Twister(np.array(state[1][:-1], dtype=np.uint32), state[1][-1])
    if name == "numpy":
        return Twister(np.array(state[1], dtype=np.uint32), state[2])
    raw = state.numpy()
    left, following = raw[LEFT].view(np.int32)[0], raw[NEXT].view(np.int64)[0]
    words = raw[FIRST_WORD:LAST_WORD].view(np.uint64).astype(np.uint32)
    return Twister(words, BLOCK if left == 1 else int(following))


def with_twister(name: str, state: Any, twister: Twister) -> Any:
    """Returns the state of a generator with another Mersenne Twister in it; the rest is kept."""
    words = twister.block.tolist()
    if name == "python":
        return (state[0], (*words, twister.given), *state[2:])
    if name == "numpy":
        return (state[0], words, twister.given, *state[3:])
    changed = state.clone()
    raw = changed.numpy()
    raw[LEFT].view(np.int32)[0] = 1 if twister.given == BLOCK else BLOCK + 1 - twister.given
    raw[NEXT].view(np.int64)[0] = twister.given
    raw[FIRST_WORD:LAST_WORD].view(np.uint64)[:] = twister.block
    return changed


def _rewound_device(after: Any, repeated: Any) -> Any:
    """Moves states of CUDA generators back: a seed and an offset, 8 bytes each."""
    if isinstance(after, list):
        return [_rewound_device(one, other) for one, other in zip(after, repeated, strict=True)]
    values, others = (state.clone().view(torch.int64) for state in (after, repeated))
    values[1] -= others[1] - values[1]
    return values.view(torch.uint8)
