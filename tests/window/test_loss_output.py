"""LossOutput: the mean over all items of a step and of an evaluation, whoever returns it, without a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import LossOutput, Trainer
from trainwright.errors import ModelError

from ..contract import doubles

SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
THRESHOLD = 0.4  # labels above it count: unequal numbers in the micro-batches, and none in the first ones


def loss_and_items(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = labels > THRESHOLD
    return (logits - labels).square()[mask].mean(), mask.sum()


class Says(nn.Module):
    """A model that says over how many items its loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = doubles.Regressor()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> LossOutput:
        logits = self.inner(x)["logits"]
        loss, items = loss_and_items(logits, labels)
        return LossOutput(loss, num_items=items, metrics={"mean_loss": loss}, outputs={"logits": logits})


class Tells(Trainer):
    """A trainer that does."""

    is_a_tensor = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["x"])
        loss, items = loss_and_items(outputs["logits"], inputs["labels"])
        number = items if self.is_a_tensor else int(items)
        count = {"value": number, "reduce": "sum"}
        said = LossOutput(loss, num_items=number, metrics={"mean_loss": loss, "count": count})
        return (said, outputs) if return_outputs else said


def by_func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> LossOutput:
    loss, items = loss_and_items(outputs["logits"], labels)
    return LossOutput(loss, num_items=items, metrics={"mean_loss": loss})


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "model": (Trainer, Says, {}),
    "compute_loss": (Tells, doubles.Regressor, {}),
    "compute_loss, tensors": (type("Tensors", (Tells,), {"is_a_tensor": True}), doubles.Regressor, {}),
    "compute_loss_func": (Trainer, doubles.Regressor, {"compute_loss_func": by_func}),
}


def trained(folder: Path, kind: str, **settings: Any) -> Any:
    cls, model, more = KINDS[kind]
    given = SGD | {"max_steps": 3, "train_sampling_strategy": "sequential", "preflight": False} | settings
    torch.manual_seed(0)
    trainer = doubles.trainer(folder, cls, settings=given, model=doubles.model(model), **more)
    trainer.train()
    return trainer


def one_batch_by_hand(rows: int = 32) -> tuple[list[torch.Tensor], list[float]]:
    model = doubles.model()
    losses = []
    data = doubles.samples(rows)
    x = torch.stack([row["x"] for row in data])
    labels = torch.tensor([row["labels"] for row in data])
    for _ in range(3):
        loss, _ = loss_and_items(model(x)["logits"], labels)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    return list(model.parameters()), losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_the_mean_over_all_its_items(kind: str, tmp_path: Path) -> None:
    trainer = trained(tmp_path, kind, gradient_accumulation_steps=8, per_device_train_batch_size=4)
    parameters, losses = one_batch_by_hand()
    for mine, other in zip(trainer.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    logs = trainer.state.log_history[:3]
    assert [entry["loss"] for entry in logs] == pytest.approx(losses, rel=1e-6)
    assert [entry["mean_loss"] for entry in logs] == pytest.approx(losses, rel=1e-6)
    if kind == "compute_loss":
        assert [entry["count"] for entry in logs] == [19] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_is_the_mean_over_all_items(kind: str, tmp_path: Path) -> None:
    cls, model, more = KINDS[kind]
    settings = {"per_device_eval_batch_size": 5}
    rows = doubles.samples(22)
    trainer = doubles.trainer(
        tmp_path,
        cls,
        settings=settings,
        model=doubles.model(model),
        eval_dataset=rows,
        compute_metrics=lambda prediction: {"rows": len(prediction.predictions)},
        **more,
    )
    metrics = trainer.evaluate()
    x = torch.stack([row["x"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    inner = getattr(trainer.model, "inner", trainer.model)
    with torch.no_grad():
        loss, _ = loss_and_items(inner(x)["logits"], labels)
    assert metrics["eval_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["eval_mean_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["eval_rows"] == 22
    assert trainer.predict(rows).predictions.shape == (22,)


@pytest.mark.parametrize("says_items", [True, False])
def test_one_micro_batch_is_the_plain_tensor_bit_for_bit(says_items: bool, tmp_path: Path) -> None:
    class Plain(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model(**inputs)["loss"]

    class Wrapped(Plain):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return LossOutput(super().compute_loss(*args, **kwargs), num_items=3 if says_items else None)

    settings = {} if says_items else {"gradient_accumulation_steps": 2}
    plain, wrapped = (doubles.trainer(tmp_path, cls, settings=settings) for cls in (Plain, Wrapped))
    for trainer in (plain, wrapped):
        trainer.train()
    assert doubles.same(doubles.weights(plain), doubles.weights(wrapped))
    assert plain.state.log_history[0] == wrapped.state.log_history[0]


def test_half_a_window_that_says_its_items_is_an_error(tmp_path: Path) -> None:
    class Half(Tells):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.number = vars(self).get("number", 0) + 1
            said = super().compute_loss(*args, **kwargs)
            return said if self.number % 2 else said.loss

    trainer = doubles.trainer(
        tmp_path, Half, settings={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16}
    )
    with pytest.raises(ModelError, match="1 of the 2 micro-batches of step 1"):
        trainer.train()
