"""Which changes of settings take less memory, the cheapest first. What each comes to is for others to find out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainwright.config.owned import batch_formers

if TYPE_CHECKING:
    from trainwright.config.protocol import Arguments

SMALLER = "somewhat slower"
ROUNDED = "rounded arithmetic"
RECOMPUTED = "about a third slower"
ANOTHER = "another optimizer: other numbers"


def changes(args: Arguments, *, can_bf16: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Settings and what they cost; first each alone, then together."""
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    by_samples = not batch_formers(args)
    factors = [k for k in (2, 4, 8, 16, 32, 64) if size % k == 0] if by_samples else []
    smaller = [{"per_device_train_batch_size": size // k, "gradient_accumulation_steps": steps * k} for k in factors]
    rounded = [{"bf16": True}] if can_bf16 and args.mixed_precision == "no" else []
    recomputed = [] if args.activation_checkpointing else [{"activation_checkpointing": True}]
    optim = str(getattr(args.optim, "value", args.optim))
    another = [{"optim": "adafactor"}] if optim.startswith("adamw") else []
    for settings in smaller:
        yield settings, SMALLER
    for settings in rounded:
        yield settings, ROUNDED
    for settings in recomputed:
        yield settings, RECOMPUTED
    together: dict[str, Any] = {}
    prices: list[str] = []
    for step, price in ((smaller[-1:], SMALLER), (recomputed, RECOMPUTED), (rounded, ROUNDED), (another, ANOTHER)):
        for settings in step:
            together, prices = together | settings, [*prices, price]
            if len(prices) > 1 or price is ANOTHER:
                yield dict(together), ", ".join(prices)
