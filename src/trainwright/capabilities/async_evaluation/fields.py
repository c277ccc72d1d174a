"""The arguments of evaluation in another process: `eval_async`, its device and its queue."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, not_compared


class AsyncEvaluationFields(FieldGroup):
    """Whether another process evaluates, and how."""

    eval_async: bool | str = not_compared(
        False,
        "Evaluate in another process while training continues; watch: by `trainwright eval RUN --watch`.",
        bare_flag=True,
        since="0.3",
        place=52,
    )
    eval_device: str = not_compared(
        "cpu",
        "Device of the process of eval_async: cpu, or the kind and number of an accelerator that the run does not use.",
        since="0.3",
        place=53,
    )
    eval_queue: str = not_compared(
        "wait",
        "With eval_async, when two evaluations are open and a third is due: wait for the first, or skip the third.",
        choices=("wait", "skip"),
        since="0.3",
        place=54,
    )
