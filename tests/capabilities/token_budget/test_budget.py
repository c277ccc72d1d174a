"""Token budgets: each sample once, and no batch above the budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwright.capabilities.token_budget.batcher import TokenBudget

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(LENGTHS, st.integers(40, 200), st.sampled_from([None, 8]), st.integers(0, 3))
def test_no_batch_is_above_the_budget(lengths: list[int], budget: int, multiple: int | None, epoch: int) -> None:
    order = TokenBudget(lengths, budget, seed=1, multiple_of=multiple)
    batches = list(order.indices(epoch))
    step = multiple or 1
    assert len(batches) == len(order)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) * -(-max(lengths[i] for i in batch) // step) * step <= budget for batch in batches)


def test_a_budget_is_used() -> None:
    lengths = np.random.default_rng(0).lognormal(3.2, 1.1, 4000).astype(int).clip(1, 512)
    assert lengths.sum() / TokenBudget(lengths, 4096, seed=0).num_tokens(0) > 0.9
