"""What goes wrong on the user's side: each a typed error that says what came, what would do and what to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import BertModel, CLIPConfig, CLIPModel

from trainwright import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, errors
from trainwright.cli.recipe import yaml_tree

from .._support.small import OURS, REFERENCE, StopAt, data, differing, logged, make_trainer, models, module, weights


def says(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    text = str(error.value)
    assert [word for word in words if word not in text] == [], text


# -- models ----------------------------------------------------------------------------------------------------------


def test_no_model_and_no_model_init(tmp_path: Path) -> None:
    with pytest.raises(errors.MissingModelError) as error:
        Trainer(args=TrainingArguments(str(tmp_path), use_cpu=True))
    says(error, "neither a model nor a model_init", "model=", "model_init=")
    assert isinstance(error.value, RuntimeError)
    assert isinstance(error.value, ValueError)


def test_a_model_and_a_model_init(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelError) as error:
        make_trainer(tmp_path, model=module(), model_init=module)
    says(error, "both a model and a model_init", "only one of them")


def test_a_model_without_a_head(tmp_path: Path) -> None:
    headless = models.bert().bert
    assert isinstance(headless, BertModel)
    with pytest.raises(errors.ModelError) as error:
        make_trainer(tmp_path, model=headless)
    says(error, "BertModel", "no head", "AutoModelForSequenceClassification")


def test_a_base_model_that_computes_a_loss_of_pairs_is_trained(tmp_path: Path) -> None:
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {**text, "vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    images = {**text, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=sizes, vision_config=images, projection_dim=8))
    rows = [{"input_ids": [3 + i, 5, 2], "pixel_values": torch.randn(3, 8, 8).tolist()} for i in range(8)]

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = {name: torch.tensor([one[name] for one in samples]) for name in samples[0]}
        return {**batch, "return_loss": True}

    args = TrainingArguments(tmp_path, max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none")
    args.remove_unused_columns = False
    trainer = Trainer(model, args, train_dataset=rows, data_collator=collate)
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize(
    ("model_init", "words"),
    [(lambda: None, ("model_init returned None",)), (lambda a, b: module(), ("2 arguments", "the trial"))],
)
def test_a_model_init_that_makes_no_model(model_init: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(errors.ModelError) as error:
        make_trainer(tmp_path, model_init=model_init)
    says(error, *words)


class Headless(nn.Module):
    """Returns scores and never a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.linear(x), "hidden": x}


def test_a_model_that_returns_no_loss(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelError) as error:
        make_trainer(tmp_path, model=Headless()).train()
    says(error, "Headless returned no loss", "logits", "hidden", "x, labels", "compute_loss")


def test_samples_without_labels(tmp_path: Path) -> None:
    unlabelled = [{"x": item["x"]} for item in data.vectors(8)]
    with pytest.raises(errors.ModelError) as error:
        make_trainer(tmp_path, train_dataset=unlabelled).train()
    says(error, "returned no loss", "It was given x.", "'labels'")


@pytest.mark.parametrize(
    ("kind", "cure"), [(models.bert, "'labels'"), (models.llama, "DataCollatorForLanguageModeling")]
)
def test_samples_without_labels_for_a_model_of_transformers(kind: Any, cure: str, tmp_path: Path) -> None:
    """Their first batch tells, before any forward pass."""
    unlabelled = [{"input_ids": item["input_ids"]} for item in data.texts(8)]
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, model=kind(), train_dataset=unlabelled).train()
    says(error, "No label in the first batch (input_ids)", cure)


# -- losses ----------------------------------------------------------------------------------------------------------


