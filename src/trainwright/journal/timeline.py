"""Time of a run by phase for the console: the largest shares and their cures. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.state import clock


@dataclass(frozen=True, slots=True)
class Hint:
    """Cure for a phase that takes more than its share.

    Attributes:
        above: share of the wall time from which on it is worth saying.
    """

    above: float
    text: str


HINTS: dict[str, Hint] = {
    clock.DATA: Hint(0.1, "load in other processes: dataloader_num_workers"),
    clock.HOST_TO_DEVICE: Hint(0.1, "pin memory (dataloader_pin_memory) and copy without waiting (non_blocking)"),
    clock.LOGGING: Hint(0.05, "log less often: logging_steps"),
    clock.EVALUATION: Hint(0.3, "evaluate less often (eval_steps), or with a larger per_device_eval_batch_size"),
    clock.SAVING: Hint(0.1, "save less often: save_steps"),
    clock.CALLBACKS: Hint(0.05, "do less in each event of it"),
}


def summary(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, largest first, rounded to what matters."""
    return {phase: round(value, 4) for phase, value in sorted(seconds.items(), key=lambda item: -item[1]) if value > 0}


def line(seconds: Mapping[str, float]) -> str:
    """One line: the shares of the wall time above a hundredth, and what to change about the large ones."""
    total = sum(seconds.values())
    if total <= 0:
        return "time      nothing was measured"
    shares = {phase: value / total for phase, value in sorted(seconds.items(), key=lambda item: -item[1])}
    parts = ", ".join(f"{readable(phase)} {share:.0%}" for phase, share in shares.items() if share >= 0.01)
    said = [f"{readable(phase)}: {hint.text}" for phase, share in shares.items() if (hint := hint_for(phase, share))]
    return f"time      {total:.1f} s: {parts}" + "".join(f"\n          {one}" for one in said)


def hint_for(phase: str, share: float) -> Hint | None:
    hint = HINTS.get(phase.partition(".")[0])
    return hint if hint is not None and share > hint.above else None


def readable(phase: str) -> str:
    """`callbacks.MyCallback` -> `MyCallback`; `host_to_device` -> `host to device`."""
    kind, _, name = phase.partition(".")
    return name or kind.replace("_", " ")
