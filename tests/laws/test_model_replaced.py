"""The model that `trainer.model` names is the one that is trained, or there is an error before step 1.

So it is whenever the model, the optimizer or both are replaced; an optimizer is only refused if nothing of the model
would be trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from trainwright import Trainer, TrainerCallback
from trainwright.errors import ArgumentError

from .._support.small import data, make_trainer, models

SHORT = {"max_steps": 2, "save_strategy": "no", "optim": "adamw_torch"}
REFUSED = "has none of the . trainable parameters of ReturnsDict"


class Compressed(nn.Module):
    """Takes other names than the models of the table, with labels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(models.FEATURES, models.CLASSES)

    def forward(self, x: torch.Tensor, my_labels: torch.Tensor | None = None, **_: Any) -> dict[str, Any]:
        logits = self.head(x)
        loss = None if my_labels is None else nn.functional.cross_entropy(logits, my_labels)
        return {"loss": loss, "logits": logits}


def plain(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.ReturnsDict(0.0)


def trainer_of(folder: Path, cls: Any = None, **parts: Any) -> Trainer:
    trainer: Trainer = make_trainer(folder, cls=cls, **({"model": plain(), **SHORT} | parts))
    return trainer


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_changed(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(one, other) for one, other in zip(values(model), before, strict=True))


def sgd(model: nn.Module, *more: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), *more], lr=0.1)


# -- another model -----------------------------------------------------------------------------------------------------


class OwnHooks(Trainer):
    """Makes optimizer and schedule by overrides that the trainer cannot see into."""

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = sgd(self.model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        return self.lr_scheduler


class MakesBoth(OwnHooks):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps)


@pytest.mark.parametrize("cls", [Trainer, OwnHooks, MakesBoth])
@pytest.mark.parametrize("before", ["nothing", "create_optimizer", "evaluate", "train", "train and evaluate"])
def test_an_assigned_model_is_trained(cls: type[Trainer], before: str, tmp_path: Path) -> None:
    if before == "create_optimizer" and cls is not Trainer:
        pytest.skip("an optimizer that an override made outside of train() counts as the user's")
    trainer = trainer_of(tmp_path / "a", cls, eval_dataset=data.vectors(4))
    for call in before.split(" and "):
        if call != "nothing":
            getattr(trainer, call)()
    old = trainer.model
    left = values(old)
    new = plain(1)
    trainer.model = new
    trainer.train()
    assert not is_changed(old, left)
    fresh = trainer_of(tmp_path / "b", cls, model=plain(1))
    fresh.train()
    assert not is_changed(new, values(fresh.model))
    assert [e.get("loss") for e in trainer.state.log_history] == [e.get("loss") for e in fresh.state.log_history]
    assert trainer.lr_scheduler.optimizer is trainer.optimizer
    assert trainer.callback_handler.model is new
    assert trainer.model_wrapped is new


def test_an_assigned_model_is_evaluated_by_its_own_names(tmp_path: Path) -> None:
    rows = [{"x": row["x"], "labels": row["labels"], "my_labels": row["labels"]} for row in data.vectors(8)]
    trainer = trainer_of(tmp_path, eval_dataset=rows, train_dataset=rows)
    trainer.train()
    assert trainer.label_names == ["labels"]
    trainer.model = Compressed()
    assert "eval_loss" in trainer.evaluate()
    assert trainer.label_names == ["my_labels"]
    assert trainer.model_accepts_loss_kwargs


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.label_names = ["labels", "weights"]
    trainer.can_return_loss = True
    trainer.model = plain(1)
    trainer.train()
    assert trainer.label_names == ["labels", "weights"]
    assert trainer.can_return_loss


def test_the_model_is_moved_like_the_first_one(tmp_path: Path) -> None:
    moved = []

    class Notes(Trainer):
        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            moved.append(model)
            super()._move_model_to_device(model, device)

    trainer = trainer_of(tmp_path, Notes)
    trainer.model = plain(1)
    trainer.train()
    trainer.train()
    assert len(moved) == 2
    assert moved[1] is trainer.model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: cast(nn.Module, torch.compile(model, backend="eager")),
    "in copies": lambda model: nn.DataParallel(model, device_ids=[]),
    "the same": lambda model: model,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_of_the_same_model_keeps_the_optimizer(wrapper: str, tmp_path: Path) -> None:
    """Its states too, as a second train() of the same model does."""
    ends = []
    for wrap in (WRAPPERS["the same"], WRAPPERS[wrapper]):
        trainer = trainer_of(tmp_path, eval_dataset=data.vectors(4))
        trainer.train()
        optimizer = trainer.optimizer
        inner = trainer.model
        trainer.model = wrap(inner)
        trainer.train()
        assert trainer.optimizer is optimizer
        assert trainer.label_names == ["labels"]
        ends.append(values(inner))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # which peft reads
@pytest.mark.parametrize("is_assigned", [True, False], ids=["assigned", "in place"])
def test_an_adapter_that_was_added_between_two_runs_is_trained(is_assigned: bool, tmp_path: Path) -> None:
    import peft

    trainer = trainer_of(tmp_path, model=models.seeded(models.bert), train_dataset=data.texts(26))
    trainer.train()
    adapted = peft.get_peft_model(trainer.model, peft.LoraConfig(r=2, target_modules=["query"]))
    if is_assigned:
        trainer.model = adapted
    before = values(adapted)
    trainer.train()
    changed = {
        "lora" in name
        for (name, parameter), old in zip(adapted.named_parameters(), before, strict=True)
        if not torch.equal(parameter, old)
    }
    assert changed == {True}


