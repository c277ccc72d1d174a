"""With `seed_samples` what is random in a sample hangs on seed, epoch and sample, and on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from trainwright import Trainer
from trainwright.errors import DataError

from .._support.small import Augmented, data, differing, losses, make_trainer, module, noise, trained_trainer, weights
from ..parity.sides import Weights


def adds_noise(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    x = torch.stack([sample["x"] for sample in samples])
    return {"x": x + noise(x.shape[1]), "labels": torch.tensor([sample["labels"] for sample in samples])}


def final_weights(folder: Path, **settings: Any) -> Weights:
    parts = {"train_dataset": Augmented(data.vectors(26)), "data_collator": adds_noise, "model": module(dropout=0.2)}
    return weights(trained_trainer(folder, **parts, num_train_epochs=2, **settings).model)


@pytest.mark.process
def test_any_number_of_workers_and_dropout_undisturbed(tmp_path: Path) -> None:
    """The dropout of the main process draws what it would have drawn, whoever reads the samples."""
    runs = [final_weights(tmp_path / str(n), seed_samples=True, dataloader_num_workers=n) for n in (0, 2)]
    assert differing(*runs) == {}
    assert differing(runs[0], final_weights(tmp_path / "other", seed_samples=True, seed=12)) != {}
    assert differing(runs[0], final_weights(tmp_path / "plain")) != {}


# -- samplers that do not fit ----------------------------------------------------------------------------------------


class Claims(Sampler[int]):
    def __init__(self, says: int, gives: int) -> None:
        self.says = says
        self.gives = gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Any:
        return iter(range(self.gives))


@pytest.mark.parametrize(("says", "gives", "seen"), [(20, 11, "11"), (8, 11, "at least 11"), (8, 40, "at least 12")])
def test_a_sampler_with_a_wrong_length_trains_and_is_reported_once(
    says: int, gives: int, seen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Claims(says, gives)

    settings: dict[str, Any] = {"model": module(0.0), "save_strategy": "steps", "save_steps": 2, "log_level": "warning"}
    straight = trained_trainer(tmp_path / "straight", cls=Own, **settings)
    assert caplog.text.count(f"The len() of the sampler is {says}, but it yielded {seen} indices.") == 1
    resumed = trained_trainer(
        tmp_path / "resumed", cls=Own, resume=str(tmp_path / "straight" / "checkpoint-2"), **settings
    )
    assert differing(weights(resumed.model), weights(straight.model)) == {}
    assert losses(resumed) == losses(straight)


def test_a_batch_sampler_beside_a_batch_size(tmp_path: Path) -> None:
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return BatchSampler(SequentialSampler(self.train_dataset), 3, drop_last=False)

    with pytest.raises(DataError, match=r"is a batch sampler.*per_device_train_batch_size=4.*batch_sampler="):
        make_trainer(tmp_path, cls=Own).train()


def test_samples_that_are_not_dicts(tmp_path: Path) -> None:
    pairs = [(torch.ones(3), 1)] * 8
    with pytest.raises(DataError, match=r"sample of the training data is a tuple.*return a dict"):
        make_trainer(tmp_path, train_dataset=pairs).train()


def test_a_sampler_that_may_repeat_is_as_long_as_it_says(tmp_path: Path) -> None:
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return RandomSampler(self.train_dataset, replacement=True, num_samples=10)

    trainer = make_trainer(tmp_path, cls=Own, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 6
