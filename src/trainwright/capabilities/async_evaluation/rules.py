"""Rules of evaluation in another process: who evaluates where, and what cannot wait for its metrics."""

from __future__ import annotations

from trainwright.config.enums import word
from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, idle_family, rule

SETTINGS_OF_PROCESS = ("eval_device", "eval_queue")


@rule(Stage.CONSTRUCTION, "eval_async", "eval_device")
def known_evaluator(args: Arguments) -> str | None:
    wanted = get_value(args, "eval_async")
    if not isinstance(wanted, bool) and wanted != "watch":
        return (
            f"eval_async={wanted!r} is not one of True (a process of the run evaluates), 'watch' (`trainwright eval "
            "RUN --data FILE --watch` does) and False."
        )
    device = get_value(args, "eval_device")
    kind, _, number = str(device).partition(":")
    is_known = kind.isalpha() and (number.isdigit() or str(device) == kind)
    if not is_known or (kind == "cpu" and number):
        return f"eval_device={device!r} is not a device. Write 'cpu', or an accelerator as kind, colon and number."
    return None


@rule(Stage.CONSTRUCTION, "eval_async", "save_strategy")
def best_is_known_at_its_step(args: Arguments) -> str | None:
    if not get_value(args, "eval_async") or args.save_strategy != "best":
        return None
    return (
        "save_strategy='best' saves a step when its evaluation is the best, and with eval_async the weights have moved "
        "on by then. Set save_strategy to 'steps' or 'epoch', with save_total_limit=1 and load_best_model_at_end=True "
        "to keep the best checkpoint and the newest."
    )


@rule(Stage.CONSTRUCTION, "eval_async", "lr_scheduler_type")
def rate_does_not_wait_for_metrics(args: Arguments) -> str | None:
    if not get_value(args, "eval_async") or args.lr_scheduler_type not in ("reduce_lr_on_plateau", "greedy"):
        return None
    return (
        f"lr_scheduler_type={word(args.lr_scheduler_type)!r} follows the metric of an evaluation, which comes steps "
        "later with eval_async: the weights would depend on how long one takes. Use another schedule, or "
        "eval_async=False."
    )


@rule(Stage.ADVICE, "eval_async", "eval_strategy", *SETTINGS_OF_PROCESS)
def evaluation_beside_nothing(args: Arguments) -> str | None:
    wanted = get_value(args, "eval_async")
    if not wanted:
        return idle_family(args, SETTINGS_OF_PROCESS, "without eval_async")
    if args.eval_strategy == "no":
        return "eval_async has no effect with eval_strategy='no': no evaluation is due."
    on_another = get_value(args, "eval_device") != "cpu"
    return "eval_device has no effect with eval_async='watch'." if wanted == "watch" and on_another else None
