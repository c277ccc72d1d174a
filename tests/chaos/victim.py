"""A training run to be killed: OUTPUT_DIR WEIGHTS SAVE_STEPS [PLACE COUNT [behind]].

Resumes where there is a checkpoint. With a PLACE the process ends there, as by SIGKILL, when it comes by for the
COUNT-th time; "anywhere" counts all places of a save. With "behind" checkpoints are written in the background. Nobody
outside of this script knows of it: places are overridden hooks and patched calls of the system.

Run as a script it is a nursery: it imports everything once, and forks a run for each line of JSON on its input, whose
process id it answers. To an empty line it answers with the exit status of that run (negative: killed by that signal).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import accelerate  # noqa: F401 -- what a run loads when it begins, so that its children have it
import safetensors.torch
import torch
import transformers.data.data_collator
import transformers.optimization  # noqa: F401
from torch import nn

from trainwright import Trainer, TrainingArguments
from trainwright.checkpoint import weights
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore

NUM_SAMPLES, FEATURES, NUM_STEPS = 40, 6, 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Countdown:
    def __init__(self, place: str, count: int) -> None:
        self.place, self.count = place, count

    def at(self, place: str) -> None:
        if place == self.place or (self.place == "anywhere" and "training_step" not in place):
            self.count -= 1
            if self.count == 0:
                os._exit(137)


def mortal(countdown: Countdown, name: str) -> Callable[..., Any]:
    """A hook that may be the last thing that happens, before or after it did its work."""

    def hook(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        countdown.at(f"before {name}")
        result = getattr(Trainer, name)(self, *args, **kwargs)
        countdown.at(f"after {name}")
        return result

    return hook


HOOKS = ("_save_checkpoint", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "training_step")


def doomed(countdown: Countdown) -> type[Trainer]:
    return type("Doomed", (Trainer,), {name: mortal(countdown, name) for name in HOOKS})


def patch_the_system(countdown: Countdown) -> None:
    def around(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            countdown.at(f"before {label}")
            result = original(*args, **kwargs)
            countdown.at(f"after {label}")
            return result

        setattr(owner, name, call)

    around(Path, "rename", "rename")
    around(os, "fsync", "fsync")
    around(shutil, "rmtree", "rmtree")
    around(os, "unlink", "unlink")
    around(Manifest, "write", "manifest")
    around(torch, "save", "torch.save")
    around(weights, "save_weights", "weights")


def save_over(folder: str, word: str, place: str, count: str) -> None:
    """Saves the last step once more, with other content."""
    patch_the_system(Countdown(place, int(count)))
    store = CheckpointStore(folder)
    staging = store.stage(NUM_STEPS)
    (staging / "trainer_state.json").write_text(json.dumps({"word": word}))
    store.commit(staging, Manifest(step=NUM_STEPS, run_id=word))


def main(
    output_dir: str, final_weights: str, save_steps: str, place: str = "", count: str = "0", behind: str = ""
) -> None:
    torch.set_num_threads(1)
    countdown = Countdown(place, int(count))
    patch_the_system(countdown)
    args = TrainingArguments(
        output_dir=output_dir,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=int(save_steps),
        save_total_limit=2,
        save_async=behind == "behind",
        seed=3,
    )
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    samples = [{"x": torch.randn(FEATURES, generator=generator), "labels": i % 3} for i in range(NUM_SAMPLES)]
    trainer = doomed(countdown)(model=Model(), args=args, train_dataset=samples)
    trainer.train(resume_from_checkpoint="auto")
    print("places passed:", int(count) - countdown.count)
    safetensors.torch.save_file(trainer.model.state_dict(), final_weights)


def nursery() -> None:
    process = 0
    for line in sys.stdin:
        if not line.strip():
            _, status = os.waitpid(process, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        process = os.fork()
        if process == 0:
            live(json.loads(line))
        print(process, flush=True)


def live(arguments: list[str]) -> NoReturn:
    """A child's life: its words go into a file beside its weights."""
    with open(f"{arguments[1]}.log", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            save_over(*arguments[1:]) if arguments[0] == "save over" else main(*arguments)
        except BaseException:
            traceback.print_exc()
            log.flush()
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    nursery()
