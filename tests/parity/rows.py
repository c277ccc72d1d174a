"""The table: which model, on which data, with which settings. Pairwise, not the full product.

A `Task` is a model with the data that suits it; a `Row` is a task with settings. Where a setting must show in the
result, the row says so with `changes`: then `test_table_is_not_vacuous.py` holds it against the same task without it.

BERT and T5 take `**kwargs` and so are handed `num_items_in_batch`, which their own loss ignores: under accumulation of
4 the original adds four means, and logs four times the loss. The rows hold us to what it does with
`loss_weighting="original"`; by default, they hold us to a run in whole batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding

from . import data, models

Parts = Callable[[nn.Module | None], dict[str, Any]]


def nothing_more(model: nn.Module | None) -> dict[str, Any]:
    return {}


def as_it_is(items: Any) -> Any:
    return items


@dataclass(frozen=True, eq=False)
class Task:
    name: str
    model: Callable[..., nn.Module]
    items: Callable[[int], Any]
    parts: Parts = nothing_more

    def build(self, dropout: float) -> nn.Module:
        return models.seeded(partial(self.model, dropout))


@dataclass(frozen=True, eq=False)
class Row:
    task: Task
    setting: str
    args: dict[str, Any] = field(default_factory=dict)
    size: int = 26  # with batches of 4: seven in an epoch, the last one of 2
    dropout: float = 0.0
    parts: Parts = nothing_more
    wrap: Callable[[Any], Any] = as_it_is
    model_from_init: Callable[..., nn.Module] | None = None
    changes: str = "weights"  # or "log", or "nothing", against the same task without the setting

    @property
    def id(self) -> str:
        return f"{self.task.name}-{self.setting}"

    def settings(self) -> dict[str, Any]:
        return BASE | self.args


@cache
def plain(task: Task, size: int) -> Row:
    """What a row is held against, to see that its setting does something."""
    return Row(task, "plain" if size == Row.size else f"plain-{size}", size=size)


BASE: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "seed": 11,
}


def pad(model: nn.Module | None) -> dict[str, Any]:
    return {"processing_class": data.tokenizer()}


def mask(model: nn.Module | None) -> dict[str, Any]:
    return {"data_collator": DataCollatorForLanguageModeling(data.tokenizer(), mlm=True, mlm_probability=0.3)}


def seq2seq(model: nn.Module | None) -> dict[str, Any]:
    """Label smoothing takes the labels out of the batch: the collator must have made the decoder's input of them."""
    return {"data_collator": DataCollatorForSeq2Seq(data.tokenizer(), model=model)}


def without_labels(size: int) -> list[dict[str, Any]]:
    return [{"input_ids": item["input_ids"]} for item in data.ragged_texts(size)]


BERT = Task("bert", models.bert, data.texts)
PADDED = Task("padded", models.bert, data.ragged_texts, pad)
MLM = Task("mlm", models.bert_mlm, without_labels, mask)
LLAMA = Task("llama", models.llama, data.sequences)
T5 = Task("t5", models.t5, data.pairs)
DICT = Task("dict", models.ReturnsDict, data.vectors)
TUPLE = Task("tuple", models.ReturnsTuple, data.vectors)
FROZEN = Task("frozen", models.bert_with_frozen_encoder, data.texts)
ALL = (BERT, PADDED, MLM, LLAMA, T5, DICT, TUPLE, FROZEN)


def each(tasks: tuple[Task, ...], setting: str, /, **how: Any) -> list[Row]:
    row = {name: how.pop(name) for name in tuple(how) if name in Row.__dataclass_fields__}
    return [Row(task, setting, args=how, **row) for task in tasks]


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[1]
    total = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


def own_loss(model: nn.Module | None) -> dict[str, Any]:
    return {"compute_loss_func": summed_loss}


def own_optimizer(model: nn.Module | None) -> dict[str, Any]:
    assert model is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5))}


def own_optimizer_class(model: nn.Module | None) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 0.01, "betas": (0.8, 0.99)})}


def own_collator(model: nn.Module | None) -> dict[str, Any]:
    return {"data_collator": DataCollatorWithPadding(data.tokenizer(), pad_to_multiple_of=8)}


def with_lengths(items: list[dict[str, Any]]) -> Any:
    return data.hf_dataset(items, length=[len(item["input_ids"]) for item in items])


def with_a_column_no_model_knows(items: list[dict[str, Any]]) -> Any:
    return data.hf_dataset(items, text=["so it goes"] * len(items))


