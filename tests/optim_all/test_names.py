"""An optimizer by name: the class and the arguments that transformers gives it, and what is said when it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import trainwright
from trainwright.errors import ArgumentError, LegacyNameWarning, MissingPackageError
from trainwright.optim.factory import load_class, optimizer_class_and_kwargs
from trainwright.optim.optimizer_table import OPTIMIZERS

from .table import BNB, ELSEWHERE, ON_CUDA, OURS_ALONE, PROJECTED, ROWS, Net, Row, make_trainer, seeded

CPU: dict[str, Any] = {"output_dir": "x", "use_cpu": True, "report_to": "none"}
WITH_ARGS = [
    Row("sgd", settings={"optim_args": "momentum=0.5,dampening=0.1,weight_decay=0.2"}),
    Row("sgd", settings={"optim_args": "momentum=0.5, nesterov=True"}),
    Row("adagrad", settings={"optim_args": "lr_decay=0.5,eps=1e-3"}),
    Row("rmsprop", settings={"optim_args": "alpha=0.5,centered=yes"}),
    Row("adamw_torch", settings={"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}),
    Row("ademamix", BNB, settings={"optim_args": "beta1=0.5,beta3=0.99,alpha=3,t_alpha=7,t_beta3=8"}),
    Row("lion_8bit", BNB, settings={"adam_beta1": 0.5}),
    Row("galore_adamw", "galore_torch", settings={**PROJECTED, "optim_args": "rank=8,scale=2,proj_type=left"}),
    Row("apollo_adamw", "apollo_torch", settings={**PROJECTED, "optim_args": "proj=svd,scale_type=tensor"}),
    Row("grokadamw", "grokadamw", settings={"optim_args": "lamb=3,gamma=0.2"}),
    Row("schedule_free_adamw", "schedulefree", settings={"warmup_steps": 4, "optim_args": "r=0.5"}),
    Row("stable_adamw", "optimi", settings={"weight_decay": 0.1, "optim_args": "max_lr=0.2"}),
]


def plain(value: Any, names: dict[int, str]) -> Any:
    """Parameters by name, optimizers by class and groups: two models of one class can be compared."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, dict):
        return {plain(key, names): plain(inner, names) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, names) for inner in value]
    if hasattr(value, "param_groups"):
        return type(value), plain(value.param_groups, names)
    return "the model" if isinstance(value, Net) else value