class LossOf(nn.Module):
    """Returns what a function makes of the mean loss, or of a loss without parameters."""

    def __init__(self, make: Any, *, num_parameters: int = 2, trainable: bool = True) -> None:
        super().__init__()
        self.make = make
        self.linear = nn.Linear(6, 3) if num_parameters else torch.nn.Identity()
        self.requires_grad_(trainable)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.make(nn.functional.cross_entropy(self.linear(x), labels % x.shape[1]))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda loss: loss.item(), ("compute_loss returned a float", "without .item()")),
        (lambda loss: None, ("compute_loss returned a NoneType", "return statement")),
        (lambda loss: [loss], ("compute_loss returned a list", "one scalar tensor")),
        (lambda loss: (loss, {}), ("compute_loss returned a tuple", "return_outputs=True")),
        (lambda loss: loss.detach(), ("has no gradient", "torch.no_grad()", ".detach()")),
        (lambda loss: loss.repeat(3), ("the shape (3,)", "loss.mean()")),
        (lambda loss: loss[None], ("the shape (1,)", "loss.mean()")),
        (lambda loss: loss + 0j, ("torch.complex64", "floating-point")),
        (lambda loss: loss.long(), ("has no gradient",)),  # divided by the micro-batches, so no integer any more
    ],
    ids=["float", "None", "list", "tuple", "detached", "vector", "vector-of-1", "complex", "integer"],
)
def test_a_loss_of_another_kind_from_compute_loss(made: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return made(super().compute_loss(*args, **kwargs))

    trainer = make_trainer(tmp_path, cls=Own, gradient_accumulation_steps=2)
    with pytest.raises(errors.ModelError) as error:
        trainer.train()
    says(error, *words)
    assert error.value.__cause__ is not None, "the original error is shown too"
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (LossOf(lambda loss: {"loss": loss}, num_parameters=0), ("LossOf has no parameters", "nn.Parameter")),
        (
            LossOf(lambda loss: {"loss": loss}, trainable=False),
            ("has 2 parameters, all of them frozen", "requires_grad"),
        ),
        (LossOf(lambda loss: {"loss": loss.item()}), ("LossOf returned a float as the loss",)),
        (LossOf(lambda loss: {"loss": loss.repeat(2)}), ("the shape (2,)",)),
    ],
    ids=["no-parameters", "frozen", "float", "vector"],
)
def test_a_model_that_cannot_be_trained(model: nn.Module, words: tuple[str, ...], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=model)
    with pytest.raises(errors.ModelError) as error:
        trainer.train()
    says(error, *words)
    assert trainer.state.global_step == 0


