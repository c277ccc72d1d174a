"""Changes of settings that take less memory, the cheapest first, without their effect on the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from trainwright.config.fields import batch_formers
from trainwright.config.protocol import Arguments

Settings: TypeAlias = dict[str, bool | int | str]

SMALLER = "somewhat slower"
ROUNDED = "rounded arithmetic"
RECOMPUTED = "about a third slower"
ANOTHER = "another optimizer: other numbers"


def changes(args: Arguments, *, can_bf16: bool) -> Iterator[tuple[Settings, str]]:
    """Yields settings that take less memory, with their price: first each alone, then together.

    Args:
        args: arguments of the run.
        can_bf16: whether the device computes in bfloat16.
    """
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    by_samples = not batch_formers(args)
    factors = [k for k in (2, 4, 8, 16, 32, 64) if size % k == 0] if by_samples else []
    smaller: list[Settings] = [
        {"per_device_train_batch_size": size // k, "gradient_accumulation_steps": steps * k} for k in factors
    ]
    rounded: list[Settings] = [{"bf16": True}] if can_bf16 and args.mixed_precision == "no" else []
    recomputed: list[Settings] = [] if args.activation_checkpointing else [{"activation_checkpointing": True}]
    optim = str(getattr(args.optim, "value", args.optim))
    another: list[Settings] = [{"optim": "adafactor"}] if optim.startswith("adamw") else []
    for single, price in ((smaller, SMALLER), (rounded, ROUNDED), (recomputed, RECOMPUTED)):
        yield from ((settings, price) for settings in single)
    together: Settings = {}
    prices: list[str] = []
    for step, price in ((smaller[-1:], SMALLER), (recomputed, RECOMPUTED), (rounded, ROUNDED), (another, ANOTHER)):
        for settings in step:
            together, prices = together | settings, [*prices, price]
            if len(prices) > 1 or price is ANOTHER:
                yield dict(together), ", ".join(prices)
