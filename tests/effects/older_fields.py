"""Checks of the fields of v4.34 that are fields here still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.config import rules
from trainwright.errors import ArgumentError

from .bench import Bench, checkpoints
from .table import companion, shows


@shows("overwrite_output_dir")
def checkpoints_of_an_earlier_run_go_stay_or_stop_the_new_one(bench: Bench) -> None:
    def used_again(name: str, **settings: Any) -> list[int]:
        folder = str(bench.folder / name)
        often = {"output_dir": folder, "save_strategy": "steps", "save_steps": 2}
        bench.train(**often)
        bench.warnings()
        bench.train(**often, num_train_epochs=0.5, **settings)
        return checkpoints(folder)

    assert used_again("none") == [2, 3, 4, 6]
    assert "holds checkpoints of an earlier run" in bench.warnings()
    assert used_again("true", overwrite_output_dir=True) == [2, 3]
    assert "earlier run" not in bench.warnings()
    with pytest.raises(ArgumentError, match="overwrite_output_dir=False"):
        used_again("false", overwrite_output_dir=False)


@shows("logging_dir")
def tensorboard_writes_there(bench: Bench) -> None:
    bench.train(logging_dir=str(bench.folder / "board"), report_to="tensorboard")
    assert list((bench.folder / "board").glob("events.out.tfevents.*"))
    bench.train(report_to="tensorboard", output_dir=str(bench.folder / "other"))
    assert list((bench.folder / "other" / "runs").rglob("events.out.tfevents.*"))
    assert bench.args(logging_dir="~/logs").logging_dir.endswith("/logs")
    (message,) = rules.advise(bench.args(logging_dir="logs"))
    assert message.startswith("logging_dir has no effect")
    assert "report_to" in message


class Remembers(nn.Module):
    """Hands a memory from one step to the next; +1 was made in training, -1 in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.given: list[float | None] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mems: torch.Tensor | None = None) -> Any:
        if self.training:
            self.given.append(None if mems is None else mems[0].item())
        logits = self.layer(x)
        memory = torch.full((len(x),), 1.0 if self.training else -1.0)
        return nn.functional.cross_entropy(logits, labels), logits, memory


@shows("past_index")
def a_recurrent_model_gets_its_memory_back(bench: Bench) -> None:
    def given(**settings: Any) -> list[float | None]:
        model = Remembers()
        bench.train(model=model, per_device_train_batch_size=4, num_train_epochs=2, **settings)
        return model.given

    assert given() == 6 * [None]
    epoch = [None, 1.0, 1.0]  # each begins without a memory
    assert given(past_index=2) == [*epoch, *epoch]
    evaluated = given(past_index=2, eval_strategy="steps", eval_steps=2)
    assert -1.0 not in evaluated, "an evaluation's memory came into training"


@shows("save_safetensors")
def weights_are_written_with_torch(bench: Bench) -> None:
    def file_of_weights(**settings: Any) -> str:
        folder = Path(bench.train(save_strategy="steps", save_steps=6, **settings).args.output_dir) / "checkpoint-6"
        (file,) = [*folder.glob("model.*"), *folder.glob("pytorch_model.*")]
        return file.name

    assert file_of_weights() == "model.safetensors"
    assert file_of_weights(save_safetensors=False) == "pytorch_model.bin"


@shows("use_legacy_prediction_loop")
def the_older_loop_is_called(bench: Bench) -> None:
    def times_called(**settings: Any) -> int:
        trainer = bench.trainer(**settings)
        calls = []
        older = trainer.prediction_loop
        trainer.prediction_loop = lambda *args, **kwargs: calls.append(args) or older(*args, **kwargs)
        trainer.evaluate()
        return len(calls)

    assert (times_called(), times_called(use_legacy_prediction_loop=True)) == (0, 1)


@companion("tpu_num_cores", "launchers of TPU jobs read it; this version trains on one device")
def no_cores_are_counted(bench: Bench) -> None:
    (message,) = rules.advise(bench.args(tpu_num_cores=8))
    assert message.startswith("tpu_num_cores has no effect")


@companion("ray_scope", "searches by Ray read it, and this is none")
def no_trials_are_compared(bench: Bench) -> None:
    (message,) = rules.advise(bench.args(ray_scope="all"))
    assert message.startswith("ray_scope has no effect")
