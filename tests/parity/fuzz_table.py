"""What the fuzz draws: fields of the arguments with values that people write; models, data, callbacks and resumes.

A case is a dict of the rows that differ from their default: the name of a row and its value. Each row is drawn with a
generator of its own, so that a row added to the table changes no other row of a seed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling, GenerationConfig

from . import data, models, rows
from .rows import Task

Case = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One thing that varies.

    Attributes:
        name: a field of the arguments, or what `PARTS` or a bundle of fields calls it.
        chance: of another value than the default.
        values: the other values; of a row of `BUNDLES`, dicts of arguments.
        only: whether the row has a meaning in a case.
    """

    name: str
    chance: float
    values: tuple[Any, ...]
    only: Callable[[Case], bool] = lambda case: True

    def draw(self, seed: int) -> Any:
        """A value, or None for the default."""
        generator = random.Random(f"{seed}/{self.name}")
        return generator.choice(self.values) if generator.random() < self.chance else None


# -- model and data ---------------------------------------------------------------------------------------------------


def own_labels(size: int) -> list[data.Item]:
    """Ragged pairs for an encoder-decoder: the labels are the input backwards."""
    return [{**item, "labels": item["input_ids"][::-1]} for item in data.ragged_texts(size)]


def next_word(model: Any) -> dict[str, Any]:
    return {"data_collator": DataCollatorForLanguageModeling(data.tokenizer(), mlm=False)}


def lists(size: int) -> list[data.Item]:
    """Vectors as lists: what datasets keeps of them too."""
    return [{**item, "x": item["x"].tolist()} for item in data.vectors(size)]


GPT2 = Task("gpt2", models.gpt2, data.sequences)
VIT = Task("vit", models.vit, data.images)
MODELS = {
    "dict": Task("dict", models.ReturnsDict, lists),
    "tuple": Task("tuple", models.ReturnsTuple, lists),
    "bert": rows.BERT,
    "gpt2": GPT2,
    "llama": rows.LLAMA,
    "t5": rows.T5,
    "mlm": rows.MLM,
    "vit": VIT,
}
RAGGED = {
    "bert": rows.PADDED,
    "gpt2": Task("gpt2", models.gpt2, rows.without_labels, next_word),
    "llama": Task("llama", models.llama, rows.without_labels, next_word),
    "t5": Task("t5", models.t5, own_labels, rows.seq2seq),
}
STREAMS = ("stream", "hf_stream")
CONTAINERS: dict[str, Callable[[list[data.Item]], Any]] = {
    "list": rows.as_it_is,
    "torch": data.TorchDataset,
    "hf": data.hf_dataset,
    "stream": data.Stream,
    "hf_stream": lambda items: data.hf_dataset(items).to_iterable_dataset(),
    "hf_with_text": rows.with_a_column_no_model_knows,
    "hf_with_numbers": lambda items: data.hf_dataset(items, length=list(range(len(items)))),
}


def task_of(case: Case) -> Task:
    return (RAGGED if case.get("ragged") else MODELS)[case.get("model", "dict")]


def is_text(case: Case) -> bool:
    return case.get("model") in RAGGED


def is_t5(case: Case) -> bool:
    return case.get("model") == "t5"


def is_stream(case: Case) -> bool:
    return case.get("data") in STREAMS


def is_first(case: Case) -> bool:
    return case.get("before") != "train"


def is_evaluated(case: Case) -> bool:
    return "evaluation" in case


