"""Runs that evaluate beside training: `async_evaluation_script.py FOLDER BACKEND|alone|hang|resume`, for a test.

Others are `FOLDER train SETTINGS`, `never starts`, `never evaluates` and `forks and never evaluates`.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests._support.two_processes import tell
from tests.capabilities.async_evaluation.async_evaluations import EVERY, STEPS, errors, evaluations, make, timeless
from tests.capabilities.averages.average_runs import BACKENDS, weights_of
from tests.contract import doubles

FOLDER = Path(sys.argv[1])
RANK = int(os.environ.get("RANK", "0"))


class Hangs:
    """A metric that never comes."""

    def __init__(self, run: int) -> None:
        self.run = run

    def __call__(self, prediction: Any) -> dict[str, float]:
        if os.getpid() != self.run:
            (FOLDER / "child").write_text(str(os.getpid()))
            time.sleep(1000)
        return errors(prediction)


class NeverEvaluates(Hangs):
    """A metric that never comes, after a child of it was forked or not."""

    def __init__(self, run: int, *, forks: bool) -> None:
        super().__init__(run)
        self.forks = forks

    def __call__(self, prediction: Any) -> dict[str, float]:
        if os.getpid() != self.run and self.forks and os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        return super().__call__(prediction)


class NeverStarts(Hangs):
    """A metric that is never read in another process."""

    def __reduce__(self) -> Any:
        return never_read, (self.run,)


def never_read(run: int) -> NeverStarts:
    return NeverStarts(run)(None)  # type: ignore[return-value]


def run_alone(**parts: Any) -> None:
    trainer, _ = make(FOLDER / "beside", eval_async=True, save_async=False, **parts)
    trainer.train()
    told = {"evaluations": evaluations(trainer), "best": trainer.state.best_global_step}
    (FOLDER / "told").write_text(json.dumps(told))


def metrics_of(checkpoint: Path) -> dict[str, float]:
    """Metrics of an evaluation of a checkpoint in this process alone."""
    trainer, _ = make(FOLDER / "alone")
    trainer._load_from_checkpoint(str(checkpoint))
    return timeless(trainer.evaluate())


def refused(settings: dict[str, Any]) -> dict[str, Any]:
    """Why a run is refused, and the steps it had trained; a model of ZeRO stage 3 is in parts by a run before."""
    model = doubles.model()
    if "bf16" not in settings:
        make(FOLDER / "before", model=model, eval_strategy="no", load_best_model_at_end=False, **settings)[0].train()
    trainer, heard = make(FOLDER / "refused", model=model, eval_async=True, **settings)
    try:
        trainer.train()
    except ValueError as error:
        return {"reason": str(error), "trained": heard.trained}
    return {"reason": "it trains", "trained": heard.trained}


def compared(backend: str) -> dict[str, Any]:
    settings = {**BACKENDS[backend], "load_best_model_at_end": False}
    without, _ = make(FOLDER / "without", eval_strategy="no", **settings)
    without.train()
    of_without = weights_of(without)
    plain, _ = make(FOLDER / "plain", **settings)
    plain.train()
    of_plain = weights_of(plain)
    trainer, heard = make(FOLDER / "beside", eval_async=True, **settings)
    trainer.train()
    return {
        "heard": [(step, trained) for step, trained, _ in heard.evaluations],
        "weights": weights_of(trainer),
        "weights of a blocking run": of_plain,
        "weights of a run without evaluation": of_without,
        "best": trainer.state.best_global_step,
        "best of a blocking run": plain.state.best_global_step,
        "evaluations": evaluations(trainer),
        "evaluations of a blocking run": evaluations(plain),
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`")
    mode = sys.argv[2]
    if mode == "hang":
        make(FOLDER / "beside", eval_async=True, save_async=False, compute_metrics=Hangs(os.getpid()))[0].train()
    elif mode == "train":
        run_alone(**json.loads(sys.argv[3]))
    elif mode == "never starts":
        run_alone(compute_metrics=NeverStarts(os.getpid()))
    elif mode.endswith("never evaluates"):
        run_alone(compute_metrics=NeverEvaluates(os.getpid(), forks=mode.startswith("forks")))
    elif mode == "resume":
        trainer, _ = make(FOLDER / "beside", eval_async=True)
        trainer.train(resume_from_checkpoint=True)
        tell(evaluations=evaluations(trainer), best=trainer.state.best_global_step)
    elif mode == "alone":
        tell(metrics=[metrics_of(FOLDER / "beside" / f"checkpoint-{step}") for step in range(EVERY, STEPS + 1, EVERY)])
    elif mode.startswith("refused "):
        tell(**refused(BACKENDS[mode.removeprefix("refused ")]))
    else:
        tell(**compared(mode))
