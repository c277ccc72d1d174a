"""Rules about `average`: what it may be, and that the best checkpoint is not judged by what does not exist yet."""

from __future__ import annotations

from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, evaluates_again, rule


@evaluates_again
def averaged_weights(args: Arguments) -> str | None:
    """Each set is evaluated with the average too, under its name."""
    return None if get_value(args, "average") is None else "average"


@rule(Stage.CONSTRUCTION, "average")
def known_average(args: Arguments) -> str | None:
    wanted = get_value(args, "average")
    if wanted is None:
        return None
    from trainwright.capabilities.averages.plan import parse_average

    try:
        parse_average(wanted)
    except ValueError as error:
        return f"average={wanted!r}: {error}"
    return None


@rule(Stage.CONSTRUCTION, "average", "metric_for_best_model", "load_best_model_at_end")
def best_by_the_average(args: Arguments) -> str | None:
    """The first evaluation has this metric only if the average begins with the run; the best weights are not it."""
    metric = str(args.metric_for_best_model).removeprefix("eval_")
    wanted = get_value(args, "average")
    if wanted is None or not metric.startswith("average_"):
        return None
    start = wanted.get("start", 0) if isinstance(wanted, dict) else 0
    if start:
        return (
            f"metric_for_best_model={args.metric_for_best_model!r} is of the average, which begins later "
            f"(start={start!r}), so the first evaluations do not have it. Set start=0, or name another metric."
        )
    if args.load_best_model_at_end:
        return (
            f"load_best_model_at_end=True loads the weights themselves, and metric_for_best_model="
            f"{args.metric_for_best_model!r} is of their average. Set load_best_model_at_end=False, and write the "
            "average of the best checkpoint with `trainwright export CHECKPOINT DIR --weights average`."
        )
    return None
