"""Runs that evaluate beside training: `async_evaluation_script.py FOLDER ddp|fsdp|hang|resume`. The test judges."""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests._support.two_processes import tell
from tests.contract import doubles
from tests.laws.async_evaluations import errors, evaluations, make
from tests.laws.average_runs import BACKENDS

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


def weights(trainer: Any) -> dict[str, Any]:
    return (
        {
            name: value.detach().flatten().tolist()
            for name, value in trainer._engine.whole_weights(trainer.model).items()
        }
        if trainer._engine.holds_parts
        else {name: v.flatten().tolist() for name, v in doubles.weights(trainer).items()}
    )


def compared(backend: str) -> dict[str, Any]:
    settings = {**BACKENDS[backend], "load_best_model_at_end": False}
    plain, _ = make(FOLDER / "plain", **settings)
    plain.train()
    of_plain = weights(plain)
    trainer, heard = make(FOLDER / "beside", eval_async=True, **settings)
    trainer.train()
    return {
        "heard": [(step, trained) for step, trained, _ in heard.evaluations],
        "weights": weights(trainer),
        "weights of a blocking run": of_plain,
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
    elif mode == "resume":
        trainer, _ = make(FOLDER / "beside", eval_async=True)
        trainer.train(resume_from_checkpoint=True)
        tell(evaluations=evaluations(trainer), best=trainer.state.best_global_step)
    else:
        tell(**compared(mode))
