"""Training runs that are signalled at a moment drawn at random, each in a fork of a process that has all imports.

For each line of JSON on its input, [FOLDER, PHASE, SIGNAL, SEED], a run is made, and its exit code answered. Where
there is a checkpoint it resumes; in PHASE "none" it is not signalled. The signal comes from another thread.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 -- what a run loads when it begins
import safetensors.torch
import torch
import transformers.data.data_collator
import transformers.optimization  # noqa: F401
from torch import nn
from torch.utils.data import Dataset

from trainwright import Trainer, TrainingArguments

NUM_SAMPLES = 48
BATCH = 4
EPOCHS = 2
NUM_STEPS = NUM_SAMPLES // BATCH * EPOCHS
LINGER_S = 0.02  # in the phase, so that a signal finds it there


class Plan:
    """In which phase and after how many visits the signal is sent, and how long after that."""

    def __init__(self, phase: str, number: int, seed: int) -> None:
        draw = random.Random(f"{phase} {number} {seed}")
        visits = {"train": NUM_STEPS - 2, "data": NUM_SAMPLES * EPOCHS - 20, "evaluate": 30, "save": 5, "none": 1}
        self.phase = phase
        self.number = number
        self.visits_left = draw.randint(1, visits[phase])
        self.delay_s = draw.uniform(0, LINGER_S)

    def visit(self, phase: str) -> None:
        if phase != self.phase:
            return
        self.visits_left -= 1
        if self.visits_left == 0:
            threading.Thread(target=self._send).start()
            time.sleep(LINGER_S)

    def _send(self) -> None:
        time.sleep(self.delay_s)
        os.kill(os.getpid(), self.number)


class Noisy(Dataset[dict[str, Any]]):
    def __init__(self, plan: Plan, phase: str) -> None:
        self.plan = plan
        self.phase = phase

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.plan.visit(self.phase)
        noise = torch.rand(3) + random.random()
        return {"x": torch.full((3,), float(index)) / NUM_SAMPLES + noise, "labels": index % 2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def watched(plan: Plan) -> type[Trainer]:
    class Watched(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            plan.visit("train")
            return super().training_step(*args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            plan.visit("evaluate")
            return super().prediction_step(*args, **kwargs)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            plan.visit("save")
            super()._save_optimizer_and_scheduler(output_dir)

    return Watched


def train(folder: str, phase: str, number: int, seed: int) -> None:
    plan = Plan(phase, number, seed)
    torch.manual_seed(0)
    args = TrainingArguments(
        folder,
        use_cpu=True,
        disable_tqdm=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        seed=5,
        resume_from_checkpoint="auto",
        save_async=seed % 2 == 1,
    )
    trainer = watched(plan)(Model(), args, train_dataset=Noisy(plan, "data"), eval_dataset=Noisy(plan, "none too"))
    trainer.train()
    safetensors.torch.save_file(trainer.model.state_dict(), f"{folder}/final.safetensors")
    clock = ("runtime", "per_second")
    log = [{k: v for k, v in entry.items() if not k.endswith(clock)} for entry in trainer.state.log_history[:-1]]
    Path(folder, "log.json").write_text(json.dumps(log, sort_keys=True))


def live(folder: str, phase: str, number: int, seed: int) -> int:
    Path(folder).mkdir(exist_ok=True)
    with open(f"{folder}/words", "a", encoding="utf-8") as words:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
        try:
            train(folder, phase, number, seed)
        except SystemExit as end:
            return int(end.code or 0)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
            return 1
        return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = live(*json.loads(line))
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
