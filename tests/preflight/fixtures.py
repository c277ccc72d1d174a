"""For each check a trainer that it warns of, and the same one in health."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._support import chats
from .._support.small import data, make_trainer, models

Make = Callable[[Path, bool], Any]
FIXTURES: dict[str, Make] = {}


def shows(make: Make) -> Make:
    FIXTURES[make.__name__] = make
    return make


def bert(folder: Path, items: list[Any] | Any, **how: Any) -> Any:
    return make_trainer(folder, model=models.seeded(models.bert), train_dataset=items, **how)


def llama(folder: Path, items: list[Any], model: Any = None, **how: Any) -> Any:
    return make_trainer(folder, model=model or models.seeded(models.llama), train_dataset=items, **how)


@shows
def classes(folder: Path, is_broken: bool) -> Any:
    items = data.texts(40)
    items[33]["labels"] = models.CLASSES if is_broken else 0
    return bert(folder, items)


@shows
def ragged(folder: Path, is_broken: bool) -> Any:
    items = data.texts(40)
    items[33]["input_ids"] = items[33]["input_ids"][: 3 if is_broken else 7]
    return bert(folder, items)


@shows
def long_rows(folder: Path, is_broken: bool) -> Any:
    items = data.ragged_texts(40)
    num = 33 if is_broken else 32
    items[33] |= {"input_ids": [7] * num, "attention_mask": [1] * num}
    return bert(folder, items, processing_class=data.tokenizer())


@shows
def held_out(folder: Path, is_broken: bool) -> Any:
    items = data.texts(40)
    return bert(folder, items[:30], eval_dataset=items[20:] if is_broken else items[30:])


class Numbers:
    """A collator that makes numbers of labels that are texts."""

    def __call__(self, items: list[Any]) -> dict[str, torch.Tensor]:
        labels = [float(str(item["labels"]).replace(",", ".").strip() or 0) for item in items]
        ids = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": ids, "labels": torch.tensor(labels).long()}


@shows
def label_forms(folder: Path, is_broken: bool) -> Any:
    items = [{**one, "labels": str(one["labels"])} for one in data.texts(40)]
    items[33]["labels"] = "1.0" if is_broken else "1"
    return bert(folder, items, data_collator=Numbers())


@shows
def repeated_header(folder: Path, is_broken: bool) -> Any:
    items = [{**one, "text": f"text {i}", "source": "a"} for i, one in enumerate(data.texts(40))]
    items[33] |= {"text": "text" if is_broken else "a text", "source": "source"}
    return bert(folder, items)


@shows
def decimal_commas(folder: Path, is_broken: bool) -> Any:
    items = [{**one, "labels": f"{i}.5"} for i, one in enumerate(data.texts(40))]
    items[33]["labels"] = "3,5" if is_broken else "3.5"
    model = models.seeded(models.bert)
    model.config.num_labels = 1
    return make_trainer(folder, model=model, train_dataset=items, data_collator=Numbers())


@shows
def columns(folder: Path, is_broken: bool) -> Any:
    name = "attention_masks" if is_broken else "attention_mask"
    return bert(folder, data.hf_dataset(data.texts(12), **{name: [[1] * 7] * 12}))


@shows
def labels(folder: Path, is_broken: bool) -> Any:
    items = [{"input_ids": one["input_ids"]} for one in data.texts(12)] if is_broken else data.texts(12)
    return bert(folder, items)


@shows
def masked_labels(folder: Path, is_broken: bool) -> Any:
    items = data.sequences(12)
    return llama(folder, [{**one, "labels": [-100] * 9} for one in items] if is_broken else items)


@shows
def padding(folder: Path, is_broken: bool) -> Any:
    mask = [1, 1, 0, 0, 0, 0, 0] if is_broken else [1] * 7
    return bert(folder, [{**one, "attention_mask": mask} for one in data.texts(12)])


@shows
def truncation(folder: Path, is_broken: bool) -> Any:
    tokenizer = data.tokenizer()
    tokenizer.model_max_length = 7 if is_broken else 20
    return bert(folder, data.texts(12), processing_class=tokenizer)


def chat(folder: Path, *, trains: str = "assistant", model: Any = None, padding: int = 0) -> Any:
    rows = [chats.encoded(number, trains=trains) for number in range(12)]
    for row in rows:
        row["input_ids"] += [0] * 4
        row["labels"] += [padding] * 4
        row["attention_mask"] += [0] * 4
    model = chats.llama() if model is None else model
    return make_trainer(folder, model=model, train_dataset=rows, processing_class=chats.tokenizer(chats.MARKED))


@shows
def chat_loss(folder: Path, is_broken: bool) -> Any:
    return chat(folder, trains="all" if is_broken else "assistant", padding=-100)


@shows
def padding_loss(folder: Path, is_broken: bool) -> Any:
    return chat(folder, padding=0 if is_broken else -100)


@shows
def adapter_reach(folder: Path, is_broken: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "query_proj" if is_broken else "v_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks for a deprecated attribute
        model = get_peft_model(chats.llama(), LoraConfig(r=2, target_modules=names))
    return chat(folder, model=model, padding=-100)


@shows
def frozen(folder: Path, is_broken: bool) -> Any:
    model = chats.llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name or not is_broken
    return chat(folder, model=model, padding=-100)


@shows
def texts_as_numbers(folder: Path, is_broken: bool) -> Any:
    return bert(folder, [{**one, "labels": "good" if is_broken else 1} for one in data.texts(12)])


@shows
def label_types(folder: Path, is_broken: bool) -> Any:
    return bert(folder, [{**one, "labels": 1.0 if is_broken else 1} for one in data.texts(12)])


class LeavesTexts:
    """A collator that passes texts on."""

    def __init__(self, is_broken: bool) -> None:
        self.is_broken = is_broken

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        labels = torch.tensor([int(item["labels"]) for item in items])
        if self.is_broken:
            return {"text": ["a text" for _ in items], "labels": labels}
        return {"input_ids": torch.tensor([item["input_ids"] for item in items]), "labels": labels}


@shows
def inputs(folder: Path, is_broken: bool) -> Any:
    return bert(folder, data.texts(12), data_collator=LeavesTexts(is_broken))


@shows
def pad_is_eos(folder: Path, is_broken: bool) -> Any:
    tokenizer = data.tokenizer()
    tokenizer.eos_token = "[PAD]" if is_broken else "[SEP]"
    end = tokenizer.eos_token_id
    rows = [[*one["input_ids"][:-1], end] for one in data.sequences(12)]
    items = [{"input_ids": ids, "labels": [-100 if t == tokenizer.pad_token_id else t for t in ids]} for ids in rows]
    return llama(folder, items, processing_class=tokenizer)


@shows
def vocabulary(folder: Path, is_broken: bool) -> Any:
    items = data.texts(12)
    items[0]["input_ids"][2] = models.VOCAB if is_broken else models.VOCAB - 1
    return bert(folder, items, train_sampling_strategy="sequential")


@shows
def finite_loss(folder: Path, is_broken: bool) -> Any:
    items = data.vectors(12)
    items[1]["x"] = items[1]["x"] * (float("nan") if is_broken else 1.0)
    return make_trainer(folder, train_dataset=items, train_sampling_strategy="sequential")


@shows
def loss_near_chance(folder: Path, is_broken: bool) -> Any:
    model = models.seeded(models.llama)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(80.0 if is_broken else 1.0)
    return llama(folder, data.sequences(12), model=model)


@shows
def finite_parameters(folder: Path, is_broken: bool) -> Any:
    model = models.seeded(models.ReturnsDict)
    with torch.no_grad():
        model.head.weight[0, 0] = float("inf") if is_broken else 1.0
    return make_trainer(folder, model=model)


@shows
def in_the_optimizer(folder: Path, is_broken: bool) -> Any:
    model = models.seeded(models.ReturnsDict)
    part = model.head if is_broken else model
    return make_trainer(folder, model=model, optimizers=(torch.optim.SGD(part.parameters(), lr=0.1), None))


@shows
def tied(folder: Path, is_broken: bool) -> Any:
    model = models.seeded(models.llama)
    if is_broken:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return llama(folder, data.sequences(12), model=model)


class Detached(models.ReturnsDict):
    """Its body gets no gradient."""

    def loss_and_logits(self, x: torch.Tensor, labels: torch.Tensor | None) -> Any:
        logits = self.head(self.body(x).detach())
        return None if labels is None else nn.functional.cross_entropy(logits, labels), logits


@shows
def gradients(folder: Path, is_broken: bool) -> Any:
    return make_trainer(folder, model=models.seeded(Detached if is_broken else models.ReturnsDict))


@shows
def directory(folder: Path, is_broken: bool) -> Any:
    trainer = make_trainer(folder / "run")
    if is_broken:
        (folder / "run").rmdir()
        (folder / "run").write_text("in the way")
    return trainer


@shows
def disk(folder: Path, is_broken: bool) -> Any:
    limit = {} if is_broken else {"save_total_limit": 2}
    return make_trainer(folder, max_steps=10**12, save_strategy="steps", save_steps=1, **limit)


@shows
def hub_token(folder: Path, is_broken: bool) -> Any:
    trainer = make_trainer(folder)
    trainer.args.push_to_hub = True
    trainer.args.hub_token = None if is_broken else "a token"
    return trainer


@shows
def precision(folder: Path, is_broken: bool) -> Any:
    items = [{**one, "x": one["x"].half()} for one in data.vectors(12)] if is_broken else data.vectors(12)
    model = models.seeded(models.ReturnsDict)
    return make_trainer(folder, model=model.half() if is_broken else model, train_dataset=items)


@shows
def effective_batch(folder: Path, is_broken: bool) -> Any:
    return make_trainer(folder, gradient_accumulation_steps=100 if is_broken else 2)


@shows
def time_left(folder: Path, is_broken: bool) -> Any:
    return make_trainer(folder, max_steps=10**9, max_train_time="10s" if is_broken else "100000h")


class Raises(models.ReturnsDict):
    def loss_and_logits(self, x: torch.Tensor, labels: torch.Tensor | None) -> Any:
        raise RuntimeError("shapes do not fit")


@shows
def first_step(folder: Path, is_broken: bool) -> Any:
    return make_trainer(folder, model=models.seeded(Raises if is_broken else models.ReturnsDict))


@shows
def metrics(folder: Path, is_broken: bool) -> Any:
    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions[0 if is_broken else slice(None)].argmax(-1)).nonexistent)}

    def fine(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    return make_trainer(folder, eval_dataset=data.vectors(8), compute_metrics=accuracy if is_broken else fine)


class Forgets(models.ReturnsDict):
    """Leaves a weight out of what it gives to be saved."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop("head.bias", None)
        return state


@shows
def round_trip(folder: Path, is_broken: bool) -> Any:
    return make_trainer(folder, model=models.seeded(Forgets if is_broken else models.ReturnsDict))