class Unfreezes(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.requires_grad_(True)


class Listens(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("begin")


def test_a_model_that_is_frozen_whole_is_refused_before_the_run_is_prepared(tmp_path: Path) -> None:
    def make(**parts: Any) -> Trainer:
        model = models.seeded(lambda: models.bert(0.0))
        model.requires_grad_(False)
        trainer: Trainer = make_trainer(tmp_path, model=model, train_dataset=data.texts(8), max_steps=1, **parts)
        return trainer

    trainer = make()
    with pytest.raises(errors.ModelError) as error:
        trainer.train()
    says(error, "all of them frozen, so there is nothing to train. Set requires_grad=True")
    assert trainer.optimizer is None
    assert error.value.__cause__ is None, "no backward pass was tried"

    listens = Listens()
    with pytest.raises(errors.ModelError) as error:
        make(callbacks=[listens]).train()
    says(error, "all of them frozen")
    assert listens.events == ["begin"], "a callback may unfreeze, so the first backward pass decides"
    assert make(callbacks=[Unfreezes()]).train().global_step == 1

    def shift(embeddings: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + added

    added = nn.Parameter(torch.zeros(()))
    trainer = make(optimizers=(torch.optim.SGD([added], lr=1.0), None))
    trainer.model.bert.embeddings.register_forward_hook(shift)
    trainer.train()
    assert added.item() != 0.0, "a parameter that is not the model's may be trained"


@pytest.mark.parametrize("loss", [None, 1.0])
def test_a_loss_function_that_returns_no_tensor(loss: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.ModelError) as error:
        make_trainer(tmp_path, compute_loss_func=lambda outputs, labels, num_items_in_batch=None: loss).train()
    says(error, f"compute_loss_func returned a {type(loss).__name__}")


def test_another_error_in_the_backward_pass_stays_what_it_is(tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("in the kernel")

    with pytest.raises(RuntimeError, match="in the kernel"):
        make_trainer(tmp_path, model=LossOf(lambda loss: {"loss": Fails.apply(loss)})).train()


OUTSIDE = nn.Linear(6, 3)


class TrainsOutside(nn.Module):
    """Has no parameters; its loss has a gradient all the same."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (OUTSIDE(x).square().mean(),)


@pytest.mark.framework
def test_a_model_without_parameters_trains_where_the_original_trains(tmp_path: Path) -> None:
    losses = []
    for side in (OURS, REFERENCE):
        nn.init.ones_(OUTSIDE.weight), nn.init.zeros_(OUTSIDE.bias)
        optimizer = torch.optim.SGD(OUTSIDE.parameters(), lr=0.1)
        trainer = make_trainer(
            tmp_path / side.name,
            side,
            model=TrainsOutside(),
            optimizers=(optimizer, None),
            max_steps=3,
            save_strategy="no",
        )
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert [len(of_side) for of_side in losses] == [3, 3]
    assert losses[0][0] == losses[1][0]  # later ones differ: the original clears gradients of the model only


# -- calls inside of calls -------------------------------------------------------------------------------------------


class Calls(TrainerCallback):
    """Calls a method of its trainer after the first step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            getattr(self.trainer, self.name)()


def test_train_is_refused_inside_of_train(tmp_path: Path) -> None:
    callback = Calls("train")
    callback.trainer = trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=2)
    with pytest.raises(errors.NestedCallError) as error:
        trainer.train()
    says(error, "train() was called while this trainer is training (step 1)", "callback", "should_training_stop")
    assert isinstance(error.value, RuntimeError)
    trainer.pop_callback(callback)
    assert trainer.train().global_step == 2, "it can train again afterwards"


def test_evaluate_in_a_callback_is_allowed(tmp_path: Path) -> None:
    callback = Calls("evaluate")
    callback.trainer = trainer = make_trainer(tmp_path, callbacks=[callback], max_steps=2, eval_dataset=data.vectors(4))
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 1


@pytest.mark.parametrize("during", ["training", "evaluate"])
@pytest.mark.parametrize("method", ["evaluate", "train"])
def test_calls_inside_of_compute_metrics_are_refused(method: str, during: str, tmp_path: Path) -> None:
    made: list[Any] = []
    trainer = make_trainer(
        tmp_path,
        eval_dataset=data.vectors(4),
        eval_strategy="epoch",
        compute_metrics=lambda prediction: getattr(made[0], method)(),
    )
    made.append(trainer)
    with pytest.raises(errors.NestedCallError) as error:
        trainer.train() if during == "training" else trainer.evaluate()
    says(error, f"{method}() was called while this trainer is {'evaluating' if method == 'evaluate' else 'training'}")
    assert trainer.state.global_step == 0, "said before step 1"
    trainer.compute_metrics = None
    assert "eval_loss" in trainer.evaluate()


# -- data ------------------------------------------------------------------------------------------------------------


class Endless(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from data.vectors(4)


def test_data_without_a_length_and_no_max_steps(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=Endless())
    says(error, "Endless", "max_steps", "lr_scheduler_type='linear'", "'constant'")


@pytest.mark.parametrize("empty", [[], data.TorchDataset([])], ids=["list", "torch-dataset"])
def test_an_empty_training_set(empty: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=empty).train()
    says(error, "train_dataset", "empty", "no sample")


def test_an_empty_set_of_columns(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=data.hf_dataset(data.vectors(2)).select([])).train()
    says(error, "train_dataset", "empty")


def test_drop_last_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=data.vectors(3), dataloader_drop_last=True).train()
    says(error, "no batch", "dataloader_drop_last=True", "per_device_train_batch_size")


def test_no_training_set(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=None).train()
    says(error, "train_dataset")


@pytest.mark.parametrize("empty", [[], data.Stream([])], ids=["list", "stream"])
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_empty_evaluation_set_gives_no_loss_as_in_transformers(
    method: str, empty: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, log_level="warning")
    found = getattr(trainer, method)(empty)
    metrics = found if method == "evaluate" else found.metrics
    assert not any(name.endswith("_loss") for name in metrics)
    assert "evaluation set is empty" in caplog.text


def test_evaluate_without_data(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path).evaluate()
    says(error, "eval_dataset")


@pytest.mark.parametrize(
    "make",
    [lambda: (x for x in data.vectors(8)), lambda: iter(data.vectors(8)), lambda: {1, 2}],
    ids=["generator", "iterator", "set"],
)
def test_a_generator_is_not_a_dataset(make: Any, tmp_path: Path) -> None:
    trainers = [
        make_trainer(tmp_path, train_dataset=make(), max_steps=2),
        make_trainer(tmp_path, eval_dataset=make(), eval_strategy="steps", max_steps=2),
    ]
    for trainer, name in zip(trainers, ("training", "evaluation"), strict=True):
        with pytest.raises(errors.DataError) as error:
            trainer.train()
        says(error, f"The {name} dataset is a {type(make()).__name__}", "IterableDataset", "a list")
        assert trainer.state.global_step == 0


def test_evaluations_asked_for_without_data(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, eval_strategy="epoch")
    says(error, "eval_strategy='epoch'", "eval_dataset", "eval_strategy='no'")


def test_evaluation_at_the_start_without_data(tmp_path: Path) -> None:
    with pytest.raises(errors.TrainwrightError) as error:
        make_trainer(tmp_path, eval_on_start=True).train()
    says(error, "eval_on_start", "eval_dataset")


def test_no_column_is_an_input(tmp_path: Path) -> None:
    dataset = data.hf_dataset([{"text": "so", "target": 1}, {"text": "it", "target": 0}])
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=dataset).train()
    says(error, "text, target", "ReturnsDict", "remove_unused_columns=False")


def test_no_entry_of_a_list_is_an_input(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=[{"text": 1, "target": 1}] * 4).train()
    says(error, "ReturnsDict", "remove_unused_columns=False")


def test_a_collator_that_makes_no_dict(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, data_collator=lambda items: [item["x"] for item in items]).train()
    says(error, "list", "dict", "data_collator")


def test_a_collator_that_cannot_be_called(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as error:
        make_trainer(tmp_path, data_collator="pad")
    says(error, "'pad'", "cannot be called")


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    make_trainer(tmp_path / "run", callbacks=[StopAt(3)]).train()
    return tmp_path / "run" / "checkpoint-3"


def resume(checkpoint: Any, folder: Path, **parts: Any) -> None:
    make_trainer(folder, **parts).train(resume_from_checkpoint=checkpoint)


def test_a_checkpoint_that_is_not_there(stopped: Path) -> None:
    with pytest.raises(errors.CheckpointNotFoundError) as error:
        resume(str(stopped.with_name("checkpoint-4")), stopped.parent)
    says(error, "checkpoint-4", "no such directory", str(stopped))
    assert isinstance(error.value, FileNotFoundError)
    assert isinstance(error.value, ValueError)


def test_resume_without_any_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointNotFoundError) as error:
        resume(True, tmp_path)
    says(error, "resume_from_checkpoint=True", "no complete checkpoint", str(tmp_path))


def test_resume_with_nothing_but_a_damaged_one(stopped: Path) -> None:
    (stopped / "optimizer.pt").unlink()
    with pytest.raises(errors.CheckpointNotFoundError) as error:
        resume(True, stopped.parent)
    says(error, "no complete checkpoint")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_a_damaged_checkpoint_that_was_named(name: str, stopped: Path) -> None:
    content = bytearray((stopped / name).read_bytes())
    content[len(content) // 2] ^= 1
    (stopped / name).write_bytes(bytes(content))
    with pytest.raises(errors.CheckpointError) as error:
        resume(str(stopped), stopped.parent)
    says(error, str(stopped), name, "altered", "True")


def test_another_optimizer_than_before(stopped: Path) -> None:
    with pytest.raises(errors.CheckpointError) as error:
        resume(str(stopped), stopped.parent, optim="sgd")
    says(error, "optimizer", "sgd", "optim")


def test_another_model_than_before(stopped: Path) -> None:
    with pytest.raises(errors.CheckpointError) as error:
        resume(str(stopped), stopped.parent, model=Wide())
    says(error, str(stopped), "Wide", "head.weight")


class Wide(models.ReturnsDict):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, models.CLASSES + 1)


def test_a_checkpoint_of_the_weights_alone(tmp_path: Path) -> None:
    make_trainer(tmp_path, callbacks=[StopAt(3)], save_only_model=True).train()
    with pytest.raises(errors.CheckpointError) as error:
        resume(True, tmp_path)
    says(error, "optimizer.pt", "save_only_model", "without resume_from_checkpoint")


def test_a_checkpoint_of_another_trainer_that_was_cut_off(stopped: Path) -> None:
    """Without a manifest, sizes are not known; the error must still name the file."""
    for ours in ("manifest.json", "training_args.json"):
        (stopped / ours).unlink()
    path = stopped / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(errors.CheckpointError) as error:
        resume(str(stopped), stopped.parent)
    says(error, "model.safetensors")


def test_a_refused_resume_leaves_the_checkpoint_alone(stopped: Path) -> None:
    before = {path.name: path.read_bytes() for path in stopped.iterdir()}
    with pytest.raises(errors.CheckpointError):
        resume(str(stopped), stopped.parent, optim="sgd")
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before


# -- settings --------------------------------------------------------------------------------------------------------


def test_an_unknown_optimizer(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError) as error:
        make_trainer(tmp_path, optim="adamw_tourch")
    says(error, "adamw_tourch", "adamw_torch")


def test_an_unknown_argument(tmp_path: Path) -> None:
    with pytest.raises(errors.UnknownArgumentError) as error:
        make_trainer(tmp_path, learning_rat=1e-3)
    says(error, "learning_rat", "learning_rate")


@pytest.mark.parametrize("optim_args", ["momentum", "momentum=fast"], ids=["no-value", "no-number"])
def test_optim_args_that_make_no_sense(optim_args: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError) as error:
        make_trainer(tmp_path, optim="sgd", optim_args=optim_args).train()
    says(error, "optim_args", "momentum")


def test_two_ways_to_name_an_optimizer(tmp_path: Path) -> None:
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(errors.ArgumentError) as error:
        make_trainer(
            tmp_path, model=model, optimizers=(optimizer, None), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1})
        )
    says(error, "optimizers=", "optimizer_cls_and_kwargs=", "only one")


