"""A search in two processes: what both find, which trials were pruned, and how their weights end."""

import sys
from pathlib import Path
from typing import Any

import optuna

from tests._support.small import make_trainer
from tests._support.two_processes import tell
from tests.search.small import asked_parts, space

FOLDER = Path(sys.argv[1])


class Second(optuna.pruners.BasePruner):
    """Prunes the second trial at its second evaluation."""

    def prune(self, study: optuna.Study, trial: Any) -> bool:
        return trial.number == 1 and trial.last_step == 4


def trainer(folder: Path, **settings: Any) -> Any:
    given = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 6}
    return make_trainer(folder, **asked_parts(), **given | settings)


searching = trainer(FOLDER / "search")
best = searching.hyperparameter_search(
    space, n_trials=3, sampler=optuna.samplers.RandomSampler(seed=3), pruner=Second(), load_best_trial=True
)
loaded = searching.evaluate()["eval_loss"]
alone = trainer(FOLDER / "alone", **best.hyperparameters)
alone.train()
same = all(
    (mine == other).all().item()
    for mine, other in zip(searching.model.parameters(), alone.model.parameters(), strict=True)
)
bad = "none"
try:
    searching.hyperparameter_search(lambda trial: {"learning_rat": 1.0}, n_trials=1)
except ValueError as error:
    bad = str(error)
tell(best=list(best[:3]), loaded=loaded, same=same, bad=bad, rate=searching.args.learning_rate)
