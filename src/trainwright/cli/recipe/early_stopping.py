"""Early stopping as a file sets it, in the words of EarlyStoppingCallback, and the settings that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright._types import JSONObject

PATIENCE = "early_stopping_patience"
THRESHOLD = "early_stopping_threshold"
# Entries of `training` that are no arguments, with their help.
ENTRIES = {
    PATIENCE: "Stop after this number of evaluations in a row without a better metric_for_best_model.",
    THRESHOLD: "By how much the metric must beat the best one to count as better (null: 0).",
}


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Arguments of EarlyStoppingCallback.

    Attributes:
        patience: evaluations in a row without a better metric, after which the run stops.
        threshold: by how much the metric must beat the best one.
        follows: settings of `training` that were made for it.
    """

    patience: int
    threshold: float = 0.0
    follows: tuple[str, ...] = ()

    def to_entries(self) -> JSONObject:
        """Returns the entries of `training` that say the same."""
        return {PATIENCE: self.patience, **({THRESHOLD: self.threshold} if self.threshold else {})}

    def described(self) -> str:
        """Describes it in a line."""
        made = f" (set for it: {', '.join(self.follows)})" if self.follows else ""
        number = f"{self.patience} evaluations" if self.patience != 1 else "1 evaluation"
        return f"after {number} without a better metric{made}"


def take_early_stopping(training: JSONObject) -> EarlyStopping | None:
    """Takes the entries out of `training`, and adds what follows from them; None without a patience."""
    given = {name: training.pop(name, None) for name in ENTRIES}
    if given[PATIENCE] is None:
        return None
    follows = _find_settings(training)
    training |= follows
    return EarlyStopping(
        patience=given[PATIENCE],
        threshold=given[THRESHOLD] or 0.0,
        follows=tuple(f"{name}={value}" for name, value in follows.items()),
    )


def _find_settings(training: JSONObject) -> JSONObject:
    """Returns the settings that the file leaves open: evaluations, a save at each, and the best model at the end."""
    found: JSONObject = {}
    if "eval_strategy" not in training:
        # Evaluations go where the saves are, so that the best model is one that was saved.
        saves = training.get("save_strategy")
        found["eval_strategy"] = (
            "steps" if saves == "steps" or (saves is None and "save_steps" in training) else "epoch"
        )
        if found["eval_strategy"] == "steps" and "eval_steps" not in training and "save_steps" in training:
            found["eval_steps"] = training["save_steps"]
    strategy = training.get("eval_strategy", found.get("eval_strategy"))
    if "save_strategy" not in training and strategy != "no":
        found["save_strategy"] = strategy
        if strategy == "steps" and "save_steps" not in training and "eval_steps" in training:
            found["save_steps"] = training["eval_steps"]
    if "load_best_model_at_end" not in training:
        found["load_best_model_at_end"] = True
    if "metric_for_best_model" not in training:
        found["metric_for_best_model"] = "loss"
    return {name: value for name, value in found.items() if training.get(name) != value}


def find_problems(training: JSONObject) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the problems of the entries, in a `training` as the file has it."""
    patience = training.get(PATIENCE)
    threshold = training.get(THRESHOLD)
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
        yield ("training", PATIENCE), f"training.{PATIENCE}: {patience!r} is not a whole number of at least 1."
    if threshold is not None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < float("inf"):
            yield ("training", THRESHOLD), f"training.{THRESHOLD}: {threshold!r} is not a number of at least 0."
        elif patience is None:
            yield ("training", THRESHOLD), f"training.{THRESHOLD} has no effect without {PATIENCE}. Set both."
    if patience is not None and training.get("eval_strategy", "epoch") in ("no", False, None):
        yield (
            ("training", "eval_strategy"),
            f"training.eval_strategy: {PATIENCE} counts evaluations, and there are none. Remove the entry, or set it "
            "to steps or epoch.",
        )
