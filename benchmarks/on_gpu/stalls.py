"""What a log, a save and an evaluation take from training, by hand and with both trainers.

The steps of one run are cut into parts: quiet steps, steps with a log each, steps after the first save, which takes
memory of the host, after the second one, and after an evaluation. What a part takes longer than as many quiet steps is
lost: for a save also what writing its files in the background takes from the steps beside it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainwright.distributed.device import pins_memory, synchronize

from .loops import Job, Work, by_trainer
from .models import DEVICE, collate_padded

# part -> its steps, one after the other, after the warm-up
PARTS = {"quiet": 40, "logs": 40, "save": 120, "second save": 120, "evaluation": 40}
WARM_UP = 10
JOB = Job(
    "stalls", "Llama 124M", batch=8, length=512, autocasts=True, warm_up=WARM_UP, timed=sum(PARTS.values()), counted=0
)
NUM_EVAL_ROWS = 256


class Clock:
    """Times the parts: the device is waited for at their ends alone."""

    def __init__(self, *, is_tiny: bool) -> None:
        self.work = Work(JOB, is_tiny=is_tiny)
        lengths = dict.fromkeys(PARTS, 6) if is_tiny else PARTS
        if is_tiny:
            job = self.work.job
            self.work.job = dataclasses.replace(
                job, length=16, batch=2, warm_up=2, timed=sum(lengths.values()), counted=0
            )
        self.steps: dict[str, range] = {}  # part -> its steps
        end = self.work.job.warm_up
        for name, length in lengths.items():
            self.steps[name] = range(end + 1, end + length + 1)
            end += length
        self._ends = {self.work.job.warm_up} | {steps[-1] for steps in self.steps.values()}
        self._marks: dict[int, float] = {}
        self._begun: dict[int, float] = {}  # step -> when its save could begin
        self._blocked_ms: dict[int, float] = {}
        self.saves_at = {"save": self.steps["save"][2], "second save": self.steps["second save"][2]}

    @property
    def evaluates_at(self) -> int:
        return self.steps["evaluation"][2]

    def after_step(self, step: int) -> None:
        if step in self._ends:
            synchronize(DEVICE)
            self._marks[step] = time.perf_counter()
        if step in self.saves_at.values():
            synchronize(DEVICE)
            self._begun[step] = time.perf_counter()

    def before_step(self, step: int) -> None:
        """`step` steps are done."""
        if step in self._begun:
            self._blocked_ms[step] = 1000 * (time.perf_counter() - self._begun[step])

    def found(self) -> dict[str, Any]:
        took_ms = {
            name: 1000 * (self._marks[steps[-1]] - self._marks[steps[0] - 1]) for name, steps in self.steps.items()
        }
        step_ms = took_ms["quiet"] / len(self.steps["quiet"])
        lost_ms = {name: took_ms[name] - step_ms * len(steps) for name, steps in self.steps.items()}
        found = {
            "step_ms": step_ms,
            "log_ms": lost_ms["logs"] / len(self.steps["logs"]),
            "evaluation_ms": lost_ms["evaluation"],
        }
        for name, step in self.saves_at.items():
            found[f"{name.replace(' ', '_')}_blocked_ms"] = self._blocked_ms[step]
            found[f"{name.replace(' ', '_')}_lost_ms"] = lost_ms[name]
        return {name: round(value, 2) for name, value in found.items()}


def by_a_trainer(library: str, *, is_tiny: bool) -> dict[str, Any]:
    clock = Clock(is_tiny=is_tiny)
    work = clock.work

    def control_step(step: int, control: Any) -> None:
        control.should_log = step in clock.steps["logs"]
        control.should_save = step in clock.saves_at.values()
        control.should_evaluate = step == clock.evaluates_at

    by_trainer(
        work,
        clock.after_step,
        library=library,
        on_step_begin=clock.before_step,
        control_step=control_step,
        eval_rows=work.rows()[:NUM_EVAL_ROWS],
        logging_strategy="no",
    )
    return clock.found()


def by_hand(*, is_tiny: bool) -> dict[str, Any]:
    """Reads the loss of each step of its part, writes weights and optimizer with torch.save, adds up eval losses."""
    clock = Clock(is_tiny=is_tiny)
    work = clock.work
    job = work.job
    model = work.model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given: dict[str, Any] = {
        "batch_size": job.batch,
        "collate_fn": collate_padded,
        "pin_memory": pins_memory(DEVICE),
    }
    eval_loader = DataLoader(work.rows()[:NUM_EVAL_ROWS], **given)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        on_device = {name: value.to(DEVICE, non_blocking=True) for name, value in batch.items() if "mask" not in name}
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss: torch.Tensor = model(**on_device).loss
        return loss

    model.train()
    with tempfile.TemporaryDirectory() as folder:
        for step, batch in enumerate(DataLoader(work.rows(), shuffle=True, **given), start=1):
            clock.before_step(step - 1)
            loss = loss_of(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clock.after_step(step)
            if step in clock.steps["logs"]:
                loss.item()
            if step in clock.saves_at.values():
                path = Path(folder) / f"{step}.pt"
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            if step == clock.evaluates_at:
                model.eval()
                with torch.no_grad():
                    sum(loss_of(one).detach() for one in eval_loader).item()  # type: ignore[union-attr]
                model.train()
    return clock.found()


def stall_of(subject: str, *, is_tiny: bool) -> dict[str, Any]:
    return by_hand(is_tiny=is_tiny) if subject == "hand" else by_a_trainer(subject, is_tiny=is_tiny)
