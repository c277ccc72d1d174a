"""The published surface: every name is there, with the parameters that the outside world passes."""

import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers

import trainwright

from .._support.subprocesses import run_python
from . import doubles, package_names, surface

METHODS = surface.PUBLIC_METHODS | surface.UNDERSCORE_METHODS
ASSIGNED = (
    *("args", "model_wrapped", "optimizer", "lr_scheduler", "state", "control", "data_collator", "tokenizer"),
    *("label_names", "model_accepts_loss_kwargs", "current_gradient_accumulation_steps", "is_in_train"),
    *("current_flos", "gather_function", "hp_search_backend", "_train_batch_size"),
    *("_total_loss_scalar", "_globalstep_last_logged"),
)


def without_annotations(method: Callable[..., Any]) -> str:
    signature = inspect.signature(method)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_each_method_has_its_frozen_signature() -> None:
    found = {name: without_annotations(getattr(trainwright.Trainer, name)) for name in METHODS}
    assert found == {name: surface.TAKES_MORE.get(name, frozen) for name, frozen in METHODS.items()}


DOCUMENTED = {
    *((trainwright.Trainer, name) for name in METHODS),
    *(
        (cls, name)
        for cls in (
            trainwright.Seq2SeqTrainer,
            trainwright.HfArgumentParser,
            trainwright.TrainerState,
            trainwright.TrainerControl,
        )
        for name in vars(cls)
        if not name.startswith("_")
    ),
}


def test_each_docstring_says_what_its_parameters_and_the_result_are() -> None:
    found = {f"{cls.__name__}.{name}": find_undocumented(cls, name) for cls, name in DOCUMENTED}
    assert {name: missing for name, missing in found.items() if missing} == {}


def find_undocumented(cls: type, name: str) -> list[str]:
    """Returns the parameters of a method that its docstring does not describe, and "Returns" for a missing result."""
    method = inspect.getattr_static(cls, name)
    method = getattr(method, "__func__", method)  # of a class method or a static one
    if not inspect.isfunction(method):
        return []
    signature = inspect.signature(method)
    text = inspect.getdoc(getattr(cls, name)) or ""
    taken = [one for one in signature.parameters if one not in ("self", "cls")]
    told = set(re.findall(r"^    (\w+)(?: \(.*?\))?:", text.replace("*", ""), re.MULTILINE))  # also `name (type): ...`
    returns_nothing = signature.return_annotation in ("None", "NoReturn", inspect.Signature.empty)
    says_the_result = "\nReturns:" in text or returns_nothing or not taken
    return [one for one in taken if one not in told] + ([] if says_the_result else ["Returns"])


@pytest.mark.framework
def test_each_method_has_the_signature_of_the_installed_transformers() -> None:
    names = [name for name in METHODS if hasattr(transformers.Trainer, name)]
    theirs = {name: without_annotations(getattr(transformers.Trainer, name)) for name in names}
    assert {name: METHODS[name] for name in names} == theirs
    # metrics_format is a plain function in a class body there: it only works when called on the class.
    names.remove("metrics_format")
    assert find_static(trainwright.Trainer, names) == find_static(transformers.Trainer, names)


def find_static(cls: type, names: Iterable[str]) -> set[str]:
    return {name for name in names if isinstance(inspect.getattr_static(cls, name), staticmethod)}


@pytest.mark.framework
def test_every_frozen_method_but_two_is_in_transformers() -> None:
    gone = {name for name in METHODS if not hasattr(transformers.Trainer, name)}
    assert gone == {"prediction_loop", "num_tokens"}


def test_the_constructor_takes_what_the_original_takes_and_then_the_older_tokenizer() -> None:
    parameters = inspect.signature(trainwright.Trainer).parameters
    theirs = inspect.signature(transformers.Trainer).parameters
    assert tuple(parameters) == (*surface.CONSTRUCTOR, "tokenizer")
    assert (*theirs,) == surface.CONSTRUCTOR
    assert {name: parameters[name].default for name in theirs} == {name: one.default for name, one in theirs.items()}
    assert {name: parameters[name].kind for name in theirs} == {name: one.kind for name, one in theirs.items()}


def test_the_older_tokenizer_warns_and_becomes_the_processing_class(tmp_path: Path) -> None:
    tokenizer = object()
    with pytest.warns(Warning, match="processing_class"):
        trainer = doubles.trainer(tmp_path, tokenizer=tokenizer)
    assert trainer.processing_class is tokenizer


@pytest.mark.framework
def test_each_class_attribute_has_its_value() -> None:
    for name, value in surface.CLASS_ATTRIBUTES.items():
        assert getattr(trainwright.Trainer, name) is value, name
        assert getattr(transformers.Trainer, name) is value, name


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return doubles.trainer(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = doubles.trainer(
        tmp_path_factory.mktemp("trained"),
        settings={"save_strategy": "steps", "save_steps": 3},
        eval_dataset=doubles.samples(8),
    )
    trainer.output = trainer.train()
    trainer.logged = list(trainer.state.log_history)  # an evaluation of another test adds to it
    return trainer


def test_all_attributes_are_there_before_and_after_training(fresh: Any, trained: Any) -> None:
    assert [name for name in surface.ATTRIBUTES if not hasattr(fresh, name)] == []
    assert [name for name in surface.ATTRIBUTES if not hasattr(trained, name)] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", doubles.model()),
        ("train_dataset", doubles.samples(8)),
        ("eval_dataset", doubles.samples(8)),
        ("data_collator", transformers.default_data_collator),
        ("compute_metrics", lambda prediction: {}),
        ("compute_loss_func", lambda outputs, labels, num_items_in_batch=None: outputs["logits"].sum()),
        ("preprocess_logits_for_metrics", lambda logits, labels: logits),
    ],
)
def test_what_was_given_is_what_is_read(name: str, value: Any, tmp_path: Path) -> None:
    assert getattr(doubles.trainer(tmp_path, **{name: value}), name) is value


