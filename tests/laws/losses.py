"""Losses of the user's own and of known models, for the laws about what a step makes of them: one row for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 23
LENGTH = 7
IGNORED = -100


def samples(number: int = 16, *, is_even: bool = False) -> list[dict[str, torch.Tensor]]:
    """Sequences of one length, of which each has another number of labels, or all one; the first is never a target."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(number):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: 1 if is_even else 1 + i % (LENGTH - 2)] = IGNORED
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, num_items: Any = None) -> torch.Tensor:
    """A mean over the labels, or their sum divided by a number of items."""
    how = "mean" if num_items is None else "sum"
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
    return loss if num_items is None else loss / num_items


# -- modules -----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Does not take the number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def outputs(self, input_ids: Any, labels: Any, num_items: Any = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits, labels, num_items), "logits": logits}

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, torch.Tensor]:
        return self.outputs(input_ids, labels)


class IgnoresKeywords(Plain):
    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        return self.outputs(input_ids, labels)


class UsesKeywords(Plain):
    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        return self.outputs(input_ids, labels, kwargs.get("num_items_in_batch"))


class NamesCount(Plain):
    def forward(self, input_ids: Any, labels: Any = None, num_items_in_batch: Any = None) -> dict[str, torch.Tensor]:
        return self.outputs(input_ids, labels, num_items_in_batch)


class Wrapper(nn.Module):
    """Passes on whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class NamedWrapper(Wrapper):
    """Passes on the rest of its keywords, to a module in a list."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.inner = nn.ModuleList([inner])

    def forward(self, input_ids: Any, labels: Any = None, **rest: Any) -> Any:
        for layer in self.inner:
            outputs = layer(input_ids, labels=labels, **{**rest})
        return outputs


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama(name: str = "LlamaForCausalLM") -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_labels": VOCABULARY, **SMALL}
    config = transformers.LlamaConfig(pad_token_id=0, use_cache=False, **sizes)
    return getattr(transformers, name)(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, num_labels=VOCABULARY, **SMALL, **no_dropout)
    return BertForTokenClassification(config)  # type: ignore[no-untyped-call]


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a name that PEFT reads from transformers
        return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[arg-type]


def own_loss_function() -> nn.Module:
    model = llama()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: cross_entropy(logits, labels)
    return model


# -- trainers ----------------------------------------------------------------------------------------------------------


def ignores(lib: ModuleType) -> type:
    class Ignores(lib.Trainer):  # type: ignore[misc, name-defined]
        """The commonest subclass of all."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = cross_entropy(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss

    return Ignores


def ignores_keywords(lib: ModuleType) -> type:
    class IgnoresKeywords(lib.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return IgnoresKeywords


def uses(lib: ModuleType) -> type:
    class Uses(lib.Trainer):  # type: ignore[misc, name-defined]
        """Divides by the number of items; in several processes, as transformers asks for, times their number."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"])
            loss = cross_entropy(outputs["logits"], inputs["labels"], num_items_in_batch)
            if model.training:
                loss = loss * self.args.world_size
            return (loss, outputs) if return_outputs else loss

    return Uses


def passes_on(lib: ModuleType) -> type:
    class PassesOn(lib.Trainer):  # type: ignore[misc, name-defined]
        """Leaves the loss to the model, as a library that adds metrics does."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    return PassesOn


def gives_keywords(lib: ModuleType) -> type:
    class GivesKeywords(lib.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs, **kwargs)
            loss = outputs["loss"]
            return (loss, outputs) if return_outputs else loss

    return GivesKeywords


def scaled(lib: ModuleType) -> type:
    class Scaled(lib.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            return (3 * loss, outputs) if return_outputs else 3 * loss

    return Scaled


def plain(lib: ModuleType) -> type:
    trainer: type = lib.Trainer
    return trainer


def seq2seq(lib: ModuleType) -> type:
    class Weighted(lib.Seq2SeqTrainer):  # type: ignore[misc, name-defined]
        compute_loss = ignores(lib).compute_loss  # type: ignore[attr-defined]

    return Weighted


def mean_of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs["logits"], labels)


def sum_of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs["logits"], labels, num_items_in_batch)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A loss.

    Attributes:
        model: makes the model.
        trainer: makes the class of the trainer of a library.
        parts: further arguments of the trainer.
        settings: further fields of the arguments.
        finding: what is found about it; None if it is known.
        trains_there: whether the original's Trainer trains it too.
    """

    model: Callable[[], nn.Module] = IgnoresKeywords
    trainer: Callable[[ModuleType], type] = plain
    parts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    finding: str | None = None
    trains_there: bool = True


ITEMS = {"loss_weighting": "items"}
ROWS = {
    "override ignores": Row(llama, ignores, finding="mean"),
    "override ignores, BERT": Row(bert, ignores, finding="mean"),
    "override ignores, seq2seq": Row(llama, seq2seq, finding="mean"),
    "override ignores keywords": Row(IgnoresKeywords, ignores_keywords, finding="mean"),
    "override uses": Row(llama, uses, finding="divided"),
    "override passes on": Row(llama, passes_on, finding="divided"),
    "override passes on, BERT": Row(bert, passes_on, finding="mean"),
    "override gives keywords": Row(llama, gives_keywords, finding="divided"),
    "override scales, ignored": Row(IgnoresKeywords, scaled, finding="mean"),
    "override scales, used": Row(UsesKeywords, scaled, finding="divided"),
    "loss function ignores": Row(llama, parts={"compute_loss_func": mean_of_outputs}, finding="mean"),
    "loss function uses": Row(llama, parts={"compute_loss_func": sum_of_outputs}, finding="divided"),
    "plain": Row(Plain, settings=ITEMS),
    "module names the count": Row(NamesCount, finding="divided"),
    "module ignores keywords": Row(IgnoresKeywords, finding="mean"),
    "module uses keywords": Row(UsesKeywords, finding="divided"),
    "wrapper of plain": Row(lambda: Wrapper(Plain()), settings=ITEMS, trains_there=False),
    "wrapper of mean": Row(lambda: Wrapper(IgnoresKeywords()), finding="mean"),
    "wrapper of counted": Row(lambda: Wrapper(NamesCount()), finding="divided"),
    "wrapper of causal": Row(lambda: Wrapper(llama()), finding="divided"),
    "named wrapper of plain": Row(lambda: NamedWrapper(Plain()), settings=ITEMS, trains_there=False),
    "named wrapper of counted": Row(lambda: NamedWrapper(NamesCount()), finding="divided"),
    "causal": Row(llama),
    "adapter": Row(adapted),
    "adapter, override ignores": Row(adapted, ignores, finding="mean"),
    "own loss function of a model": Row(own_loss_function, finding="mean"),
    "BERT": Row(bert),
    "classifier": Row(lambda: llama("LlamaForTokenClassification")),
}


def make(
    lib: ModuleType, row: Row, folder: Any, *, batch: int, micro_batches: int, is_even: bool = False, **settings: Any
) -> Any:
    """Returns a trainer for two steps of plain SGD over all samples, in their order."""
    torch.manual_seed(0)
    kind = "Seq2SeqTrainingArguments" if row.trainer is seq2seq else "TrainingArguments"
    args = getattr(lib, kind)(
        str(folder),
        **{
            "use_cpu": True,
            "disable_tqdm": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "max_steps": 2,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "learning_rate": 0.1,
            "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential",
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": micro_batches,
            **settings,
        },
    )
    cls: Any = row.trainer(lib)
    return cls(row.model(), args, train_dataset=samples(is_even=is_even), **row.parts)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
