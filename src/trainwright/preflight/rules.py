"""The rule of `speed`: which settings it may name."""

from __future__ import annotations

from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, rule

LEVERS = (
    "attn_implementation",
    "dataloader_num_workers",
    "eval_sampling_strategy",
    "gradient_accumulation_steps",
    "loss_kernel",
    "optim",
    "pad_to_multiple_of",
    "per_device_train_batch_size",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "train_sampling_strategy",
)


@rule(Stage.CONSTRUCTION, "speed")
def known_levers(args: Arguments) -> str | None:
    speed = get_value(args, "speed")
    if speed in (None, "auto") or (isinstance(speed, dict) and set(speed) <= {*LEVERS}):
        return None
    return (
        f"speed={speed!r} is not 'auto', None, or settings among {', '.join(LEVERS)}, as {{'loss_kernel': 'chunked'}}."
    )
