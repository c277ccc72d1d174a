"""What is refused, what is warned of, and why: a table of provocations, each beside what transformers' Trainer does.

A row is (id, parts of `make_trainer` or settings, words). Rows of TRAINS train on both sides, and one of our warnings
has the words. Rows of RAISES end in an error on both sides; the third entry is the place of ours, through which our
error came. CALLS are the same for what is no training. NOT_RUN says what the original does where a test on one CPU
cannot run it. PROTECTED are refused only by ours, with a line in docs/migrate.md. The rows are compared with src by
tests/contract/test_refusals_are_justified.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, Sampler, SequentialSampler

import trainwright
from trainwright.engine.fsdp import check_wrapped_classes

from .._support.small import Side, accuracy, data, make_trainer, models, module

EVAL = {"eval_dataset": data.vectors(8)}
BEST = {"load_best_model_at_end": True}
SMOKE = {"max_steps": 2}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data.vectors(26))


class Head(models.ReturnsDict):
    """Its loss is made by `of`, from its logits."""

    def __init__(self, of: Callable[[torch.Tensor], Any], trainable: bool = True) -> None:
        super().__init__(0.0)
        self.of = of
        self.requires_grad_(trainable)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.body(x))
        return {"loss": self.of(logits), "logits": logits}


def quantized(**facts: bool) -> Any:
    """Returns a module that says of itself what a model quantised by transformers says."""
    model: Any = module()
    model.is_quantized = True
    config = SimpleNamespace(quant_method="some-bits")
    model.hf_quantizer = SimpleNamespace(quantization_config=config, **({"is_trainable": True} | facts))
    return model


class NoWeights(nn.Module):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": x.mean(), "logits": x}


class Unlayered(nn.Module):
    """A module without a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(models.FEATURES, models.CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(x)
        return {"loss": logits.mean(), "logits": logits}


class MoreParts(Unlayered):
    """Batches of two have `more` results, others so many fewer."""

    def __init__(self, before: int, more: int) -> None:
        super().__init__()
        self.before = before
        self.more = more

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        parts = self.before + (self.more if len(x) == 2 else 0)
        if not self.training:  # batches of 3 and 2 are averaged with another rounding
            found["loss"] = found["loss"] * 0
        return {**found, **{f"part{i}": found["logits"] * i for i in range(parts)}}


class OneMoreDimension(Unlayered):
    """The results of a batch of two have one dimension more than others."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        return {**found, "logits": found["logits"][..., None] if len(x) == 2 else found["logits"]}


class Claims(Sampler[int]):
    """Gives another number of indices than it says."""

    def __init__(self, says: int, gives: int) -> None:
        self.says = says
        self.gives = gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.gives))


class EmptyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ReturnsFive(trainwright.TrainerCallback, transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        return 5


def with_lengths(*lengths: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": [[0.0] * models.FEATURES] * 4, "labels": [0] * 4, "length": list(lengths)})


def without_lengths(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "labels")}


def in_parts(before: int, more: int) -> dict[str, Any]:
    """An evaluation whose last batch has more parts; the metric is of all of them."""
    return {
        **EPOCHS,
        "model": models.seeded(lambda: MoreParts(before, more)),
        "eval_dataset": data.vectors(5),
        "per_device_eval_batch_size": 3,
        "compute_metrics": lambda found: {
            "parts": len(found.predictions),
            "sum": float(sum(part.sum() for part in found.predictions)),
        },
    }


GALORE = {"optim": "galore_adamw", "optim_target_modules": "all-linear"}
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch"}


TRAINS: list[tuple[str, dict[str, Any], str]] = [
    ("warm-up", {**SMOKE, "warmup_steps": 100}, "warmup_steps=100 max_steps=2"),
    ("half a step of warm-up", {**SMOKE, "warmup_steps": 1.5}, "warmup_steps=1.5"),
    ("logging", {**SMOKE, "logging_steps": 10}, "logging_steps=10 max_steps=2"),
    ("eval", {**SMOKE, **EVAL, "eval_strategy": "steps", "eval_steps": 10}, "eval_steps=10 max_steps=2"),
    ("save", {**SMOKE, "save_strategy": "steps", "save_steps": 50}, "save_steps=50 max_steps=2"),
    ("no save", {**SMOKE, "save_strategy": "steps", "save_steps": 0}, "save_steps=0"),
    ("negative", {**SMOKE, "logging_steps": -1}, "logging_steps=-1"),
    (
        "delay",
        {**SMOKE, **EVAL, "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 9},
        "eval_delay=9 max_steps=2",
    ),
    ("delay in epochs", {**EVAL, "num_train_epochs": 1, "eval_strategy": "epoch", "eval_delay": 9}, "eval_delay=9"),
    (
        "no batch",
        {"max_steps": 3, "dataloader_drop_last": True, "per_device_train_batch_size": 64},
        "dataloader_drop_last",
    ),
    ("no epoch", {"num_train_epochs": 0}, "num_train_epochs=0"),
    ("grouped stream", {**SMOKE, "train_dataset": Stream(), "train_sampling_strategy": "group_by_length"}, "stream"),
    ("balanced stream", {**SMOKE, "train_dataset": Stream(), "train_sampling_strategy": "batch_rebalance"}, "stream"),
    ("best without evaluation", {**SMOKE, **BEST}, "load_best_model_at_end=True eval_strategy='no'"),
    ("best by a metric, none", {**SMOKE, **BEST, "metric_for_best_model": "f1"}, "load_best_model_at_end=True"),
    ("best saves, none", {**SMOKE, "save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best'"),
    ("input of metrics", {**SMOKE, "include_for_metrics": ["input"]}, "include_for_metrics ['input']"),
    ("empty evaluation", {**SMOKE, "eval_dataset": [], "eval_strategy": "steps", "eval_steps": 1}, "set is empty"),
    ("decay", {**SMOKE, "weight_decay": -0.1}, "weight_decay=-0.1"),
    ("norm", {**SMOKE, "max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
    ("limit", {**SMOKE, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 0}, "save_total_limit=0"),
    ("beta of SGD", {**SMOKE, "optim": "sgd", "adam_beta1": 2.0}, "adam_beta1=2.0"),
    ("option of AdamW", {**SMOKE, "optim_args": "speed=3"}, "optim_args 'speed'"),
    ("option of a constant rate", {**SMOKE, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}}, "'a'"),
    ("metrics of a TPU", {**SMOKE, "debug": "tpu_metrics_debug"}, "debug='tpu_metrics_debug' has no effect"),
    ("parts of results, more later", in_parts(1, 1), "has 3 parts where earlier ones had 2"),
    ("parts of results, fewer later", in_parts(2, -1), "has 2 parts where earlier ones had 3"),
    (
        "fractions of lengths",
        {
            **BY_LENGTH,
            "train_dataset": with_lengths(3.5, 3.25, 8.0, 1.5),
            "per_device_train_batch_size": 1,
            "remove_unused_columns": False,
            "data_collator": without_lengths,
        },
        "",
    ),
    (
        "empty lengths beside texts",
        {
            **BY_LENGTH,
            **SMOKE,
            "model": models.seeded(models.bert),
            "train_dataset": datasets.Dataset.from_list([{**row, "length": None} for row in data.texts(8)]),
        },
        "'length' 8 empty values measured",
    ),
    ("a sampler of more", {"sampler": Claims(10, 26)}, "len() 10 yielded 12 ends before the sampler does"),
    ("a sampler of fewer", {"sampler": Claims(26, 10)}, "len() 26 yielded 10 ends early"),
]

CLOSED = module()
RAISES: list[tuple[str, dict[str, Any], str]] = [  # the last entry: what raises here
    ("no model", {"model": None}, "run.checks.check_models"),
    ("two models", {"model": module(), "model_init": module}, "run.checks.check_models"),
    ("init of two", {"model_init": lambda a, b: None}, "run.build.call_model_init"),
    ("init of none", {"model_init": lambda: None}, "run.build.call_model_init"),
    (
        "closure",
        {"model": CLOSED, "optimizers": (torch.optim.LBFGS(CLOSED.parameters()), None)},
        "run.checks.check_needs_no_closure",
    ),
    ("no data", {"train_dataset": None}, "trainer.Trainer.get_train_dataloader"),
    ("empty data", {"train_dataset": []}, "run.checks.check_has_samples"),
    ("no batch", {"dataloader_drop_last": True, "per_device_train_batch_size": 64}, "run.checks.check_has_batches"),
    ("stream without length", {"train_dataset": Stream()}, "run.checks.check_datasets"),
    ("collator", {"data_collator": 5}, "run.checks.check_datasets"),
    ("no set to evaluate", {"eval_strategy": "epoch"}, "run.checks.check_datasets"),
    ("none at the start", {"eval_on_start": True}, "rules.first_evaluation_needs_data"),
    ("metrics by batch", {**EVAL, "batch_eval_metrics": True, "compute_metrics": accuracy}, "run.checks.check_metrics"),
    ("columns", {"train_dataset": datasets.Dataset.from_dict({"a": [1, 2]})}, "data.columns.remove_unused"),
    ("no dict", {"data_collator": lambda rows: torch.zeros(2, 6)}, "run.input_pipeline.check_unnamed_batch"),
    ("empty batch", {"data_collator": lambda rows: {}}, "run.input_pipeline.raise_empty_batch"),
    ("no loss", {"data_collator": lambda rows: {"x": torch.zeros(2, 6)}}, "run.checks.raise_no_loss"),
    ("lengths", {"train_sampling_strategy": "group_by_length"}, "data.length_sampler.read_lengths"),
    (
        "two optimizers",
        {
            "optimizers": (torch.optim.SGD(module().parameters(), lr=0.1), None),
            "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1}),
        },
        "run.checks.check_optimizers",
    ),
    ("half weights", {"model": module().half(), "fp16": True}, "run.checks.check_trainable"),
    ("quantised", {"model": quantized()}, "run.checks._check_quantized"),
    ("quantised, compiled", {"model": torch.compile(quantized(), backend="eager")}, "run.checks._check_quantized"),
    (
        "quantised for use",
        {"model": quantized(is_trainable=False, is_qat_trainable=True)},
        "run.checks._check_quantized",
    ),
    ("noise", {"neftune_noise_alpha": 5.0}, "support.patches.add_noise_to_embeddings"),
    ("kernels", {"use_liger_kernel": True}, "errors.needs_package"),
    ("optimizer", {"optim": "nope"}, "config.enums.ExplicitEnum._missing_"),
    ("schedule", {"lr_scheduler_type": "nope"}, "config.enums.ExplicitEnum._missing_"),
    ("option of a schedule", {"lr_scheduler_kwargs": {"a": 1}}, "optim.schedules._check_options"),
    ("missing option", {"lr_scheduler_type": "cosine_with_min_lr"}, "optim.schedules._check_options"),
    ("optim_args", {"optim_args": "speed"}, "optim.factory.parse_optim_args"),
    ("projection", {"optim": "galore_adamw"}, "optim.parameter_groups.target_parameters"),
    ("unknown field", {"nope": 3}, "config.rules.stages.refuse"),
    ("unknown key", {"accelerator_config": {"nope": 1}}, "config.accelerator._refuse_unknown"),
    (
        "unknown key of accumulation",
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_step": 4}}},
        "config.accelerator._refuse_unknown",
    ),
    (
        "accumulation",
        {"gradient_accumulation_steps": 2, "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
        "config.resolve.micro_batches",
    ),
    ("tracker", {"report_to": "nope"}, "trackers.registry.get_reporting_integration_callbacks"),
    ("resume of none", {"resume": True}, "run.resume.find_checkpoint"),
    ("resume of a missing one", {"resume": "nowhere"}, "checkpoint.store.verified"),
    ("both halves", {"fp16": True, "bf16": True}, "rules.one_precision"),
    ("both halves of evaluation", {"fp16_full_eval": True, "bf16_full_eval": True}, "rules.one_eval_precision"),
    ("tf32", {"tf32": True}, "rules.tf32_is_supported"),
    ("prefetch", {"dataloader_prefetch_factor": 2}, "rules.prefetch_needs_workers"),
    ("persistence", {"dataloader_persistent_workers": True}, "rules.persistence_needs_workers"),
    ("start method", {"dataloader_multiprocessing_context": "spawn"}, "rules.start_method_needs_workers"),
    ("logging 0", {"logging_steps": 0}, "rules.logging_interval"),
    ("eval 2.5", {**EVAL, "eval_strategy": "steps", "eval_steps": 2.5}, "rules.eval_interval"),
    ("save 2.5", {"save_strategy": "steps", "save_steps": 2.5}, "rules.save_interval"),
    ("best, no evaluation", {**BEST, "save_strategy": "steps"}, "rules.best_needs_evaluation"),
    (
        "best, other",
        {**EVAL, **BEST, "eval_strategy": "epoch", "save_strategy": "steps"},
        "rules.best_needs_matching_saves",
    ),
    (
        "best, not a multiple",
        {**EVAL, **BEST, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 5},
        "rules.best_saves_are_multiples",
    ),
    (
        "best, no metric",
        {**EVAL, "eval_strategy": "epoch", "save_strategy": "best"},
        "rules.saving_the_best_needs_a_metric",
    ),
    ("plateau", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "rules.schedule_needs_evaluation"),
    (
        "sets",
        {**BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "eval_dataset": {"a": data.vectors(4)}},
        "rules.best_metric_names_its_set",
    ),
    (
        "metric",
        {**EVAL, **BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "f1"},
        "rules.best_metric_is_computed",
    ),
    (
        "misspelt",
        {
            **EVAL,
            **BEST,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "metric_for_best_model": "f1",
            "compute_metrics": accuracy,
        },
        "run.dry_run._find_metric",
    ),
    ("parallelism", {"parallelism_config": SimpleNamespace(tp_size=0)}, "rules.sizes_are_accelerates"),
    ("batch of 0", {"per_device_train_batch_size": 0}, "config.rules.stages.refuse"),
    ("negative rate", {"learning_rate": -1.0}, "config.rules.stages.refuse"),
    ("loss of each sample", {"model": Head(lambda logits: logits.mean(-1))}, "run.checks.explain_loss"),
    ("whole loss", {"model": Head(lambda logits: logits.argmax())}, "run.checks.explain_loss"),
    ("detached loss", {"model": Head(lambda logits: logits.mean().detach())}, "run.checks.explain_loss"),
    ("frozen model", {"model": Head(torch.mean, trainable=False)}, "run.checks._raise_nothing_to_train"),
    ("no weights", {"model": NoWeights()}, "run.checks._raise_nothing_to_train"),
    ("a number as the loss", {"model": Head(lambda logits: 0.5)}, "run.checks._raise_no_tensor"),
    (
        "no head",
        {"model": transformers.BertModel(models._bert_config(0.0)), "train_dataset": data.texts(8)},
        "run.checks.check_head",
    ),
    ("no loss in the metrics", {**EVAL, **EPOCHS, **BEST, "label_names": []}, "run.checks.need_best_metric"),
    ("generator", {**SMOKE, "train_dataset": (item for item in data.vectors(8))}, "run.checks.check_is_dataset"),
    ("best of an empty set", {**EPOCHS, **BEST, "eval_dataset": []}, "run.checks.check_sets_have_samples"),
    (
        "best of an empty stream",
        {
            **EPOCHS,
            **BEST,
            "eval_dataset": EmptyStream(),
            "compute_metrics": accuracy,
            "metric_for_best_model": "accuracy",
        },
        "run.dry_run.FirstBatch.__init__",
    ),
    ("list as a configuration", {"accelerator_config": ["split_batches"]}, "config.accelerator.AcceleratorConfig.of"),
    ("word of an interval", {"eval_strategy": "sometimes"}, "config.coerce.as_enum"),
    (
        "two places of one setting",
        {"split_batches": True, "accelerator_config": "nowhere.json"},
        "config.aliases.DictKey.meaning",
    ),
    ("warm-up of five runs", {"warmup_ratio": 5.0}, "config.aliases.ratio_to_steps"),
    ("traced evaluation", {"jit_mode_eval": True}, "config.aliases.Refused.meaning"),
    ("configuration of DeepSpeed", {"deepspeed": "nowhere.json"}, "config.deepspeed_config.read"),
    ("sharded alone", {"fsdp": "full_shard"}, "config.resolve.fsdp"),
    ("tensors as samples", {"train_dataset": [1.5] * 8}, "data.columns.RemoveColumnsCollator.__call__"),
    ("empty lengths", {**BY_LENGTH, "train_dataset": with_lengths(3, None, 2, 1)}, "data.length_sampler.read_lengths"),
    ("number of an option", {"optim": "rmsprop", "optim_args": "alpha=fast"}, "optim.optimizer_table.number"),
    ("value of an option", {"optim": "rmsprop", "optim_args": "alpha=fast"}, "optim.factory.read"),
    ("whole option", {**GALORE, "optim_args": "rank=two"}, "optim.optimizer_table.whole"),
    (
        "choice of an option",
        {**GALORE, "optim_args": "rank=2,proj_type=sideways"},
        "optim.optimizer_table.choose_word.convert",
    ),
    ("package of an optimizer", {"optim": "adamw_anyprecision"}, "optim.factory.load_class"),
    (
        "updates in backward",
        {**GALORE, "optim": "galore_adamw_layerwise", "gradient_accumulation_steps": 2},
        "optim.factory.optimizer_class_and_kwargs",
    ),
    ("expression", {**GALORE, "optim_target_modules": ["("]}, "optim.parameter_groups.check_patterns"),
    ("no layers", {"model": Unlayered(), "gradient_checkpointing": True}, "support.patches._checkpointed_layers"),
    ("metrics in no dict", {**EVAL, **EPOCHS, "compute_metrics": lambda found: 5}, "evaluation.eval_loop._prefixed"),
    (
        "names of metrics",
        {**EVAL, **EPOCHS, "compute_metrics": lambda found: {5: 1.0}},
        "evaluation.eval_loop._prefixed",
    ),
    ("parts of results, none before", in_parts(0, 1), "evaluation.nested_collector.NestedCollector._joined"),
    ("parts of results, none later", in_parts(1, -1), "evaluation.nested_collector.NestedCollector._joined"),
    (
        "dimensions of results",
        {
            **EPOCHS,
            "model": OneMoreDimension(),
            "eval_dataset": data.vectors(5),
            "per_device_eval_batch_size": 3,
            "compute_metrics": lambda found: {},
        },
        "evaluation.nested_collector.GrowingArray.add",
    ),
    ("five from a callback", {"callbacks": [ReturnsFive()]}, "callbacks.dispatch._read_result"),
]

MODULES = {"transformers": transformers, "trainwright": trainwright}


def _arguments(side: Side, folder: Path, **settings: Any) -> Any:
    return side.arguments(output_dir=str(folder), use_cpu=True, **settings)


def _stopping_early(side: Side, folder: Path, **settings: Any) -> None:
    callback = MODULES[side.name].EarlyStoppingCallback()
    make_trainer(folder, side, callbacks=[callback], **settings).train()


def _sampled_in_batches(side: Side, folder: Path) -> None:
    def sampler(self: Any, dataset: Any = None) -> Any:
        return BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)

    cls = type("Batched", (side.trainer,), {"_get_train_sampler": sampler})
    make_trainer(folder, side, cls, train_dataset=data.vectors(8)).train()


def _with_state(side: Side, folder: Path, *, mixed: str | None = None, **settings: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        if mixed is not None:
            Accelerator(mixed_precision=mixed, cpu=True)
        config = {"use_configured_state": True}
        make_trainer(folder, side, accelerator_config=config, **settings).train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _seq2seq(side: Side, folder: Path, model: Any, items: list[Any], **settings: Any) -> Any:
    home = MODULES[side.name]
    args = home.Seq2SeqTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **settings)
    return home.Seq2SeqTrainer(model=model, args=args, train_dataset=items, eval_dataset=items)


def _predicted(side: Side, folder: Path, model: Any, items: list[Any], **settings: Any) -> None:
    _seq2seq(side, folder, model, items, **settings).predict(items)


def _padded(side: Side, folder: Path) -> None:
    trainer = _seq2seq(side, folder, _without_padding(), data.pairs(2), **GENERATES)
    trainer._pad_tensors_to_max_len(torch.ones(1, 2, dtype=torch.long), 4)


def _generated_after_training(side: Side, folder: Path) -> None:
    items = data.vectors(4)
    trainer = _seq2seq(side, folder, module(), items, max_steps=1, save_strategy="no", **GENERATES)
    try:
        assert trainer.train().global_step == 1
        assert "eval_loss" in trainer.evaluate()
    except Exception as error:
        pytest.fail(f"training and losses need no generation: {error!r}")
    trainer.predict(items)


def _without_padding() -> Any:
    model = models.seeded(models.t5)
    for config in (model.config, model.generation_config):
        config.pad_token_id = config.eos_token_id = None
    return model


def _parser(side: Side) -> Any:
    parser = MODULES[side.name].HfArgumentParser
    return parser(side.arguments)


def _unresolved(side: Side, folder: Path) -> None:
    from dataclasses import make_dataclass

    MODULES[side.name].HfArgumentParser(make_dataclass("Mine", [("size", "Nowhere")]))


def _listed(side: Side, folder: Path) -> None:
    file = folder / f"{side.name}.json"
    file.write_text("[1]")
    _parser(side).parse_json_file(str(file))


def _wrapped(side: Side, folder: Path) -> None:
    """The plugin of accelerate, by which the original wraps; ours names the nearest class before it."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Nope"]
    )
    if side.name == "transformers":
        plugin.set_auto_wrap_policy(module())
    else:
        check_wrapped_classes(module(), plugin)


