"""The order in which metrics are shown: those that measure the task before what a trainer reports in passing."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Reported by TRL's trainers beside the metrics of the task; the least telling come last.
BY_PRODUCTS = tuple(
    re.compile(rf"(^|_){pattern}$")
    for pattern in (
        "mean_token_accuracy",
        "rewards/(chosen|rejected)",
        "(mean|min|max)_reward",
        "logps/.+",
        "logits/.+",
        "entropy",
        "num_tokens",
    )
)


def order_metrics(names: Iterable[str]) -> list[str]:
    """Returns the names in their order, with by-products of the training at the end."""
    return sorted(names, key=_rank)


def _rank(name: str) -> int:
    found = (rank for rank, pattern in enumerate(BY_PRODUCTS, start=1) if pattern.search(name))
    return next(found, 0)
