"""A run of two processes that is meant to end early: `ending.py FOLDER CASE`. It says HERE where a signal may come."""

import os
import sys
import time
from typing import Any

import torch
from tests._support.arrival import LIMIT_S, announce
from tests.parity import data, models
from torch.utils.data import Dataset

from trainwright import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint
from trainwright.distributed.watchdog import Watchdog

FOLDER = sys.argv[1]
CASE = sys.argv[2]
RANK = int(os.environ["RANK"])
AT_STEP = 5


asked: list[Watchdog] = []


def be_signalled() -> None:
    """Waits for one signal, and until this process is to end: the step is still the one that it came in."""
    if asked:
        return
    ask = Watchdog.ask

    def noted(watchdog: Watchdog, number: int) -> None:
        asked.append(watchdog)
        ask(watchdog, number)

    Watchdog.ask = noted  # type: ignore[method-assign]
    announce(os.getpid())
    end = time.monotonic() + LIMIT_S
    while not asked or asked[0]._gate is None:
        assert time.monotonic() < end, "the processes have not agreed on a step"
        time.sleep(0.01)


class Samples(Dataset[dict[str, Any]]):
    def __init__(self) -> None:
        self.items = data.vectors(64)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if CASE == "data" and RANK == 1 and self.reads == 4 * AT_STEP:
            raise ValueError("sample 17 is broken")
        return self.items[index]


class Ends(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        at = self.state.global_step == AT_STEP
        if CASE == "step" and RANK == 0 and at:
            raise ZeroDivisionError("a step went wrong")
        if CASE in ("standstill", "late") and RANK == 1 and at:
            time.sleep(600)
        if CASE == "signal in a step" and RANK == 1 and at:
            be_signalled()
        return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        if CASE == "evaluation" and RANK == 1:
            raise KeyError("no such metric")
        if CASE == "signal in an evaluation" and RANK == 1 and self.state.global_step == 6:
            be_signalled()
        return super().prediction_step(*args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if CASE == "save" and RANK == 0:
            raise OSError("no space left on device")
        super()._save(*args, **kwargs)


class Says(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"ENDED {RANK} {state.global_step}", flush=True)


trainer = Ends(
    models.seeded(lambda: models.ReturnsDict(0.2)),
    TrainingArguments(
        FOLDER,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=16,
        save_steps=8,
        eval_strategy="steps",
        eval_steps=6,
        logging_steps=4,
        learning_rate=1e-2,
        hang_timeout=20 if CASE == "standstill" else 0,
        ddp_timeout=30 if CASE == "late" else 1800,
        log_level_replica="info",  # each process says at which step it ends
    ),
    train_dataset=Samples(),
    eval_dataset=data.vectors(24),
    callbacks=[Says],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER) is not None)
trainer.save_model(f"{FOLDER}/final")
trainer.end()
