"""What watching costs: the journal and the clock beside a run without them, and trackers that raise or hang.

python benchmarks/watching.py            about two minutes
python benchmarks/watching.py --quick    ten turns each

One JSON line for each model, then a table. `without` is the same trainer with no journal and a clock that stands still;
all ratios are to it. The limits: 1 % for journal and clock, 2 % for a tracker that raises or hangs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from harness import Subject, Turns, Watch, measure, print_json, print_table, versions  # noqa: E402
from step_overhead import BATCH, CASES, LEARNING_RATE, WARM_UP, WEIGHT_DECAY, Row, Work, by_hand  # noqa: E402

from trainwright import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from trainwright.state.progress import Clock  # noqa: E402
from trainwright.trackers.base import TrackerCallback  # noqa: E402

LIMITS = {"watched": 1.01, "raising": 1.02, "hanging": 1.02}


class Raises(TrackerCallback):
    name = "raising"

    def send(self, values: dict[str, Any], state: Any) -> None:
        raise ConnectionError("the service is away")


class Hangs(TrackerCallback):
    """Hangs in its first call until the measured steps are over."""

    name = "hanging"

    def __init__(self, is_over: threading.Event) -> None:
        super().__init__()
        self._is_over = is_over

    def send(self, values: dict[str, Any], state: Any) -> None:
        self._is_over.wait()


Raises.__module__ = Hangs.__module__ = (
    "trainwright.trackers.benchmark"  # trackers of others are waited for at the start
)


def stop_watching(trainer: Trainer) -> None:
    """No journal is written, and a mark of the clock does nothing; for this trainer alone."""
    trainer.callback_handler.watchers.clear()
    trainer.callback_handler.rebuild()
    services = trainer._trainwright.services
    services.journal.begin = lambda *arguments, **facts: None  # type: ignore[method-assign]
    use_clock = services.use_clock

    def use_stopped(clock: Clock) -> None:
        clock.mark = lambda phase: phase  # type: ignore[method-assign]
        use_clock(clock)

    services.use_clock = use_stopped  # type: ignore[method-assign]


def by_trainer(work: Work, kind: str, watch: Watch) -> None:
    is_over = threading.Event()

    class TellsSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.step_done(state.global_step)
            if state.global_step == work.num_steps:
                is_over.set()

    trackers: dict[str, Callable[[], Any]] = {"raising": Raises, "hanging": lambda: Hangs(is_over)}
    model, items = work.model_and_items()
    with tempfile.TemporaryDirectory() as output_dir:
        args = TrainingArguments(
            output_dir=output_dir,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=BATCH,
            max_steps=work.num_steps,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            logging_steps=work.row.logging_steps,
            log_level="critical",
        )
        tracker = [trackers[kind]()] if kind in trackers else []
        trainer = Trainer(model=model, args=args, train_dataset=items, callbacks=[*tracker, TellsSteps()])
        if kind == "without":
            stop_watching(trainer)
        trainer.train()


def subjects(row: Row, num_steps: int) -> dict[str, Subject]:
    work = Work(row, num_steps)
    found: dict[str, Subject] = {"hand": partial(by_hand, work)}
    return found | {kind: partial(by_trainer, work, kind) for kind in ("without", *LIMITS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten turns")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt2"])
    parser.add_argument("--logging-steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["model", "subject", "ratio", "min", "max", "us/step", "calls/step", "limit"]]
    for case in (CASES[name] for name in args.models):
        turns = Turns(warm_up=WARM_UP, num=10 if args.quick else args.turns, steps=case.steps[1])
        row = Row(case.name, model=case.name, logging_steps=args.logging_steps)
        results = measure(partial(subjects, row), base="without", turns=turns)
        print_json(
            {
                "benchmark": "watching",
                "model": case.name,
                "turns": turns.num,
                "limits": LIMITS,
                "subjects": results,
                **versions("torch", "trainwright"),
            }
        )
        for name, result in results.items():
            cells = [f"{result[key]:.3f}" for key in ("ratio", "min", "max")]
            cells += [f"{result['us_per_step']:.0f}", f"{result['python_calls_per_step']:.0f}"]
            rows.append([case.name, name, *cells, f"{LIMITS[name]:.2f}" if name in LIMITS else ""])
    print()
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
