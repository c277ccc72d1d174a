"""A small training by each kind of data, as a script of any version.

`python -m tests.old_checkpoints.training FOLDER`, run with the sources of a version, writes its checkpoints; each lies
here as `VERSION/KIND/` without the name of its folder, and later versions must resume it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainwright import Trainer, TrainerCallback, TrainingArguments

KINDS = ("shuffled", "by_length", "stream", "dataloader")
# Batches of 4: seven in an epoch; stopped in the second one.
SIZE = 26
STEPS = 14
STOPPED_AT = 9
Item = dict[str, torch.Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def items() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=draw), "labels": float(i % 3)} for i in range(SIZE)]


class Stream(IterableDataset[Item]):
    """Says where it stands, so that a resume needs not read again what was trained."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Item]:
        first = self.at
        self.at = 0
        for number in range(first, SIZE):
            self.at = number + 1
            yield items()[number]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OwnDataloader(Trainer):
    def get_train_dataloader(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STOPPED_AT:
            control.should_save = control.should_training_stop = True


def trainer_of(kind: str, output_dir: Path, *callbacks: TrainerCallback) -> Trainer:
    args = TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=1e-2,
        seed=11,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        warmup_steps=2,
        **({"train_sampling_strategy": "group_by_length"} if kind == "by_length" else {}),
    )
    torch.manual_seed(3)
    cls = OwnDataloader if kind == "dataloader" else Trainer
    data: Any = Stream() if kind == "stream" else items()
    if kind == "by_length":
        rows = [{"x": item["x"].tolist(), "labels": item["labels"], "length": 1 + i % 5} for i, item in enumerate(data)]
        data = datasets.Dataset.from_list(rows)
    return cls(model=Model(), args=args, train_dataset=data, callbacks=list(callbacks))


def main(folder: Path) -> None:
    for kind in KINDS:
        trainer_of(kind, folder / kind, Stop()).train()
        whole = trainer_of(kind, folder / kind / "whole")
        whole.train()
        torch.save(whole.model.state_dict(), folder / kind / "whole.pth")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
