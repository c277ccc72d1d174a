"""Random numbers of the stand-in: a generator for each device, apart from the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .device import NUM_DEVICES, index_of

_GENERATORS = [torch.Generator().manual_seed(number) for number in range(NUM_DEVICES)]


@contextmanager
def drawing_from(index: int, op: Any) -> Iterator[None]:
    """Lets the CPU's kernel of a random operation draw from the generator of a device."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    generator = _GENERATORS[index]
    of_the_host = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(of_the_host)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _GENERATORS[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _GENERATORS[index_of(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _GENERATORS]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(_GENERATORS, states, strict=False):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    _GENERATORS[index_of(None)].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in _GENERATORS:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return _GENERATORS[index_of(None)].initial_seed()
