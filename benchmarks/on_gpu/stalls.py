"""What a log, a save and an evaluation take from training, by hand and with both trainers.

The steps of one run are cut into parts of equal length: quiet ones, one with a log in each step, one with two saves, one
that ends with an evaluation. What a part takes longer than a quiet one is lost.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainwright.distributed.device import pins_memory, synchronize

from .loops import Job, Work, by_trainer
from .models import DEVICE, collate_padded

JOB = Job("stalls", "Llama 124M", batch=8, length=512, autocasts=True, warm_up=10, timed=60, counted=0)
PART = 15  # steps
QUIET, LOGS, SAVES, EVALUATION = (JOB.warm_up + PART * number for number in range(4))  # the last step before each part
SAVES_AT = (SAVES + 2, SAVES + 8)
EVALUATES_AT = EVALUATION + 2
NUM_EVAL_ROWS = 256


class Clock:
    """Times the parts: the device is waited for at their ends alone."""

    def __init__(self) -> None:
        self._marks: dict[int, float] = {}

    def after_step(self, step: int) -> None:
        if step in (QUIET, LOGS, SAVES, EVALUATION):
            synchronize(DEVICE)
            self._marks[step] = time.perf_counter()

    def finish(self) -> None:
        synchronize(DEVICE)
        self._marks[EVALUATION + PART] = time.perf_counter()

    def found(self) -> dict[str, Any]:
        def seconds(first: int) -> float:
            return self._marks[first + PART] - self._marks[first]

        quiet_s = seconds(QUIET)
        step_s = quiet_s / PART
        save_s = (seconds(SAVES) - quiet_s) / len(SAVES_AT)
        return {
            "step_ms": round(1000 * step_s, 2),
            "log_ms": round(1000 * (seconds(LOGS) - quiet_s) / PART, 2),
            "save_ms": round(1000 * save_s, 1),
            "save_steps": round(save_s / step_s, 1),
            "evaluation_ms": round(1000 * (seconds(EVALUATION) - quiet_s), 1),
        }


def tiny_work(*, is_tiny: bool) -> Work:
    work = Work(JOB, is_tiny=is_tiny)
    if is_tiny:
        work.job = JOB.__class__(**{**JOB.__dict__, "length": 16, "batch": 2})
    return work


def by_a_trainer(library: str, *, is_tiny: bool) -> dict[str, Any]:
    work = tiny_work(is_tiny=is_tiny)
    clock = Clock()

    def control_step(step: int, control: Any) -> None:
        control.should_log = LOGS < step <= LOGS + PART
        control.should_save = step in SAVES_AT
        control.should_evaluate = step == EVALUATES_AT
        if step == JOB.num_steps:
            clock.finish()

    eval_rows = work.rows()[:NUM_EVAL_ROWS]
    by_trainer(
        work, clock.after_step, library=library, control_step=control_step, eval_rows=eval_rows, logging_strategy="no"
    )
    return clock.found()


def by_hand(*, is_tiny: bool) -> dict[str, Any]:
    """Reads the loss of each step of its part, writes weights and optimizer with torch.save, adds up eval losses."""
    work = tiny_work(is_tiny=is_tiny)
    job = work.job
    clock = Clock()
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
            loss = loss_of(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clock.after_step(step)
            if LOGS < step <= LOGS + PART:
                loss.item()
            if step in SAVES_AT:
                path = Path(folder) / f"{step}.pt"
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            if step == EVALUATES_AT:
                model.eval()
                with torch.no_grad():
                    sum(loss_of(one).detach() for one in eval_loader).item()  # type: ignore[union-attr]
                model.train()
    clock.finish()
    return clock.found()


def stall_of(subject: str, *, is_tiny: bool) -> dict[str, Any]:
    return by_hand(is_tiny=is_tiny) if subject == "hand" else by_a_trainer(subject, is_tiny=is_tiny)