def _evaluated_without_names(side: Side, folder: Path) -> None:
    cls = type("OwnLoss", (side.trainer,), {"compute_loss": lambda self, model, inputs, **how: inputs[0].mean()})
    make_trainer(folder, side, cls, data_collator=lambda rows: [torch.zeros(2, 6)], **EVAL).evaluate()


GENERATES = {"predict_with_generate": True}
BAD_LENGTH = transformers.GenerationConfig()
BAD_LENGTH.max_new_tokens = -1
Attempt = Callable[[Side, Path], object]


def _evaluated_with_own_loss(side: Side, folder: Path, result: Callable[[torch.Tensor], Any]) -> None:
    """The overridden `compute_loss` returns a result of this form, whatever it is asked for."""
    own = {"compute_loss": lambda self, model, inputs, **how: result(inputs["x"].mean())}
    cls = type("OwnLoss", (side.trainer,), own)
    make_trainer(folder, side, cls, compute_metrics=accuracy, **EVAL).evaluate()


CALLS: list[tuple[str, Attempt, str]] = [  # the last entry: what raises here
    (
        "evaluation of nothing",
        lambda side, folder: make_trainer(folder, side).evaluate(),
        "trainer.Trainer.get_eval_dataloader",
    ),
    (
        "a loss alone, with metrics",
        lambda side, folder: _evaluated_with_own_loss(side, folder, lambda loss: loss),
        "evaluation.outputs.split_loss",
    ),
    (
        "a loss that is a number",
        lambda side, folder: _evaluated_with_own_loss(side, folder, float),
        "evaluation.outputs.split_loss",
    ),
    ("evaluation of no dict", _evaluated_without_names, "evaluation.outputs.is_for_loss"),
    (
        "an optimizer set later",
        lambda side, folder: side.trainer.get_optimizer_cls_and_kwargs(
            SimpleNamespace(
                optim="nope", optim_args=None, learning_rate=0.1, adam_beta1=0.9, adam_beta2=0.9, adam_epsilon=0.1
            )
        ),
        "optim.factory.find_optimizer_spec",
    ),
    (
        "no valid generation",
        lambda side, folder: _predicted(
            side, folder, models.seeded(models.t5), data.pairs(2), generation_config=BAD_LENGTH, **GENERATES
        ),
        "seq2seq_trainer.Seq2SeqTrainer.load_generation_config",
    ),
    (
        "fewer samples than groups",
        lambda side, folder: list(
            importlib.import_module(f"{side.name}.trainer_pt_utils").BatchRebalanceSampler([3, 2, 5, 6], 1, 2, 1)
        ),
        "data.balanced_batches.BatchRebalanceSampler.__init__",
    ),
    ("class of a layer", _wrapped, "engine.fsdp.check_wrapped_classes"),
    (
        "a callback that is not there",
        lambda side, folder: make_trainer(folder, side).remove_callback(ReturnsFive()),
        "callbacks.dispatch.CallbackHandler.remove_callback",
    ),
    ("early stopping, no metric", _stopping_early, "callbacks.flow.EarlyStoppingCallback.on_train_begin"),
    (
        "early stopping, no evaluation",
        lambda side, folder: _stopping_early(side, folder, metric_for_best_model="loss"),
        "callbacks.flow.EarlyStoppingCallback.on_train_begin",
    ),
    ("too many positions", lambda side, folder: side.arguments(*range(300)), "config.arguments._accepting.accept"),
    (
        "position and name",
        lambda side, folder: side.arguments(str(folder), output_dir=str(folder)),
        "config.arguments._accepting.accept",
    ),
    (
        "unknown word of a command line",
        lambda side, folder: _parser(side).parse_args_into_dataclasses(["--output_dir", "x", "--nope", "1"]),
        "config.parser.HfArgumentParser.parse_args_into_dataclasses",
    ),
    (
        "unknown key",
        lambda side, folder: _parser(side).parse_dict({"output_dir": "x", "nope": 1}),
        "config.parser.HfArgumentParser.parse_dict",
    ),
    ("list as arguments", _listed, "config.parser.HfArgumentParser._parse_tree"),
    ("type that is nowhere", _unresolved, "config.parser.HfArgumentParser._add_dataclass_arguments"),
    (
        "steps of 0",
        lambda side, folder: _arguments(side, folder).set_logging(strategy="steps", steps=0),
        "config.setters._require_steps",
    ),
    ("batch sampler", _sampled_in_batches, "data.sampler_factory.order_by"),
    ("no state", _with_state, "engine.accelerate_setup._check_state"),
    (
        "state of another type",
        lambda side, folder: _with_state(side, folder, mixed="no", bf16=True),
        "engine.accelerate_setup._check_state",
    ),
    (
        "optimizer of a model, no model",
        lambda side, folder: side.trainer.get_optimizer_cls_and_kwargs(_arguments(side, folder, **GALORE)),
        "optim.factory.optimizer_class_and_kwargs",
    ),
    (
        "two processing classes",
        lambda side, folder: side.trainer(
            model=module(), args=_arguments(side, folder), processing_class=data.tokenizer(), tokenizer=data.tokenizer()
        ),
        "run.build.one_processing_class",
    ),
    (
        "generation from nowhere",
        lambda side, folder: _predicted(
            side, folder, models.seeded(models.t5), data.pairs(2), generation_config="nowhere/at-all", **GENERATES
        ),
        "seq2seq_trainer.Seq2SeqTrainer.load_generation_config",
    ),
    (
        "generation of a classifier",
        lambda side, folder: _predicted(side, folder, models.seeded(models.bert), data.texts(2), **GENERATES),
        "seq2seq_trainer._check_can_generate",
    ),
    ("training of a module that cannot generate", _generated_after_training, "seq2seq_trainer._check_can_generate"),
    ("nothing to pad with", _padded, "seq2seq_trainer.Seq2SeqTrainer._pad_token_id"),
]

