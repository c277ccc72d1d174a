"""Checks of our fields that decide the order of samples and what is random in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .bench import Bench
from .table import shows


class Reads(list[Any]):
    """Ten samples that remember in which order they were read."""

    def __init__(self) -> None:
        super().__init__({"x": torch.tensor([i / 10, 1.0]), "labels": i % 2} for i in range(10))
        self.order: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.order.append(int(index))
        return super().__getitem__(index)


@shows("shuffle_method")
def the_order_is_computed_instead_of_drawn(bench: Bench) -> None:
    from .our_fields import MeanOfLabels

    def order(**settings: Any) -> list[int]:
        reads = Reads()
        bench.train(model=MeanOfLabels(), train_dataset=reads, num_train_epochs=1, max_steps=-1, **settings)
        return reads.order

    drawn = order()
    computed = order(shuffle_method="feistel")
    assert order(shuffle_method="permutation") == drawn != computed
    assert sorted(computed) == sorted(drawn) == [*range(10)]
    assert order(shuffle_method="feistel", seed=77) != computed
    with pytest.raises(ValueError, match="shuffle_method='dice'"):
        bench.args(shuffle_method="dice")


@shows("mixture", "mixture_unit", "mixture_schedule", "mixture_schedule_type")
def sources_have_their_shares(bench: Bench) -> None:
    """Ten rows of one token, and ten of three."""
    from .our_fields import MeanOfLabels

    def share(start: int, **settings: Any) -> float:
        sets = {name: Reads() for name in ("short", "long")}
        order: list[int] = []
        for number, (name, rows) in enumerate(sets.items()):
            rows[:] = [{**row, "input_ids": [0] * (1 + 2 * number)} for row in rows]
            rows.order = Tagged(order, name)
        bench.train(model=MeanOfLabels(), train_dataset=sets, max_steps=10, **settings)
        found: list[Any] = order[start : start + 10]
        return found.count("short") / 10

    half = {"short": 0.5, "long": 0.5}
    assert share(0, mixture={"short": 0.2, "long": 0.8}) == 0.2
    assert share(0, mixture=half) == 0.5
    # Every row is read first to measure it.
    assert share(20, mixture=half, mixture_unit="tokens") in (0.7, 0.8)
    staged: dict[str, Any] = {
        "mixture_schedule": [(0, {"short": 1.0, "long": 0.0}), (1.0, {"short": 0.0, "long": 1.0})]
    }
    assert share(0, **staged) == 1.0
    assert 0.5 < share(0, **staged, mixture_schedule_type="linear") < 1.0


class Tagged(list[int]):
    """Notes a name in place of what is appended."""

    def __init__(self, notes: list[Any], name: str) -> None:
        super().__init__()
        self.notes = notes
        self.name = name

    def append(self, value: int) -> None:
        self.notes.append(self.name)


class Noisy(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def __getitem__(self, index: Any) -> Any:
        self.drawn.append(float(torch.rand(())))
        return super().__getitem__(index)


@shows("seed_samples")
def a_sample_draws_the_same_wherever_it_comes(bench: Bench) -> None:
    from .our_fields import MeanOfLabels

    def drawn(**settings: Any) -> dict[int, float]:
        noisy = Noisy()
        bench.train(model=MeanOfLabels(), train_dataset=noisy, num_train_epochs=1, max_steps=-1, **settings)
        return dict(zip(noisy.order, noisy.drawn, strict=True))

    seeded = drawn(seed_samples=True)
    assert seeded == drawn(seed_samples=True, per_device_train_batch_size=3)
    assert len({*seeded.values()}) == 10
    assert drawn() != seeded