class Scores:
    """Metrics of any predictions, at once or by batches."""

    def __init__(self) -> None:
        self.right: list[float] = []

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        found, labels = (self._first(one) for one in (prediction.predictions, prediction.label_ids))
        found = found.argmax(-1) if found.ndim > labels.ndim else found
        hits = (found == labels) if found.shape == labels.shape else np.ones(1)
        self.right.append(float(np.asarray(hits).astype("float64").mean()))
        if not compute_result:
            return {}
        given = {name: getattr(prediction, name, None) for name in ("inputs", "losses")}
        extras = {name: float(np.size(self._first(value))) for name, value in given.items() if value is not None}
        result = {"accuracy": float(np.mean(self.right)), **extras}
        self.right = []
        return result

    def _first(self, values: Any) -> Any:
        while isinstance(values, (list, tuple, dict)):
            values = next(iter(values.values())) if isinstance(values, dict) else values[0]
        return (
            values.float().numpy()
            if isinstance(values, torch.Tensor) and values.is_floating_point()
            else (np.asarray(values))
        )


def best_token(logits: Any, labels: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


PARTS = (
    Row("model", 0.75, ("tuple", "bert", "bert", "gpt2", "llama", "llama", "t5", "mlm", "vit")),
    Row("dropout", 0.3, (0.2,)),
    Row("ragged", 0.4, (True,), is_text),
    Row("data", 0.6, ("torch", "hf", "hf", "stream", "hf_stream", "hf_with_text")),
    Row("samples", 0.2, (3, 12, 13)),
    Row("eval_data", 0.25, ("none", "two", "stream", "one_sample")),
    Row("metrics", 0.4, ("scores", "scores", "best_token")),
    Row("model_init", 0.06, (True,)),
    Row("optimizers", 0.08, ("own", "own_class")),
    Row("loss_function", 0.06, (True,), lambda case: case.get("model") in (None, "tuple", "bert")),
    Row("subclass", 0.06, ("compute_loss", "log", "training_step", "create_scheduler")),
    Row(
        "callback",
        0.3,
        (
            "patience",
            "save",
            "stop",
            "epoch_stop",
            "evaluate",
            "log",
            "writes_logs",
            "returns_control",
            "stop_at_epoch",
            "save_at_epoch",
        ),
    ),
    Row("before", 0.06, ("evaluate", "predict", "train")),
    Row("resume", 0.25, ("first", "last", "newest"), lambda case: "saving" in case or "best" in case),
    Row("longer", 0.25, (True,), lambda case: "resume" in case and case.get("model") != "mlm" and is_first(case)),
    # transformers' arguments have no `loss_weighting`, which the comparison of windows needs
    Row("their_arguments", 0.04, (True,), lambda case: "gradient_accumulation_steps" not in case),
)

# -- arguments --------------------------------------------------------------------------------------------------------


def bundle(**settings: Any) -> dict[str, Any]:
    return settings


FIVE_TOKENS = GenerationConfig(max_new_tokens=5, decoder_start_token_id=0)
EVERY_2 = bundle(eval_strategy="steps", eval_steps=2)
BEST_STEPS = EVERY_2 | bundle(save_strategy="steps", save_steps=2, load_best_model_at_end=True)
BEST_EPOCH = bundle(eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)

# Values are dicts of arguments.
BUNDLES = (
    Row(
        "length",
        0.6,
        (
            bundle(max_steps=4),
            bundle(max_steps=7),
            bundle(num_train_epochs=1),
            bundle(num_train_epochs=3),
            bundle(num_train_epochs=1.5),
            bundle(num_train_epochs=0.5),
            bundle(max_steps=4, num_train_epochs=1),
        ),
    ),
    Row(
        "schedule",
        0.45,
        (
            bundle(lr_scheduler_type="cosine"),
            bundle(lr_scheduler_type="cosine"),
            bundle(lr_scheduler_type="constant"),
            bundle(lr_scheduler_type="constant_with_warmup"),
            bundle(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0}),
            bundle(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}),
            bundle(lr_scheduler_type="inverse_sqrt"),
            bundle(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-4}),
            bundle(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}),
            bundle(lr_scheduler_type="cosine_warmup_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}),
            bundle(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 2}),
            bundle(lr_scheduler_type="reduce_lr_on_plateau"),
            bundle(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0}),
            bundle(lr_scheduler_type="greedy"),
            bundle(lr_scheduler_type="cosine", lr_scheduler_kwargs="{}"),
        ),
    ),
    Row(
        "optimizer",
        0.35,
        (
            bundle(optim="adamw_torch"),
            bundle(optim="adamw_torch"),
            bundle(optim="sgd"),
            bundle(optim="adafactor"),
            bundle(optim="adagrad"),
            bundle(optim="rmsprop"),
            bundle(optim="sgd", optim_args="momentum=0.9"),
            bundle(optim="rmsprop", optim_args="alpha=0.9,momentum=0.1"),
        ),
    ),
    Row(
        "logging",
        0.45,
        (
            bundle(logging_steps=2),
            bundle(logging_steps=3),
            bundle(logging_steps=0.25),
            bundle(logging_steps=500),
            bundle(logging_strategy="epoch"),
            bundle(logging_strategy="no"),
            bundle(logging_steps=10),
        ),
    ),
    Row(
        "evaluation",
        0.5,
        (
            EVERY_2,
            bundle(eval_strategy="steps", eval_steps=3),
            bundle(eval_strategy="steps"),
            bundle(eval_strategy="steps", eval_steps=0.5),
            bundle(eval_strategy="steps", eval_steps=500),
            bundle(eval_strategy="epoch"),
            bundle(eval_strategy="epoch"),
            bundle(do_eval=True),
        ),
    ),
    Row(
        "saving",
        0.5,
        (
            bundle(save_strategy="steps", save_steps=2),
            bundle(save_strategy="steps", save_steps=3),
            bundle(save_strategy="steps", save_steps=0.5),
            bundle(save_strategy="steps", save_steps=500),
            bundle(save_strategy="epoch"),
            bundle(save_strategy="epoch"),
        ),
    ),
    Row(
        "best",
        0.4,
        (
            BEST_STEPS,
            BEST_STEPS,
            BEST_STEPS | bundle(save_steps=4),
            BEST_STEPS | bundle(save_steps=3),
            BEST_EPOCH,
            BEST_EPOCH,
            BEST_EPOCH | bundle(save_strategy="steps"),
            bundle(load_best_model_at_end=True),
            BEST_STEPS | bundle(save_strategy="best", metric_for_best_model="loss"),
            BEST_STEPS | bundle(save_strategy="best", metric_for_best_model="accuracy"),
            BEST_EPOCH | bundle(save_strategy="best"),
            EVERY_2 | bundle(save_strategy="best", metric_for_best_model="eval_loss"),
        ),
        is_evaluated,
    ),
    Row(
        "checkpointing",
        0.06,
        (
            bundle(activation_checkpointing=True),
            bundle(gradient_checkpointing=True),
            bundle(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False}),
            bundle(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
            bundle(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
        ),
    ),
    Row(
        "workers",
        0.02,
        (
            bundle(dataloader_num_workers=1),
            bundle(dataloader_num_workers=1, dataloader_persistent_workers=True),
            bundle(dataloader_num_workers=2, dataloader_prefetch_factor=4),
            bundle(dataloader_persistent_workers=True),
            bundle(dataloader_prefetch_factor=2),
            bundle(dataloader_num_workers=1, dataloader_multiprocessing_context="fork"),
        ),
        lambda case: case.get("model") != "mlm",
    ),  # whose collator draws in the workers: docs/migrate.md
    Row(
        "generation",
        0.5,
        (
            bundle(predict_with_generate=True, generation_max_length=6),  # always a length: see docs/migrate.md
            bundle(predict_with_generate=True, generation_max_length=6, generation_num_beams=2),
            bundle(generation_max_length=6),
            bundle(predict_with_generate=True, generation_config=FIVE_TOKENS),
        ),
        is_t5,
    ),
)