# The original ends too, where a test of one process on a CPU cannot run it: what it does there.
NOT_RUN: dict[str, str] = {
    "config.resolve._per_process": "accelerate's BatchSamplerShard raises for a batch that the processes do not divide",
    "config.resolve.writes_parts": "TrainingArguments raises for a file of fsdp_config that it cannot open",
    "config.deepspeed_config.settled": "HfTrainerDeepSpeedConfig raises: values that mismatch TrainingArguments",
    "config.deepspeed_config.sequence_size": "DeepSpeed divides by it: ZeroDivisionError or TypeError",
    "distributed.collectives._check_alike": "the processes wait for each other until torch's timeout",
    "distributed.elastic_store._answer_all": "init_process_group raises after its timeout",
    "distributed.watchdog.raise_first": "the other processes wait until torch's timeout, then raise",
    "distributed.world._check_ranks": "init_process_group waits for processes that do not come, then raises",
    "engine.accelerate_setup._missing_recipe_explained": "accelerate raises: this passes its error on, with a remedy",
    "config.deepspeed_config.filled_in": "HfTrainerDeepSpeedConfig raises for a model without a hidden size",
    "engine.long_context.make_long_context_engine": "AcceleratorState raises: cp_size needs version 2 of FSDP",
    "engine.long_context.check_model": "it raises without sdpa, and with other layers than full attention",
    "engine.long_context.try_parts": "accelerate raises for layers that are not full attention",
    "engine.sequence_parts": "a mask that is not causal is a ValueError, and other entries of a batch are not cut",
    "engine.sharded_base.check_adapter": "peft raises when it loads such an adapter, or in the first forward pass",
    "engine.fsdp.make_plugin": "torch ends the process when it saves a state of version 1 on the CPU",
    "run.late_parameters.restore_groups": "the optimizer raises in load_state_dict: another number of groups",
    "optim.optimizer_table.dtype": "a type that torch does not have is an AttributeError; the package is not installed",
    "optim.optimizer_table.flag": "strtobool raises; the packages whose options are flags are not installed",
    "support.patches.checkpointed_activations": "an unknown argument of a model of an older transformers: TypeError",
    "trainer.Trainer._evaluate": "CUDA's error of memory, which this passes on with the arguments to change",
}

