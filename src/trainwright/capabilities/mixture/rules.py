"""Rules about `mixture` and `mixture_schedule`: what shares are, and who decides in which order samples come."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from trainwright.config.enums import word
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.construction import is_number
from trainwright.config.rules.stages import Stage, idle_family, rule

EXAMPLE = "{'code': 0.3, 'chat': 'all', 'web': '2 epochs'}"


def parse_share(value: object) -> tuple[float, bool]:
    """Parses the entry of a source in `mixture`; ValueError if it is neither a share nor a number of passes.

    Returns:
        The number, and whether it counts passes over the source ("all" is one pass) or is a share.
    """
    match = None
    if isinstance(value, str):
        match = re.fullmatch(r"(\S+) epochs?", "1 epoch" if value == "all" else value)
    number = float(match[1] if match else value)  # type: ignore[arg-type]
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise ValueError(value)
    return number, match is not None


def _find_share_problem(shares: object, name: str, *, takes_passes: bool) -> str | None:
    if not isinstance(shares, Mapping) or not shares:
        return f"{name}={shares!r} is not a dict of shares. Write it as {EXAMPLE}."
    parsed = []
    for source, value in shares.items():
        try:
            parsed.append(parse_share(value))
        except (ValueError, TypeError):
            return f"{name}: {value!r} of {source!r} is neither a share from 0 up nor passes, as in {EXAMPLE}."
    by_pass = [source for source, (_, passes) in zip(shares, parsed, strict=True) if passes]
    sums = [0.0, 0.0]
    for number, passes in parsed:
        sums[passes] += number
    if by_pass and not takes_passes:
        return f"{name}: {shares[by_pass[0]]!r} of {by_pass[0]!r} counts passes; a schedule has shares alone."
    if sum(sums) == 0:
        return f"{name}={shares!r} has no share above 0."
    if by_pass and (sums[0] >= 1 or sums[1] == 0):
        return (
            f"{name}={shares!r}: since {by_pass[0]!r} is counted in passes, the other shares must sum to less than 1."
        )
    return None


@rule(Stage.CONSTRUCTION, "mixture", "mixture_schedule")
def source_shares(args: Arguments) -> str | None:
    mixture = get_value(args, "mixture")
    schedule = get_value(args, "mixture_schedule")
    if mixture is not None:
        both = "mixture and mixture_schedule both set the training data. Keep only one."
        return _find_share_problem(mixture, "mixture", takes_passes=True) or (None if schedule is None else both)
    if schedule is None:
        return None
    form = "Write it as [(0, {'code': 0.3, 'chat': 0.7}), (1000, {...})], the first entry at 0."
    if not isinstance(schedule, (list, tuple)) or not schedule:
        return f"mixture_schedule={schedule!r} is not a list of stages. {form}"
    before = None
    for number, stage in enumerate(schedule):
        if not isinstance(stage, (list, tuple)) or len(stage) != 2 or not is_number(stage[0]):
            return f"mixture_schedule: {stage!r} is not a pair of a step and shares. {form}"
        start, shares = stage
        if (number == 0 and start != 0) or (before is not None and start <= before):
            return f"mixture_schedule: an entry at {start!r} after {before!r} is out of order. {form}"
        if number and (isinstance(start, float) != isinstance(schedule[1][0], float) or start != start):
            return (
                f"mixture_schedule mixes steps (1000) and shares of the run (0.5) at {start!r}. Use only one of them."
            )
        if isinstance(start, float) and start > 1:
            return f"mixture_schedule: {start!r} is not a share of the run, which ends at 1.0; steps are whole numbers."
        if problem := _find_share_problem(shares, f"mixture_schedule at {start!r}", takes_passes=False):
            return problem
        if set(shares) != set(schedule[0][1]):
            return f"mixture_schedule at {start!r} names {', '.join(shares)}; each entry needs the same sources."
        before = start
    return None


@rule(Stage.CONSTRUCTION, "mixture", "mixture_schedule", "train_sampling_strategy")
def mixtures_have_their_order(args: Arguments) -> str | None:
    asked = [name for name in ("mixture", "mixture_schedule") if get_value(args, name) is not None]
    strategy = word(args.train_sampling_strategy)
    if not asked or strategy in ("random", "sequential"):
        return None
    return (
        f"{asked[0]} decides in which order samples come, and train_sampling_strategy={strategy!r} does too. Use "
        "'random', or 'sequential' for each source in its own order; max_tokens_per_batch saves padding."
    )


@rule(Stage.ADVICE, "mixture_unit", "mixture", "mixture_schedule")
def share_unit(args: Arguments) -> str | None:
    if get_value(args, "mixture") or get_value(args, "mixture_schedule"):
        return None
    return idle_family(args, ("mixture_unit",), "without mixture")


@rule(Stage.ADVICE, "mixture_schedule_type", "mixture_schedule")
def schedule_type(args: Arguments) -> str | None:
    if get_value(args, "mixture_schedule"):
        return None
    return idle_family(args, ("mixture_schedule_type",), "without mixture_schedule")