FIELDS = (
    Row("per_device_train_batch_size", 0.3, (2, 3, 8, 64)),
    Row("gradient_accumulation_steps", 0.35, (2, 2, 3, 9)),
    Row("learning_rate", 0.3, (5e-5, 1e-3, 0.3, 0.0)),
    Row("warmup_steps", 0.25, (1, 2, 0.2, 0.1, 100)),
    Row("weight_decay", 0.25, (0.01, 0.3)),
    Row("adam_beta1", 0.05, (0.5,)),
    Row("adam_beta2", 0.1, (0.95, 0.98)),
    Row("adam_epsilon", 0.1, (1e-6, 1e-4)),
    Row("max_grad_norm", 0.2, (0.0, 0.01, 5.0)),
    Row("label_smoothing_factor", 0.12, (0.1, 0.2)),
    Row("average_tokens_across_devices", 0.05, (False,)),
    Row("bf16", 0.08, (True,)),
    Row("fp16", 0.02, (True,)),
    Row("bf16_full_eval", 0.03, (True,)),
    Row("fp16_full_eval", 0.02, (True,)),
    Row("tf32", 0.02, (True, False)),
    Row("use_cache", 0.03, (True, False)),
    Row("neftune_noise_alpha", 0.06, (5.0, 0.1)),
    Row("torch_empty_cache_steps", 0.04, (1, 3)),
    Row("auto_find_batch_size", 0.05, (True,)),
    Row("logging_first_step", 0.15, (True,)),
    Row("logging_nan_inf_filter", 0.05, (False,)),
    Row("log_on_each_node", 0.03, (False,)),
    Row("include_num_input_tokens_seen", 0.1, (True, "all", "non_padding", False)),
    Row("log_level", 0.05, ("passive", "warning", "info")),
    Row("log_level_replica", 0.03, ("error",)),
    Row("run_name", 0.05, ("first-try",)),
    Row("project", 0.02, ("mine",)),
    Row("eval_delay", 0.1, (1, 2, 3.0, 100)),
    Row("per_device_eval_batch_size", 0.3, (1, 3, 4, 64)),
    Row("prediction_loss_only", 0.07, (True,)),
    Row("eval_on_start", 0.1, (True,)),
    Row("eval_do_concat_batches", 0.06, (False,)),
    Row("eval_use_gather_object", 0.03, (True,)),
    Row("eval_accumulation_steps", 0.12, (1, 2)),
    Row("include_for_metrics", 0.08, (["inputs"], ["loss"], ["inputs", "loss"])),
    Row("batch_eval_metrics", 0.08, (True,)),
    Row("save_only_model", 0.08, (True,)),
    Row("save_total_limit", 0.2, (1, 2, 3)),
    Row("save_on_each_node", 0.03, (True,)),
    Row("metric_for_best_model", 0.15, ("loss", "eval_loss", "accuracy", "eval_accuracy", "nonsense")),
    Row("greater_is_better", 0.1, (True, False)),
    Row("ignore_data_skip", 0.08, (True,)),
    Row("restore_callback_states_from_checkpoint", 0.06, (True,)),
    Row("full_determinism", 0.03, (True,)),
    Row("seed", 0.3, (1, 2, 42)),
    Row("data_seed", 0.12, (7, 42)),
    Row(
        "accelerator_config",
        0.1,
        (
            {"split_batches": True},
            {"dispatch_batches": False},
            {"even_batches": False},
            {"use_seedable_sampler": False},
            {"non_blocking": True},
            {"split_batches": False, "dispatch_batches": None},
            {"dispatch_batches": True},
            {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        ),
    ),
    Row("dataloader_drop_last", 0.15, (True,)),
    Row("dataloader_pin_memory", 0.08, (False,)),
    Row("dataloader_in_order", 0.03, (False,)),
    Row("remove_unused_columns", 0.12, (False,)),
    Row("label_names", 0.05, (["labels"], [], ["labels", "input_ids"], ["nothing"])),
    Row("train_sampling_strategy", 0.15, ("sequential", "group_by_length", "random")),
    Row("length_column_name", 0.04, ("length", "size")),
    Row("ddp_find_unused_parameters", 0.04, (False, True)),
    Row("ddp_bucket_cap_mb", 0.03, (25,)),
    Row("ddp_broadcast_buffers", 0.03, (False,)),
    Row("ddp_static_graph", 0.02, (False, True)),
    Row("ddp_timeout", 0.03, (60,)),
    Row("debug", 0.03, ("underflow_overflow", "")),
    Row("skip_memory_metrics", 0.03, (False,)),
    Row("do_train", 0.1, (True,)),
    Row("do_predict", 0.04, (True,)),
    Row("hub_model_id", 0.02, ("me/mine",)),
    Row("hub_strategy", 0.02, ("end",)),
    Row("hub_private_repo", 0.02, (True,)),
    Row("hub_always_push", 0.02, (True,)),
    Row("hub_revision", 0.02, ("main",)),
    Row("hub_token", 0.02, ("hf_token",)),
    Row("trackio_space_id", 0.02, ("trackio", "me/mine")),
    Row("trackio_bucket_id", 0.02, ("me/bucket",)),
    Row("trackio_static_space_id", 0.02, ("me/static",)),
    Row("enable_jit_checkpoint", 0.03, (True,)),
    Row("use_liger_kernel", 0.01, (True,)),
    Row("liger_kernel_config", 0.02, ({"rope": True},)),
    Row("local_rank", 0.02, (0, -1)),
    Row("fsdp", 0.01, ("full_shard", "")),
    Row("fsdp_config", 0.01, ({"min_num_params": 0},)),
    Row("optim_target_modules", 0.02, ("all-linear",)),
    Row("disable_tqdm", 0.04, (False,)),
    Row("report_to", 0.06, ([], "none", ["none"])),
    Row("resume_from_checkpoint", 0.03, ("checkpoint-2",)),
)
# Fields that are not drawn, and why.
LEFT_OUT = {
    "output_dir": "each side has a folder of its own",
    "use_cpu": "always set: the sides are compared on the CPU",
    "deepspeed": "needs processes",
    "ddp_backend": "needs processes",
    "parallelism_config": "needs processes",
    "push_to_hub": "needs a network",
    "torch_compile": "takes seconds a run",
    "torch_compile_backend": "turns compilation on",
    "torch_compile_mode": "turns compilation on",
    "sortish_sampler": "has no effect there: docs/migrate.md",
}
TABLE = (*PARTS, *BUNDLES, *FIELDS)
ROWS = {row.name: row for row in TABLE}
assert len(ROWS) == len(TABLE)

BASE: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "seed": 11,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "log_level": "error",
    "use_cpu": True,
}