def test_an_optimizer_for_a_model_that_is_yet_to_be_made(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(module().parameters(), lr=0.1)
    with pytest.raises(errors.ArgumentError) as error:
        make_trainer(tmp_path, model_init=lambda: module(), optimizers=(optimizer, None))
    says(error, "optimizers=", "model_init", "optimizer_cls_and_kwargs")


def test_a_processing_class_under_both_its_names(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(errors.ArgumentError) as error:
        Trainer(model=module(), args=args, processing_class=data.tokenizer(), tokenizer=data.tokenizer())
    says(error, "processing_class", "tokenizer")


# -- metrics ---------------------------------------------------------------------------------------------------------

JUDGED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
}


def steps_trained(trainer: Any) -> int:
    return int(trainer.state.global_step)


@pytest.mark.parametrize("metrics", [None, lambda prediction: {"accuracy": 0.5}], ids=["none-computed", "another"])
def test_a_metric_that_no_evaluation_gives(metrics: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, eval_dataset=data.vectors(4), compute_metrics=metrics, metric_for_best_model="acuracy", **JUDGED
    )
    with pytest.raises(errors.TrainwrightError) as error:
        trainer.train()
    says(error, "metric_for_best_model='acuracy'", "loss")
    if metrics is None:
        assert steps_trained(trainer) == 0, "known before the first step: there is no compute_metrics"
    else:
        says(error, "eval_accuracy", "compute_metrics")
        assert isinstance(error.value, KeyError)


def test_several_evaluation_sets_and_a_metric_of_none_of_them(tmp_path: Path) -> None:
    sets = {"near": data.vectors(4), "far": data.vectors(6)}
    trainer = make_trainer(tmp_path, eval_dataset=sets, **JUDGED)
    with pytest.raises(errors.ArgumentError) as error:
        trainer.train()
    says(error, "metric_for_best_model", "near", "far", "near_loss")
    assert steps_trained(trainer) == 0


def test_metrics_without_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Warned of, since transformers leaves them out without a word."""
    unlabelled = [{"x": item["x"]} for item in data.vectors(4)]
    settings = {"compute_metrics": lambda prediction: {"a": 1.0}, "log_level": "warning"}
    make_trainer(tmp_path, eval_dataset=unlabelled, **settings).evaluate()
    for word in ("compute_metrics", "looked for labels", "found x", "label_names"):
        assert word in caplog.text


@pytest.mark.parametrize("returned", [None, 0.5, [("a", 1)], "accuracy", 0.0, []])
@pytest.mark.parametrize("streams", [False, True])
def test_metrics_that_are_not_a_dict(returned: Any, streams: bool, tmp_path: Path) -> None:
    def compute(prediction: Any, compute_result: bool = True) -> Any:
        return returned

    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(4), compute_metrics=compute, batch_eval_metrics=streams)
    with pytest.raises(errors.DataError) as error:
        trainer.evaluate()
    says(error, f"returned a {type(returned).__name__}", "dict")


def test_metrics_for_each_batch_by_a_function_for_all(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError) as error:
        make_trainer(tmp_path, compute_metrics=lambda prediction: {}, batch_eval_metrics=True)
    says(error, "batch_eval_metrics=True", "compute_result")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval_strategy": "epoch", "eval_dataset": data.vectors(4)}, ("metric_for_best_model",)),
        ({"metric_for_best_model": "loss"}, ("eval_strategy",)),
    ],
)
def test_early_stopping_without_what_it_watches(
    settings: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, callbacks=[EarlyStoppingCallback(2)], **settings)
    with pytest.raises(errors.ArgumentError) as error:
        trainer.train()
    says(error, "EarlyStoppingCallback", *words)
    assert steps_trained(trainer) == 0


# -- a user's code that raises ---------------------------------------------------------------------------------------


class Own(Exception):
    pass


class Raises(TrainerCallback):
    def __init__(self, event: str) -> None:
        self.heard: list[BaseException] = []

        def handler(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise Own(event)

        setattr(self, event, handler)

    def on_exception(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.heard.append(kwargs["exception"])


@pytest.mark.parametrize(
    "event",
    [
        "on_train_begin",
        "on_epoch_begin",
        "on_step_begin",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_epoch_end",
        "on_train_end",
    ],
)
def test_a_callback_that_raises_is_heard_by_all_and_stops_the_run(event: str, tmp_path: Path) -> None:
    raises = Raises(event)
    trainer = make_trainer(
        tmp_path,
        callbacks=[raises],
        eval_dataset=data.vectors(4),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    with pytest.raises(Own, match=event) as error:
        trainer.train()
    assert raises.heard == [error.value]
    assert not trainer.is_in_train
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_interrupts_a_step_is_heard_too(error: type[BaseException], tmp_path: Path) -> None:
    class Interrupted(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 2:
                raise error
            return super().training_step(*args, **kwargs)

    heard = Raises("on_push_begin")
    trainer = make_trainer(tmp_path, cls=Interrupted, callbacks=[heard])
    with pytest.raises(error):
        trainer.train()
    assert [type(one) for one in heard.heard] == [error]


def test_a_trainer_that_failed_can_train(tmp_path: Path) -> None:
    raises = Raises("on_step_end")
    trainer = make_trainer(tmp_path, model_init=lambda: module(), callbacks=[raises])
    with pytest.raises(Own):
        trainer.train()
    trainer.remove_callback(raises)
    trainer.train()
    plain = make_trainer(tmp_path / "plain", model_init=lambda: module())
    plain.train()
    assert differing(weights(trainer.model), weights(plain.model)) == {}


@pytest.mark.parametrize("hook", ["_save", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_save_that_fails_leaves_the_older_ones_and_no_half(hook: str, tmp_path: Path) -> None:
    """As on a full disk: the second save fails in the middle."""

    def full(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step == 4:
            raise OSError(28, "No space left on device")
        getattr(Trainer, hook)(self, *args, **kwargs)

    cls = type("Full", (Trainer,), {hook: full})
    trainer = make_trainer(tmp_path, cls=cls, save_strategy="steps", save_steps=2)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "journal.jsonl"]
    through = make_trainer(tmp_path / "through")
    through.train()
    again = make_trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(through.model)) == {}


def test_a_value_that_json_does_not_know_is_named(tmp_path: Path) -> None:
    """A callback or an override logs an object: the save must say which entry it is, or take it."""

    class Logs(Trainer):
        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            super().log({**logs, "spread": torch.tensor(0.5)}, start_time)

    trainer = make_trainer(tmp_path, cls=Logs, callbacks=[StopAt(2)])
    try:
        trainer.train()
    except errors.TrainwrightError as error:
        assert "spread" in str(error)  # noqa: PT017
    else:
        state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
        assert state["log_history"][0]["spread"] == 0.5


# -- optimizers and names --------------------------------------------------------------------------------------------


def test_an_optimizer_that_needs_a_closure(tmp_path: Path) -> None:
    model = module()
    trainer = make_trainer(tmp_path, model=model, optimizers=(torch.optim.LBFGS(model.parameters()), None))
    for begin in (trainer.train, trainer.fit_step, lambda: next(trainer.steps())):
        with pytest.raises(errors.ArgumentError) as error:
            begin()
        says(error, "LBFGS.step() needs a closure", "as transformers' Trainer does", "subclass of LBFGS")
        assert trainer.state.global_step == 0


def train_in_a_loop(trainer: Any) -> None:
    for step in trainer.steps():
        for batch in step.batches:
            step.backward(step.model(**batch)["loss"])
        step.update()


@pytest.mark.parametrize("train", [lambda trainer: trainer.train(), train_in_a_loop], ids=["train", "steps"])
def test_a_subclass_that_brings_its_closure_trains(train: Callable[[Any], Any], tmp_path: Path) -> None:
    model = module(0.0)
    samples = data.vectors(26)
    inputs = {
        "x": torch.stack([one["x"] for one in samples]),
        "labels": torch.tensor([one["labels"] for one in samples]),
    }

    class Whole(torch.optim.LBFGS):
        def step(self, closure: Any = None) -> Any:
            def loss() -> torch.Tensor:
                self.zero_grad()
                value = model(**inputs)["loss"]
                value.backward()
                return value

            return super().step(loss)

    trainer = make_trainer(tmp_path, model=model, optimizers=(Whole(model.parameters()), None), max_steps=3)
    train(trainer)
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]


@pytest.mark.parametrize(("names", "said"), [((1, 2), "the key 1, a int"), ((None, "b"), "the key None, a NoneType")])
def test_names_of_sources_that_are_not_strings(names: tuple[Any, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset={name: data.vectors(8) for name in names}).train()
    says(error, said, "strings: train_dataset={'code': a, 'chat': b}")


def test_datasets_by_index_are_not_samples_by_index(tmp_path: Path) -> None:
    class Rows(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return data.vectors(8)[index]

        def __len__(self) -> int:
            return 8

    with pytest.raises(errors.DataError, match="the key 0, a int"):
        make_trainer(tmp_path, train_dataset={0: Rows(), 1: Rows()}).train()
    make_trainer(tmp_path, train_dataset=dict(enumerate(data.vectors(8))), max_steps=1).train()


# -- phrases that people search for ----------------------------------------------------------------------------------


def test_a_missing_checkpoint_is_found_by_the_words_of_the_original(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointNotFoundError) as error:
        make_trainer(tmp_path).train(resume_from_checkpoint=True)
    says(error, f"No valid checkpoint found in output directory ({tmp_path})")
    with pytest.raises(errors.CheckpointNotFoundError) as error:
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "none"))
    says(error, f"Can't find a valid checkpoint at {tmp_path / 'none'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.CheckpointError) as other:
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "empty"))
    says(other, f"Can't find a valid checkpoint at {tmp_path / 'empty'}")


def test_error_in_yaml_file_shows_no_more_than_the_beginning_of_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: *{'secret' * 1000}\n")
    with pytest.raises(yaml.YAMLError) as error:
        HfArgumentParser(TrainingArguments).parse_yaml_file(path)
    assert len(str(error.value)) < 500
    with pytest.raises(errors.RecipeError) as refused:
        yaml_tree.parse(path.read_text(), "config.yaml")
    assert len(str(refused.value)) < 500
