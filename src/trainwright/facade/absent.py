"""Published names that this version does not carry out yet; each says so, and what to do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from trainwright.errors import NotYetError


class AbsentHooks:
    """Hyperparameter search."""

    def hyperparameter_search(
        self,
        hp_space: Callable[..., Any] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[..., str] | None = None,
        **kwargs: Any,
    ) -> Any:
        _not_yet("hyperparameter_search", "Call train() in a loop over settings meanwhile.")

    def _hp_search_setup(self, trial: Any) -> None:
        """Takes a trial's settings over; without a trial there is nothing to do."""
        if trial is not None:
            _not_yet("hyperparameter_search", "Set the arguments yourself and call train() without a trial.")

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Tells a search how a trial does; without a trial there is nothing to do."""

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        _not_yet("hyperparameter_search", "Ray Tune is not connected; save with save_model().")


def _not_yet(name: str, instead: str) -> NoReturn:
    raise NotYetError(f"{name} is not in this version of Trainwright. {instead}")
