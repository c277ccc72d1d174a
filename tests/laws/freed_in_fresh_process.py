"""The first use of a trainer in a process, without any garbage collection: prints what is alive after `del`.

Started by test_freed_at_del.py as `freed_in_fresh_process.py ROW FOLDER`. It imports as little as a script does: what a
test imports would hide what the first training imports, and keeps.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # before anything else is imported

import json
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright import Trainer, TrainingArguments

SAVES = {"save_strategy": "steps", "save_steps": 1}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "live_control": {"live_control": True},
    "eval_async": {**SAVES, **EVALUATES, "eval_async": True},
    "mirror": {**SAVES, "checkpoint_mirror": "file://{folder}/mirror"},
    "average": {**EVALUATES, "average": "ema"},
    "save_async": {**SAVES, **EVALUATES, "save_async": True},
    "ledger": {"ledger": True},
    "recorded values": {"record_values": 2},
    "guards": {"on_nonfinite": "rollback", "on_spike": "rollback", "rollback_every": 2},
    "tensorboard": {"report_to": "tensorboard"},
    "no incidents": {"incidents": False, "on_nonfinite": "ignore"},
    "journal": {"journal": True, **SAVES},
    "own optimizer": {},
    "evaluates first": {**EVALUATES},
    "live_control, used": {"live_control": True, **SAVES, **EVALUATES},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class OwnOptimizer(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def sender(folder: Path) -> Any:
    """Returns a callback that sends each command to the run, as `trainwright ctl` does."""
    from tests.capabilities.control.receipts import send_and_wait
    from trainwright import TrainerCallback
    from trainwright.capabilities.control.inbox import Inbox

    class Sends(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            inbox = Inbox(folder)
            commands = (["save"], ["evaluate"], ["lr", "0.01"], ["log", "1"], ["profile", "1"])
            send_and_wait(inbox, *({"words": words, "by": "a test"} for words in commands))

    return Sends()


def use(row: str, folder: Path) -> dict[str, weakref.ref[Any]]:
    settings = json.loads(json.dumps(ROWS[row]).replace("{folder}", str(folder)))
    given = {
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_steps": 3,
        **settings,
    }
    rows = [{"x": torch.ones(4) * number, "labels": number % 2} for number in range(16)]
    trainer = (OwnOptimizer if row == "own optimizer" else Trainer)(
        model=Model(),
        args=TrainingArguments(output_dir=str(folder / "run"), **given),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[sender(folder / "run")] if row == "live_control, used" else None,
    )
    if row == "evaluates first":
        trainer.evaluate()
    trainer.train()
    parts = {"trainer": trainer, "model": trainer.model, "optimizer": trainer.optimizer}
    return {name: weakref.ref(part) for name, part in parts.items()}


def main() -> None:
    seen = use(sys.argv[1], Path(sys.argv[2]))
    end = time.monotonic() + 5
    while time.monotonic() < end and any(reference() is not None for reference in seen.values()):
        time.sleep(0.01)  # the thread of a tracker or an upload may still do something
    print("ALIVE", json.dumps([name for name, reference in seen.items() if reference() is not None]))


if __name__ == "__main__":
    main()