def draw(seed: int) -> Case:
    """The case of a seed: a pure function."""
    drawn = {row.name: value for row in TABLE if (value := row.draw(seed)) is not None}
    return with_meaning(drawn)


def with_meaning(case: Case) -> Case:
    """A case without the rows that mean nothing beside the others."""
    return {name: value for name, value in case.items() if ROWS[name].only(case)}


def num_samples(case: Case) -> int:
    """Of the training data. Where the ends of a stream differ (docs/migrate.md), it has whole batches and windows.

    But for a case with "tail", of a test that looks at the ends.
    """
    size = case.get("samples", 11)
    accumulated = case.get("gradient_accumulation_steps", 1)
    batch = case.get("per_device_train_batch_size", 4)
    window = batch * accumulated
    differs = (
        is_stream(case)
        and "tail" not in case
        and (accumulated > 1 or ("dataloader_drop_last" in case and size > batch))
    )
    return -(-size // window) * window if differs else size


def settings(case: Case) -> dict[str, Any]:
    """The arguments of a case, but for its folder; "more" are some that are not drawn."""
    given = BASE | ({"max_steps": 5} if is_stream(case) else {})
    for row in BUNDLES:
        given |= case.get(row.name, {})
    if case.get("longer"):  # the only schedule that is the same on a longer run (docs/resume.md)
        given |= {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": None}
    drawn = given | {row.name: case[row.name] for row in FIELDS if row.name in case}
    return copy.deepcopy(drawn | case.get("more", {}))  # the original writes into a dict of accelerator_config
