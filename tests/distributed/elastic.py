"""A script for a launcher that starts it again: `elastic.py FOLDER CASE`. It notes down which samples it trained on.

CASE is "whole", or where a process of the first start dies: process 1 that "dies in a step" or "dies while saving", or
the main process that "dies behind training", in the thread that writes. "slowly" gives a node time to come or go in the
first start.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tests._support.two_processes import tell
from tests.distributed.cases import without_clock
from tests.parity import data, models

from trainwright import Trainer, TrainingArguments
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore

FOLDER = Path(sys.argv[1])
CASE = sys.argv[2]
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
START = f"{int(time.time() * 1000)}.{os.getpid()}"  # in order of time
SIZE = 48
AT_STEP = 5
is_first = not any(FOLDER.glob("checkpoint-*"))


class Elastic(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        line = {"world": WORLD, "step": self.state.global_step + 1, "samples": inputs.pop("index").tolist()}
        with (FOLDER / f"samples.{START}.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        if CASE == "slowly":
            time.sleep(0.5 if is_first else 0.0)
        if CASE == "dies in a step" and RANK == 1 and is_first and self.state.global_step == AT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(model, inputs, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        if CASE == "dies while saving" and RANK == 1 and is_first and self.state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def dies(store: CheckpointStore, staging: Path, manifest: Manifest) -> Path:
    if manifest.step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(store, staging, manifest)


commit = CheckpointStore.commit
if CASE == "dies behind training" and is_first:
    CheckpointStore.commit = dies  # type: ignore[method-assign]
FOLDER.mkdir(exist_ok=True)
items = [{**item, "index": i} for i, item in enumerate(data.vectors(SIZE))]
trainer = Elastic(
    models.seeded(lambda: models.ReturnsDict(0.0 if CASE == "slowly" else 0.2)),
    TrainingArguments(
        str(FOLDER),
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_steps=1 if CASE == "slowly" else 3,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
    ),
    train_dataset=items,
)
trainer.train(resume_from_checkpoint="auto")
tell(
    weights={name: value.double().flatten().tolist() for name, value in trainer.model.state_dict().items()},
    log=without_clock(trainer.state.log_history),
    step=trainer.state.global_step,
    world=WORLD,
)
