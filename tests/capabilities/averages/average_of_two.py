"""Averages in two processes, over a resume: `average_of_two.py FOLDER BACKEND...`. The test beside it judges."""

import sys
import warnings
from pathlib import Path
from typing import Any

from tests._support.two_processes import tell
from tests.capabilities.averages.average_runs import BACKENDS, KINDS, average_of, make
from tests.contract import doubles

FOLDER = Path(sys.argv[1])


def values(average: dict[str, Any]) -> dict[str, Any]:
    return {name: value.flatten().tolist() for name, value in average.items()}


def compared(backend: str, kind: str) -> dict[str, Any]:
    """A run, and the same run cut off and resumed: their averages and the metrics of these."""
    settings = BACKENDS[backend]
    place = FOLDER / f"{backend} {kind}"
    whole = make(place / "whole", kind, size=2, **settings)
    whole.train()
    cut = make(place / "cut", kind, size=2, **settings, save_steps=3)
    cut.train()
    again = make(place / "cut", kind, size=2, **settings)
    again.train(resume_from_checkpoint=str(place / "cut" / "checkpoint-3"))
    metrics = [entry["eval_average_loss"] for entry in whole.state.log_history if "eval_average_loss" in entry]
    return {
        "average": values(average_of(place / "whole" / "checkpoint-6")),
        "resumed": values(average_of(place / "cut" / "checkpoint-6")),
        "metrics": metrics,
    }


def refused(settings: dict[str, Any]) -> str:
    try:
        doubles.trainer(FOLDER / "refused", settings={"average": "ema", **settings}).train()
    except ValueError as error:
        return str(error)
    return "it trains"


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`")
    for backend in sys.argv[2:]:
        if backend.startswith("refused "):
            name = backend.removeprefix("refused ")
            tell(**{name: refused(BACKENDS[name])})
            continue
        backend, _, kinds = backend.partition(" of ")
        for kind in KINDS if kinds else ("exponential",):
            tell(**{f"{backend}: {kind}": compared(backend, kind)})