LOSS: list[Row] = [
    *each(ALL, "plain", changes="nothing"),
    *each(ALL, "accumulation-4-uneven-last-window", gradient_accumulation_steps=4),
    *each((BERT, LLAMA, T5, TUPLE), "accumulation-4-even", size=32, gradient_accumulation_steps=4),
    *each((LLAMA, DICT), "accumulation-3-last-window-of-1", gradient_accumulation_steps=3),
    *each((LLAMA, DICT), "accumulation-longer-than-the-epoch", gradient_accumulation_steps=9),
    *each((BERT, LLAMA), "label-smoothing", label_smoothing_factor=0.2),
    *each((T5,), "label-smoothing", label_smoothing_factor=0.2, parts=seq2seq),
    *each((BERT, LLAMA), "label-smoothing-accumulated", label_smoothing_factor=0.2, gradient_accumulation_steps=4),
    *each(
        (T5,), "label-smoothing-accumulated", label_smoothing_factor=0.2, gradient_accumulation_steps=4, parts=seq2seq
    ),
    *each((LLAMA,), "label-smoothing-dropout", label_smoothing_factor=0.1, dropout=0.2),
    *each((BERT, DICT), "own-loss", parts=own_loss, changes="nothing"),
    *each((BERT, DICT, TUPLE), "own-loss-accumulated", parts=own_loss, gradient_accumulation_steps=4),
    *each((LLAMA,), "not-averaged-across-devices", average_tokens_across_devices=False, changes="nothing"),
]
LENGTH: list[Row] = [
    *each((BERT, LLAMA, DICT), "max-steps-into-third-epoch", max_steps=17),
    *each((LLAMA, TUPLE), "max-steps-within-an-epoch", max_steps=5),
    *each((LLAMA,), "max-steps-ends-with-an-epoch", max_steps=14, num_train_epochs=1, changes="nothing"),
    *each((BERT, DICT), "max-steps-accumulated", max_steps=5, gradient_accumulation_steps=4),
    *each((BERT, LLAMA), "epochs-1.5", num_train_epochs=1.5),
    *each((DICT,), "epochs-0.4", num_train_epochs=0.4),
    *each((T5,), "epochs-2.5-accumulated", num_train_epochs=2.5, gradient_accumulation_steps=4),
    *each((BERT, DICT), "three-epochs", num_train_epochs=3),
    *each((DICT,), "batch-larger-than-the-data", per_device_train_batch_size=64),
    *each((BERT, TUPLE), "drop-last", dataloader_drop_last=True),
    *each((LLAMA,), "drop-last-accumulated", dataloader_drop_last=True, gradient_accumulation_steps=4),
]
RANDOM: list[Row] = [
    *each((BERT, PADDED, MLM, LLAMA, T5, DICT, TUPLE), "dropout", dropout=0.2),
    *each((BERT, PADDED, MLM, LLAMA, T5, DICT), "dropout-accumulated", dropout=0.2, gradient_accumulation_steps=4),
    *each((MLM, DICT), "dropout-three-epochs", dropout=0.2, num_train_epochs=3),
    *each((MLM,), "dropout-max-steps", dropout=0.2, max_steps=10, gradient_accumulation_steps=2),
    *each((BERT, LLAMA), "data-seed", data_seed=77),
    *each((BERT,), "data-seed-dropout", data_seed=77, dropout=0.2),
    *each((MLM, DICT), "data-seed-equal-to-seed", data_seed=11, changes="nothing"),
    *each((MLM, DICT), "seed", seed=12),
    *each((PADDED,), "group-by-length", train_sampling_strategy="group_by_length"),
    *each((PADDED,), "group-by-length-column", train_sampling_strategy="group_by_length", wrap=with_lengths),
    *each((MLM,), "group-by-length-dropout", train_sampling_strategy="group_by_length", dropout=0.2),
    *each(
        (PADDED,),
        "group-by-length-accumulated",
        train_sampling_strategy="group_by_length",
        gradient_accumulation_steps=3,
        num_train_epochs=3,
    ),
    *each((PADDED,), "group-by-length-data-seed", train_sampling_strategy="group_by_length", data_seed=5),
    *each((BERT, DICT), "sequential", train_sampling_strategy="sequential"),
    *each((BERT,), "sequential-dropout", train_sampling_strategy="sequential", dropout=0.2),
]
DATA: list[Row] = [
    *each((BERT, LLAMA, T5), "hf-dataset", wrap=data.hf_dataset, changes="nothing"),
    *each((BERT,), "hf-dataset-dropout", wrap=data.hf_dataset, dropout=0.2),
    *each((BERT, PADDED), "unknown-column", wrap=with_a_column_no_model_knows, changes="nothing"),
    *each((PADDED,), "hf-dataset", wrap=data.hf_dataset, changes="nothing"),
    *each((BERT, DICT), "torch-dataset", wrap=data.TorchDataset, changes="nothing"),
    *each((BERT, DICT), "stream", wrap=data.Stream, max_steps=9),
    *each((MLM,), "stream-dropout", wrap=data.Stream, max_steps=9, dropout=0.2),
    *each((DICT,), "stream-accumulated", size=32, wrap=data.Stream, max_steps=5, gradient_accumulation_steps=4),
    *each((PADDED,), "own-collator", parts=own_collator),
    *each((PADDED,), "own-collator-dropout", parts=own_collator, dropout=0.2),
]
OPTIM: list[Row] = [
    *each((BERT, LLAMA), "cosine", lr_scheduler_type="cosine"),
    *each((BERT, TUPLE), "constant", lr_scheduler_type="constant"),
    *each((LLAMA,), "constant-with-warmup", lr_scheduler_type="constant_with_warmup", warmup_steps=4),
    *each((T5,), "cosine-warmup-share", lr_scheduler_type="cosine", warmup_steps=0.25),
    *each((BERT, DICT), "linear-warmup", warmup_steps=3),
    *each((LLAMA,), "linear-warmup-share-accumulated", warmup_steps=0.3, gradient_accumulation_steps=2),
    *each((DICT,), "polynomial", lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0}),
    *each((DICT,), "cosine-restarts", lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}),
    *each((DICT,), "inverse-sqrt", lr_scheduler_type="inverse_sqrt", warmup_steps=2),
    *each((BERT, LLAMA, DICT), "weight-decay", weight_decay=0.3),
    *each((FROZEN,), "weight-decay-accumulated", weight_decay=0.3, gradient_accumulation_steps=4),
    *each((LLAMA, TUPLE), "no-clipping", max_grad_norm=0.0),
    *each((BERT, T5), "no-clipping-accumulated", max_grad_norm=0.0, gradient_accumulation_steps=4),
    *each((BERT, DICT), "clipped-hard", max_grad_norm=0.01, adam_epsilon=1e-3),
    *each((BERT,), "betas", adam_beta1=0.5, adam_beta2=0.9, adam_epsilon=1e-4),
    # the same arithmetic in another order: how far it gets from the fused one is torch's affair
    *each((BERT, DICT), "adamw-torch", optim="adamw_torch", weight_decay=0.1),
    *each((BERT, LLAMA), "sgd", optim="sgd"),
    *each((T5, DICT), "adafactor", optim="adafactor"),
    *each(
        (LLAMA,),
        "adafactor-accumulated-cosine",
        optim="adafactor",
        lr_scheduler_type="cosine",
        gradient_accumulation_steps=4,
    ),
    *each((DICT,), "sgd-weight-decay", optim="sgd", weight_decay=0.2),
    *each((BERT, DICT), "own-optimizer", parts=own_optimizer),
    *each((LLAMA,), "own-optimizer-class", parts=own_optimizer_class),
]
LOGS: list[Row] = [
    *each((BERT, DICT), "log-every-3", logging_steps=3, changes="log"),
    *each((LLAMA,), "log-every-3-first-too", logging_steps=3, logging_first_step=True, changes="log"),
    *each((DICT,), "log-a-fifth", logging_steps=0.2, changes="log"),
    *each((BERT, TUPLE), "log-epochs", logging_strategy="epoch", changes="log"),
    *each((DICT,), "log-epochs-fraction", logging_strategy="epoch", num_train_epochs=1.5),
    *each((DICT,), "log-nothing", logging_strategy="no", changes="log"),
    *each((LLAMA,), "log-every-2-accumulated", logging_steps=2, gradient_accumulation_steps=3),
    *each((LLAMA,), "count-tokens", include_num_input_tokens_seen="all", changes="log"),
    *each((PADDED,), "count-tokens-not-padding", include_num_input_tokens_seen="non_padding", changes="log"),
]
INIT: list[Row] = [
    *each((BERT,), "model-init", model_from_init=lambda: models.bert(0.2)),
    *each((DICT,), "model-init-trial", model_from_init=lambda trial: models.ReturnsDict(0.2)),
    *each((BERT,), "model-init-accumulated", model_from_init=lambda: models.bert(), gradient_accumulation_steps=4),
]
ROWS = [*LOSS, *LENGTH, *RANDOM, *DATA, *OPTIM, *LOGS, *INIT]
assert len({row.id for row in ROWS}) == len(ROWS)
