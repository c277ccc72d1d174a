"""What a log, a save and an evaluation take from training, by hand and with both trainers.

The steps of one run are cut into parts: quiet steps, steps with a log each, steps after a save, steps after an
evaluation. What a part takes longer than as many quiet steps is lost: for a save also what writing its files in the
background takes from the steps beside it.
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
PARTS = {"quiet": 40, "logs": 40, "save": 160, "evaluation": 40}
WARM_UP = 10
JOB = Job(
    "stalls", "Llama 124M", batch=8, length=512, autocasts=True, warm_up=WARM_UP, timed=sum(PARTS.values()), counted=0
)
NUM_EVAL_ROWS = 256


class Clock:
    """Times the parts: the device is waited for at their ends alone."""

    def __init__(self, *, is_tiny: bool) -> None:
        self.work = Work(JOB, is_tiny=is_tiny)
        lengths = {name: 6 for name in PARTS} if is_tiny else PARTS
        if is_tiny:
            job = self.work.job
            self.work.job = dataclasses.replace(job, length=16, batch=2, warm_up=2, timed=sum(lengths.values()), counted=0)
        self.steps: dict[str, range] = {}  # part -> its steps
        end = self.work.job.warm_up
        for name, length in lengths.items():
            self.steps[name] = range(end + 1, end + length + 1)
            end += length
        self._ends = {self.work.job.warm_up} | {steps[-1] for steps in self.steps.values()}
        self._marks: dict[int, float] = {}
        self._blocked_since = 0.0
        self._blocked_s = 0.0

    @property
    def saves_at(self) -> int:
        return self.steps["save"][2]

    @property
    def evaluates_at(self) -> int:
        return self.steps["evaluation"][2]

    def after_step(self, step: int) -> None:
        if step in self._ends:
            synchronize(DEVICE)
            self._marks[step] = time.perf_counter()
        if step == self.saves_at:
            synchronize(DEVICE)
            self._blocked_since = time.perf_counter()

    def before_step(self, step: int) -> None:
        """`step` steps are done."""
        if step == self.saves_at:
            self._blocked_s = time.perf_counter() - self._blocked_since

    def found(self) -> dict[str, Any]:
        lost_ms = {}
        for name, steps in self.steps.items():
            seconds = self._marks[steps[-1]] - self._marks[steps[0] - 1]
            if name == "quiet":
                step_s = seconds / len(steps)
            lost_ms[name] = 1000 * (seconds - step_s * len(steps))
        return {
            "step_ms": round(1000 * step_s, 2),
            "log_ms": round(lost_ms["logs"] / len(self.steps["logs"]), 2),
            "save_blocked_ms": round(1000 * self._blocked_s, 1),
            "save_lost_ms": round(lost_ms["save"], 1),
            "save_lost_steps": round(lost_ms["save"] / (1000 * step_s), 1),
            "evaluation_ms": round(lost_ms["evaluation"], 1),
        }


def by_a_trainer(library: str, *, is_tiny: bool) -> dict[str, Any]:
    clock = Clock(is_tiny=is_tiny)
    work = clock.work

    def control_step(step: int, control: Any) -> None:
        control.should_log = step in clock.steps["logs"]
        control.should_save = step == clock.saves_at
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
            if step == clock.saves_at:
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