# -- an optimizer of the user's ----------------------------------------------------------------------------------------


class Holds(torch.optim.SGD):
    """Shows a copy in its groups, and keeps the parameters that it updates elsewhere."""

    def __init__(self, model: nn.Module, keep: Callable[[nn.Module], object]) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr=0.1)
        self.kept = keep(model)


extra = nn.Parameter(torch.zeros(2))
TRAINED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "all": sgd,
    "and others": lambda model: sgd(model, extra),
    "some": lambda model: torch.optim.SGD(model.head.parameters(), lr=0.1),
    "one and others": lambda model: torch.optim.SGD([extra, model.head.bias], lr=0.1),
    "nothing shown": lambda model: torch.optim.SGD([torch.zeros(1)], lr=0.1),
    "kept in a list": lambda model: Holds(model, lambda one: [list(one.parameters())]),
    "kept as keys": lambda model: Holds(model, lambda one: dict.fromkeys(one.parameters(), 0)),
    "kept as a model": lambda model: Holds(model, lambda one: one),
    "kept in an optimizer": lambda model: Holds(model, lambda one: (sgd(one),)),
}
OF_ANOTHER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "of a copy": lambda model: sgd(copy.deepcopy(model)),
    "of another": lambda model: sgd(plain(1)),
    "made before an adapter": lambda model: torch.optim.SGD(model.body.requires_grad_(False).parameters(), lr=0.1),
    "of something else": lambda model: torch.optim.SGD([extra], lr=0.1),
}


@pytest.mark.parametrize("kind", TRAINED)
def test_an_optimizer_with_something_of_the_model_trains(kind: str, tmp_path: Path) -> None:
    model = plain()
    trainer_of(tmp_path, model=model, optimizers=(TRAINED[kind](model), None)).train()


@pytest.mark.parametrize("kind", OF_ANOTHER)
def test_an_optimizer_with_nothing_of_the_model_is_refused(kind: str, tmp_path: Path) -> None:
    model = plain()
    trainer = trainer_of(tmp_path, model=model, optimizers=(OF_ANOTHER[kind](model), None))
    with pytest.raises(ArgumentError, match=REFUSED):
        trainer.train()
    trainer.optimizer = None
    trainer.lr_scheduler = None
    before = values(model)
    trainer.train()
    assert is_changed(model, before)


def test_a_frozen_model_may_have_any_optimizer(tmp_path: Path) -> None:
    """What is trained is outside of it."""

    class Scaled(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs) * extra.exp().sum()

    model = plain().requires_grad_(False)
    trainer_of(tmp_path, Scaled, model=model, optimizers=(torch.optim.SGD([extra], lr=0.1), None)).train()


def test_masters_of_a_model_in_half_precision_are_not_judged(tmp_path: Path) -> None:
    model = models.seeded(models.bert).bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    trainer_of(tmp_path, model=model, train_dataset=data.texts(26), optimizers=(optimizer, None)).train()


def test_a_replaced_model_with_an_optimizer_of_the_users_is_refused(tmp_path: Path) -> None:
    model = plain()
    trainer = trainer_of(tmp_path, model=model, optimizers=(sgd(model), None))
    trainer.train()
    trainer.model = plain(1)
    with pytest.raises(ArgumentError, match=REFUSED):
        trainer.train()
    trainer.optimizer = sgd(trainer.model)
    before = values(trainer.model)
    trainer.train()
    assert is_changed(trainer.model, before)


def test_an_override_that_makes_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    class OfAnother(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = sgd(plain(1))
            return self.optimizer

    with pytest.raises(ArgumentError, match=REFUSED):
        trainer_of(tmp_path, OfAnother).train()


# -- callbacks ---------------------------------------------------------------------------------------------------------


class Replaces(TrainerCallback):
    def __init__(self, event: str, replace: Callable[[Trainer], None]) -> None:
        self.trainer: Trainer | None = None
        setattr(self, event, lambda *args, **kwargs: replace(self.trainer))  # type: ignore[arg-type]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None: ...

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None: ...


def assign(name: str, make: Callable[[Trainer], object]) -> Callable[[Trainer], None]:
    return lambda trainer: setattr(trainer, name, make(trainer))


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # of the optimizer that was replaced
@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin"])
@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (assign("optimizer", lambda trainer: sgd(plain(1))), REFUSED),
        (assign("model", lambda trainer: plain(1)), "trainer.model was replaced after training began"),
        (assign("optimizer", lambda trainer: sgd(trainer.model)), None),
        (assign("model", lambda trainer: torch.compile(trainer.model, backend="eager")), None),
    ],
    ids=["another's optimizer", "another model", "its optimizer", "compiled"],
)
def test_what_a_callback_replaces_is_looked_at(
    event: str, replace: Callable[[Trainer], None], message: str | None, tmp_path: Path
) -> None:
    callback = Replaces(event, replace)
    trainer = trainer_of(tmp_path, callbacks=[callback])
    callback.trainer = trainer
    model = trainer.model
    before = values(model)
    if message is not None:
        with pytest.raises(ArgumentError, match=message):
            trainer.train()
        assert trainer.state.global_step == 0
    else:
        trainer.train()
    assert is_changed(model, before) is (message is None)