# Refused here alone: a sentence of docs/migrate.md, "What is refused", and the functions that it speaks of.
PROTECTED: list[tuple[str, tuple[str, ...]]] = [
    ("A word that a field does not know", ("config.rules.stages.refuse",)),
    (
        "A resume in an epoch that cannot be continued",
        (
            "data.cursor",
            "data.positions",
            "data.streaming",
            "run.resume",
            "engine.deepspeed.set_weights",
            "engine.deepspeed.load_whole_optimizer_state",
            "engine.sharded_state.load_whole_optimizer_state",
            "optim.own_optimizers.LayerWiseDummyOptimizer.load_state_dict",
        ),
    ),
    (
        "A checkpoint that is damaged",
        (
            "checkpoint",
            "search.trials",
            "engine.sharded_state.read",
            "engine.sharded_state.SafeReader",
            "engine.sharded_state._Unpickler",
            "optim.factory._unpacked",
        ),
    ),
    ("A batch to generate from without a prompt", ("evaluation.generation",)),
    ("A stream that is empty", ("loop.fit.end_without_data",)),
    ("`PJRT_DEVICE=TPU`", ("distributed.device.refuse_missing",)),
    ("An older name, set as an attribute", ("config.deprecated.assign_older_name", "config.deprecated._meaning_for")),
    ("`jit_mode_eval=True`", ("config.setters._refuse_jit",)),
    (
        "Several processes with weights that would part",
        (
            "rules.updates_in_backward_stay_in_one_process",
            "rules.static_graph_sees_every_batch",
            "engine.sharded_base.check_sharded_parameters",
            "run.checks.check_ends_together",
            "rules.parts_on_one_disk",
            "rules.parts_keep_their_type",
        ),
    ),
    ("An optimizer with no parameter of the model", ("run.checks.check_optimizer", "run.train.check_replaced")),
    ("An `output_dir` with the checkpoints of another run", ("run.checkpointing", "capabilities.lease.lease")),
    ("20 steps in a row with a loss or gradient that is not finite", ("capabilities.guard.incident_log",)),
    ("A name in the space of a search that is not a field", ("search", "config.overrides")),
]
