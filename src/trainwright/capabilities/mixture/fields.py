"""The arguments `mixture`, `mixture_unit`, `mixture_schedule` and `mixture_schedule_type`."""

from __future__ import annotations

from trainwright.config.setting import BY_RULES, FieldGroup, tunable

NEW_SHARES = "the new shares from here on; each source continues in its own order"


class MixtureFields(FieldGroup):
    """Shares of several datasets."""

    mixture: dict[str, float | str] | str | None = tunable(
        None,
        "Shares of the datasets of a dict: {name: 0.3, 'all' or '2 epochs'} (None: each row once an epoch).",
        on_resume=NEW_SHARES,
        syntax=("dict",),
        limits=BY_RULES,
        since="0.3",
        place=39,
    )
    mixture_unit: str = tunable(
        "samples",
        "Unit of the shares of mixture: samples, or tokens.",
        on_resume=NEW_SHARES,
        choices=("samples", "tokens"),
        since="0.3",
        place=40,
    )
    mixture_schedule: list[tuple[float, dict[str, float]]] | str | None = tunable(
        None,
        "Shares that change: [(0, {name: share}), (1000, {...})], by step, or by share of the run (0.5).",
        on_resume=NEW_SHARES,
        syntax=("dict",),
        limits=BY_RULES,
        since="0.3",
        place=41,
    )
    mixture_schedule_type: str = tunable(
        "stages",
        "How shares change from one entry of mixture_schedule to the next: stages (at its step), or linear.",
        on_resume=NEW_SHARES,
        choices=("stages", "linear"),
        since="0.3",
        place=42,
    )