def test_attributes_that_others_assign_can_be_assigned(tmp_path: Path) -> None:
    for name in ASSIGNED:
        trainer = doubles.trainer(tmp_path)
        value = getattr(trainer, name)
        setattr(trainer, name, value)
        assert getattr(trainer, name) is value or getattr(trainer, name) == value, name


def test_the_state_has_its_fields(trained: Any) -> None:
    saved = json.loads(next(Path(trained.args.output_dir).glob("*/trainer_state.json")).read_text())
    assert [name for name in surface.STATE if not hasattr(trained.state, name)] == []
    assert [name for name in surface.STATE if name not in saved] == []


def test_the_control_has_its_flags(trained: Any) -> None:
    assert [name for name in surface.CONTROL if getattr(trained.control, name) not in (True, False)] == []


def test_a_callback_has_every_event() -> None:
    for event in (*surface.EVENTS, *surface.EVENTS_OF_OURS):
        signature = inspect.signature(getattr(trainwright.TrainerCallback, event))
        assert list(signature.parameters)[:4] == ["self", "args", "state", "control"], event
        assert [one.kind for one in signature.parameters.values()][-1] == inspect.Parameter.VAR_KEYWORD, event


def test_no_event_of_transformers_is_missing() -> None:
    theirs = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    assert theirs <= set(surface.EVENTS)


def test_training_returns_its_metrics(trained: Any) -> None:
    assert trained.output.global_step == 3
    assert set(trained.output.metrics) >= set(surface.METRICS["train"]) - {"epoch"}
    assert set(trained.logged[-1]) >= set(surface.METRICS["train"])
    assert set(trained.state.log_history[0]) == {"loss", "grad_norm", "learning_rate", "epoch", "step"}


def test_evaluating_and_predicting_return_their_metrics(trained: Any) -> None:
    assert set(surface.METRICS["eval"]) <= set(trained.evaluate())
    prediction = trained.predict(doubles.samples(8))
    assert set(prediction.metrics) >= set(surface.METRICS["test"])
    assert prediction._fields == ("predictions", "label_ids", "metrics")
    assert set(trained.evaluate(metric_key_prefix="dev")) >= {"dev_loss", "dev_runtime"}


def test_a_checkpoint_has_its_files(trained: Any) -> None:
    folder = Path(trained.args.output_dir) / "checkpoint-3"
    # A plain module has no configuration to write.
    assert [name for name in surface.FILES if not (folder / name).is_file()] == ["config.json"]


def test_every_published_name_is_there() -> None:
    assert package_names.PUBLIC | package_names.HELPERS == package_names.DONE


def test_each_name_of_the_package_can_be_imported() -> None:
    assert [name for name in package_names.DONE if getattr(trainwright, name, None) is None] == []
    assert set(dir(trainwright)) >= package_names.DONE


def test_what_the_package_lists_can_be_imported() -> None:
    assert [name for name in trainwright.__all__ if getattr(trainwright, name, None) is None] == []


def test_an_unpublished_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainor"):
        _ = trainwright.Trainor


LOADS = """
import sys

def say():
    print("LOADED", *sys.modules)

import trainwright
say()
from trainwright import Trainer, TrainingArguments
say()
import torch

class Model(torch.nn.Linear):
    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

def collate(items):
    return {"x": torch.stack([x for x, _ in items]), "labels": torch.tensor([label for _, label in items])}

items = [(torch.randn(4), i % 2) for i in range(16)]
for steps in (1, 2):
    args = TrainingArguments(sys.argv[1], use_cpu=True, report_to="none", max_steps=steps, save_steps=1,
                             eval_strategy="steps", eval_steps=1, logging_steps=1, disable_tqdm=True)
    trainer = Trainer(Model(4, 2), args, collate, items, items)
    assert trainer.train(resume_from_checkpoint=steps > 1).global_step == steps
say()
items = [{"x": x, "labels": label} for x, label in items]
Trainer(Model(4, 2), args, train_dataset=items, eval_dataset=items).train()
say()
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """Modules of a fresh interpreter: after importing the package, then the trainer, after a training, and another."""
    out = run_python("-c", LOADS, str(tmp_path_factory.mktemp("loads"))).stdout
    return [set(line.split()[1:]) for line in out.splitlines() if line.startswith("LOADED")]


@pytest.mark.process
def test_importing_the_package_loads_neither_torch_nor_transformers(loaded: list[set[str]]) -> None:
    assert "trainwright" in loaded[0]
    assert not loaded[0] & {"torch", "transformers", "accelerate", "numpy"}


@pytest.mark.process
def test_importing_the_trainer_does_not_load_transformers_or_accelerate(loaded: list[set[str]]) -> None:
    assert "torch" in loaded[1]
    assert not loaded[1] & {"transformers", "accelerate", "datasets", "pandas", "sklearn", "scipy"}


@pytest.mark.process
def test_training_plain_module_with_collator_of_its_own_does_not_load_transformers(loaded: list[set[str]]) -> None:
    """Nor does an evaluation, a checkpoint or a resume."""
    assert "accelerate" in loaded[2]
    assert not loaded[2] & {"transformers", "torchao", "scipy", "datasets"}


@pytest.mark.process
def test_a_plain_run_loads_no_package_that_it_does_not_use(loaded: list[set[str]]) -> None:
    assert not loaded[3] & {"peft", "bitsandbytes", "datasets", "transformers.trainer", "optuna", "ray"}
