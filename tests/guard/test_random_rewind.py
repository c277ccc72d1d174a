"""Random states of before some draws, computed from those after them, are the ones that were there."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.checkpoint import rng
from trainwright.guard.random_rewind import rewound, same


@pytest.fixture(autouse=True)
def undisturbed() -> Any:
    with rng.unchanged_random_states():
        yield


def draw(num: int) -> tuple[Any, ...]:
    words = torch.randint(0, 2**31, (num,)).tolist(), [random.random() for _ in range(num)]
    return *words, np.random.rand(num).tolist(), torch.nn.functional.dropout(torch.ones(50), 0.5).tolist()


@pytest.mark.parametrize("before_it", [0, 1, 623, 624, 625, 3000])
@pytest.mark.parametrize("num", [0, 1, 2, 311, 312, 623, 624, 20_000])
def test_draws_are_taken_back(num: int, before_it: int) -> None:
    """Also those that cross the block of 624 words, and those after a fresh seed."""
    torch.manual_seed(before_it)
    random.seed(before_it)
    np.random.seed(before_it)
    draw(before_it)
    first, after = draw(num), rng.capture()
    draw(num)
    before = rewound(after, rng.capture())
    assert before is not None
    rng.restore(before)
    assert not same(before, after)
    assert draw(num) == first
    assert same(rng.capture(), after)


def test_a_generator_of_a_gpu_is_moved_back_by_its_offset() -> None:
    def state(offset: int) -> torch.Tensor:
        return torch.tensor([1234, offset]).view(torch.uint8)

    host = rng.capture()
    before = rewound({**host, "cuda": state(100)}, {**host, "cuda": state(116)})
    assert before is not None
    assert torch.equal(before["cuda"], state(84))
    several = rewound({**host, "cuda": [state(8), state(4)]}, {**host, "cuda": [state(12), state(4)]})
    assert several is not None
    assert [torch.equal(one, state(4)) for one in several["cuda"]] == [True, True]


def test_a_seed_in_between_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.guard.random_rewind.MOST_BLOCKS", 10)
    torch.manual_seed(1)
    after = rng.capture()
    torch.manual_seed(2)
    assert rewound(after, rng.capture()) is None