def named(get: Any, arguments: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    model = seeded(Net)
    cls, kwargs = get(arguments(**CPU, **settings), model)
    return cls, plain(kwargs, {id(p): name for name, p in model.named_parameters()})


@pytest.mark.parametrize("row", [*ROWS, *WITH_ARGS], ids=lambda row: f"{row}-{row.settings.get('optim_args', '')}")
def test_class_and_arguments_are_those_of_transformers(row: Row) -> None:
    row.needs()
    if row.name in OURS_ALONE:
        pytest.skip("transformers has none of that name")
    if row.name == "galore_adafactor_layerwise":
        pytest.skip("transformers makes it with a rate and relative_step, which the class refuses")
    cls, kwargs = named(trainwright.Trainer.get_optimizer_cls_and_kwargs, trainwright.TrainingArguments, row.args())
    settings = row.args()
    other, expected = named(transformers.Trainer.get_optimizer_cls_and_kwargs, transformers.TrainingArguments, settings)
    assert (cls.__name__, kwargs) == (other.__name__, expected)
    if row.module is not None and "layerwise" not in row.name:
        assert cls is other


def class_and_kwargs(**settings: Any) -> tuple[Any, dict[str, Any]]:
    return optimizer_class_and_kwargs(trainwright.TrainingArguments(**CPU, **settings), seeded(Net))


def refused(**settings: Any) -> str:
    with pytest.raises(ArgumentError) as caught:
        class_and_kwargs(**settings)
    return str(caught.value)


def test_arguments_of_transformers_serve_too() -> None:
    args = transformers.TrainingArguments(**CPU, optim="sgd", optim_args="momentum=0.5")
    assert optimizer_class_and_kwargs(args)[1] == {"lr": 5e-5, "momentum": 0.5}


def test_the_oldest_name_means_the_torch_one_and_apex_is_refused() -> None:
    with pytest.warns(LegacyNameWarning, match="adamw_torch"):
        assert trainwright.TrainingArguments(**CPU, optim="adamw_hf").optim == "adamw_torch"
    with pytest.raises(ArgumentError, match="adamw_torch_fused"):
        trainwright.TrainingArguments(**CPU, optim="adamw_apex_fused")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim": "sgd", "optim_args": "momentum=much"}, ["momentum='much'", "a number"]),
        ({"optim": "rmsprop", "optim_args": "centered=maybe"}, ["centered='maybe'", "true or false"]),
        ({"optim": "muon", "optim_args": "ns_steps=1.5"}, ["ns_steps='1.5'", "a whole number"]),
        ({"optim": "muon", "optim_args": "adjust_lr_fn=x"}, ["original, match_rms_adamw"]),
        ({"optim": "sgd", "optim_args": "momentum"}, ["'momentum'", "name=value"]),
    ],
)
def test_optim_args_are_checked(settings: dict[str, Any], words: list[str]) -> None:
    message = refused(**settings)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, ["momentun", "'sgd'", "nesterov", "Did you mean 'momentum'"]),
        ({"optim": "adamw_torch", "optim_args": "rank=3"}, ["'rank'", "no options"]),
    ],
)
def test_an_option_that_is_not_taken_is_warned_of(
    settings: dict[str, Any], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class_and_kwargs(**settings)
    for word in words:
        assert word in caplog.text


@pytest.mark.parametrize("row", ON_CUDA, ids=str)
def test_what_needs_cuda_says_so_before_the_first_step(row: Row, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="CUDA devices only") as caught:
        make_trainer(tmp_path, row).train()
    instead = {"adalomo": "'lomo'"}.get(row.name, repr(row.name.replace("_8bit", "")))
    assert instead in str(caught.value)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_missing_package_is_named_with_what_to_type(name: str, tmp_path: Path) -> None:
    package = OPTIMIZERS[name].package
    assert package is not None
    with pytest.raises(MissingPackageError, match=f"{name}.*pip install") as caught:
        make_trainer(tmp_path, Row(name)).train()
    assert package in str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ValueError)


def test_a_package_that_is_too_old_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(OPTIMIZERS["sgd"], package="torch>=99")
    with pytest.raises(MissingPackageError, match=r"torch 2.* is older than 99.*pip install --upgrade 'torch>=99'"):
        load_class("sgd", spec)
    broken = replace(spec, path="torch.optim:NoSuchThing", package="torch")
    with pytest.raises(MissingPackageError, match="NoSuchThing cannot be imported"):
        load_class("sgd", broken)


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.in_backward])
def test_an_update_in_the_backward_pass_has_limits(name: str) -> None:
    assert "gradient_accumulation_steps=4" in refused(optim=name, gradient_accumulation_steps=4, **projection_of(name))


def projection_of(name: str) -> dict[str, Any]:
    return {} if "lomo" in name else PROJECTED


def test_gradient_scaler_and_an_update_in_the_backward_pass_exclude_each_other() -> None:
    args = trainwright.TrainingArguments("x", optim="lomo", use_cpu=True)
    args.fp16 = True  # as on a machine with an accelerator
    with pytest.raises(ArgumentError, match="bf16=True"):
        optimizer_class_and_kwargs(args, seeded(Net))


def test_a_share_of_warmup_needs_to_know_the_steps() -> None:
    pytest.importorskip("schedulefree")
    assert "set max_steps" in refused(optim="schedule_free_sgd", warmup_steps=0.25)
    _, kwargs = class_and_kwargs(optim="schedule_free_sgd", warmup_steps=0.25, max_steps=20)
    assert kwargs["warmup_steps"] == 5


def test_an_optimizer_that_depends_on_the_model_asks_for_it() -> None:
    args = trainwright.TrainingArguments(**CPU, optim="muon")
    with pytest.raises(ArgumentError, match="depends on the model"):
        trainwright.Trainer.get_optimizer_cls_and_kwargs(args)
