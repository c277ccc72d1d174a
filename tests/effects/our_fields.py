"""Checks of the fields that transformers does not have."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from trainwright import TrainerCallback
from trainwright.checkpoint.store import CheckpointStore
from trainwright.engine.watch import Watch

from .bench import Bench, samples
from .table import shows


def rates(bench: Bench, **settings: Any) -> dict[str, float]:
    """The learning rate of each parameter in a run with a constant one of 0.1."""
    trainer = bench.train(lr_scheduler_type="constant", **settings)
    return {name: trainer.get_optimizer_group(p)["lr"] for name, p in trainer.model.named_parameters()}


@shows("layerwise_lr_decay")
def lower_layers_learn_more_slowly(bench: Bench) -> None:
    found = rates(bench, layerwise_lr_decay=0.5)
    assert (found["head.weight"], found["body.1.weight"], found["body.0.weight"]) == pytest.approx((0.1, 0.05, 0.025))
    assert set(rates(bench).values()) == {0.1}
    assert bench.changes_weights({"layerwise_lr_decay": 0.5})


@shows("lr_groups")
def parameters_learn_at_rates_of_their_own(bench: Bench) -> None:
    found = rates(bench, lr_groups={"head": 0.02, r"body\.0": "0.5x"})
    assert (found["head.weight"], found["body.0.bias"], found["body.1.weight"]) == pytest.approx((0.02, 0.05, 0.1))
    assert rates(bench, lr_groups='{"head": 0.02, "body.0": "0.5x"}') == found
    assert bench.changes_weights({"lr_groups": {"head": 0.02}})


@shows("hang_timeout")
def a_standstill_is_noticed(bench: Bench) -> None:
    class Waits(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(1.0)
            return super().__getitem__(index)

    noticed: list[str] = []
    bench.monkeypatch.setattr(Watch, "_give_up", lambda watch, message: noticed.append(message))
    bench.train(train_dataset=Waits(samples(2)), max_steps=1, hang_timeout=0.3)
    assert "has finished no step" in noticed[0]
    assert "hang_timeout=0.3" in noticed[0]
    noticed.clear()
    bench.train(train_dataset=Waits(samples(2)), max_steps=1)
    assert noticed == []


class MeanOfLabels(nn.Module):
    """Its loss is a mean over the labels of a batch that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@shows("loss_weighting")
def a_micro_batch_with_fewer_labels_counts_less(bench: Bench) -> None:
    items = [{"x": torch.tensor([i / 8, 1.0]), "labels": i % 3 if i not in (4, 5, 6) else -100} for i in range(8)]

    def trained(**settings: Any) -> torch.Tensor:
        torch.manual_seed(0)
        one_step = {"max_steps": 1, "train_sampling_strategy": "sequential", "max_grad_norm": 0}
        model = MeanOfLabels()
        bench.train(model=model, train_dataset=items, optimizers=(torch.optim.SGD(model.parameters(), 0.5), None),
                    **one_step | settings)  # fmt: skip
        return model.layer.weight.detach()

    whole = trained(per_device_train_batch_size=8)
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    torch.testing.assert_close(trained(**halves, loss_weighting="items"), whole)
    assert not torch.allclose(trained(**halves), whole)
    with pytest.raises(ValueError, match=r"loss_weighting='tokens'.*'batches', 'items'"):
        bench.args(loss_weighting="tokens")


@shows("pad_to_multiple_of")
def batches_are_padded_to_fewer_lengths(bench: Bench) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0})), pad_token="[PAD]")
    texts = [{"input_ids": [1] * length, "labels": 0} for length in (3, 5, 9, 11)]

    def lengths(**settings: Any) -> set[int]:
        trainer = bench.trainer(
            processing_class=tokenizer, train_dataset=texts, remove_unused_columns=False, **settings
        )
        return {batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()}

    assert lengths(pad_to_multiple_of=8) <= {8, 16}
    assert lengths() <= {5, 9, 11}


@shows("save_async")
def a_save_is_behind_training_s_back_or_not(bench: Bench) -> None:
    def committed_by(**settings: Any) -> set[str]:
        names: set[str] = set()
        commit = CheckpointStore.commit

        def observed(*args: Any) -> Any:
            names.add(threading.current_thread().name)
            return commit(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointStore, "commit", observed)
            bench.train(save_strategy="steps", save_steps=3, **settings)
        return names

    class Watches(TrainerCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None: ...

    assert committed_by() == {"checkpoint-writer"}
    assert committed_by(save_async=False) == {"MainThread"}
    assert committed_by(callbacks=[Watches()]) == {"MainThread"}
    assert committed_by(callbacks=[Watches()], save_async=True) == {"checkpoint-writer"}


@shows("save_failure")
def a_checkpoint_that_cannot_be_written_ends_the_run_or_not(bench: Bench) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "commit", full)
        with pytest.raises(OSError, match="No space left"):
            bench.train(save_strategy="steps", save_steps=3)
        trainer = bench.train(save_strategy="steps", save_steps=3, save_failure="continue")
    assert trainer.state.global_step == 6
    with pytest.raises(ValueError, match=r"save_failure='ignore'.*'stop', 'continue'"):
        bench.args(save_failure="ignore")
