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

    drawn, computed = order(), order(shuffle_method="feistel")
    assert order(shuffle_method="permutation") == drawn != computed
    assert sorted(computed) == sorted(drawn) == [*range(10)]
    assert order(shuffle_method="feistel", seed=77) != computed
    with pytest.raises(ValueError, match="shuffle_method='dice'"):
        bench.args(shuffle_method="dice")


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
