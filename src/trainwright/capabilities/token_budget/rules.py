"""Rules about `max_tokens_per_batch`: a number of samples does not go with it, and no batch is incomplete."""

from __future__ import annotations

from trainwright.config.fields import SETTINGS, get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, all_set, rule


@rule(Stage.CONSTRUCTION, "per_device_train_batch_size", "max_tokens_per_batch")
def a_budget_or_a_batch_size(args: Arguments) -> str | None:
    budget = get_value(args, "max_tokens_per_batch")
    if budget is None or args.per_device_train_batch_size == SETTINGS["per_device_train_batch_size"].default:
        return None
    return (
        f"max_tokens_per_batch={budget} and per_device_train_batch_size={args.per_device_train_batch_size} both "
        "set the batch size. Keep only one."
    )


_said = "dataloader_drop_last has no effect with max_tokens_per_batch: every batch is as full as it can be."
all_set(Stage.ADVICE, "last_batch_of_a_budget", _said, "dataloader_drop_last", "max_tokens_per_batch")
