"""Collators that draw random numbers in the main process, as GLiNER's: a resume goes on as the run would have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trainwright import Trainer

from .._support.small import StopAt, data, differing, make_trainer, module, weights

DRAWS = {
    "python": lambda: random.random(),
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}
# accelerate's dataloader fetches one batch ahead of the one that it gives, and Loader another one. A resume skips the
# trained batches, and then sets the random states of before Loader's last fetch. The batch that accelerate had fetched
# until then is made while skipping, from the states of the epoch's beginning and without the draws of dropout since.
TWO_AHEAD = "accelerate fetches a batch ahead of Loader's; the states before that fetch are not in the checkpoint"


class Collator:
    """Adds a random number to the inputs of a batch."""

    def __init__(self, kind: str) -> None:
        self.draw = DRAWS[kind]

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        inputs = torch.stack([row["x"] for row in rows]) + self.draw()
        return {"x": inputs, "labels": torch.tensor([row["labels"] for row in rows])}


class OwnLoader(Trainer):
    """Makes its dataloader as GLiNER's trainer does, and has accelerate prepare it."""

    def get_train_dataloader(self) -> Any:
        parts = {"batch_size": self._train_batch_size, "collate_fn": self.data_collator}
        return self.accelerator.prepare(DataLoader(self.train_dataset, sampler=self._get_train_sampler(), **parts))


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        *((Trainer, kind) for kind in DRAWS),
        (OwnLoader, "python"),
        (OwnLoader, "numpy"),
        pytest.param(OwnLoader, "torch", marks=pytest.mark.xfail(reason=TWO_AHEAD, strict=True)),
    ],
)
def test_a_resume_draws_what_the_run_would_have_drawn(cls: type[Trainer], kind: str, tmp_path: Path) -> None:
    def trained(folder: str, *, resume: bool = False, stop: int | None = None) -> Any:
        callbacks = [] if stop is None else [StopAt(stop)]
        one = make_trainer(
            tmp_path / folder, cls=cls, model=module(), data_collator=Collator(kind), callbacks=callbacks,
            train_dataset=data.vectors(26), remove_unused_columns=False,
        )  # fmt: skip
        one.train(resume_from_checkpoint=resume)
        return weights(one.model)

    whole = trained("whole")
    trained("cut", stop=3)
    assert differing(trained("cut", resume=True), whole) == {}
