"""Evaluation in another process (`eval_async`): none if evaluations are not due, or the run waits for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.capability import Capability, Extension, Moment, Others, RunContext
from trainwright.config import resolve
from trainwright.config.fields import get_value
from trainwright.distributed.device import device_variables
from trainwright.distributed.world import without_launcher

if TYPE_CHECKING:
    from trainwright.capabilities.async_evaluation.evaluators import Evaluator
    from trainwright.capabilities.async_evaluation.requests import Requests

PROCESS = "trainwright.capabilities.async_evaluation.process:main"
WATCH = "watch"  # value of eval_async: processes of `trainwright eval RUN --watch` evaluate


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the extension through which another process evaluates."""
    args = context.args
    wanted = get_value(args, "eval_async")
    if not wanted or args.eval_strategy == "no":
        return None
    from trainwright.capabilities.async_evaluation.evaluators import Watchers
    from trainwright.capabilities.async_evaluation.extension import AsyncEvaluation

    def make_evaluator(requests: Requests) -> Evaluator:
        if wanted == WATCH:
            return Watchers(requests)
        limit_s = float(get_value(args, "hang_timeout")) or None
        device = str(get_value(args, "eval_device"))

        def freeze(path: Path) -> None:
            context.freeze(
                path,
                device=device,
                settings={"eval_async": False},
                asked_by="eval_async=True",
                instead="set eval_async=False",
            )

        return evaluation_process(freeze, requests, device=device, limit_s=limit_s)

    return AsyncEvaluation(
        context.folder,
        context.engine,
        context.hooks,
        make_evaluator=make_evaluator,
        skips=get_value(args, "eval_queue") == "skip",
        is_timed=resolve.checkpoint(args).max_train_s is not None,
        rotate=context.rotate,
    )


def evaluation_process(
    freeze: Callable[[Path], None], requests: Requests, *, device: str, limit_s: float | None = None
) -> Evaluator:
    """Returns the process that evaluates for a run, to be started.

    Args:
        freeze: writes the parts of the trainer that the process needs.
        requests: of the run.
        device: of the process.
        limit_s: how long it may take for a batch, in seconds; None: hours.
    """
    from trainwright.capabilities.async_evaluation.evaluators import EVALUATION_LIMIT_S, EvaluationProcess
    from trainwright.support.child_process import module_command, module_environment
    from trainwright.support.scratch import make_scratch_folder

    scratch = make_scratch_folder("evaluation")
    path = scratch / "trainer.pt"
    try:
        freeze(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    environment = module_environment(without_launcher(os.environ) | device_variables(device))
    command = module_command("trainwright.run.thaw", PROCESS, str(path), str(os.getpid()))
    limit_s = EVALUATION_LIMIT_S if limit_s is None else limit_s
    return EvaluationProcess(command, environment, scratch=scratch, requests=requests, limit_s=limit_s)


CAPABILITY = Capability(make=make, moment=Moment.DIRECTORY)
