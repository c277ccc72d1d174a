"""Columns: those that `forward` takes reach the collator; the others are dropped, and that is said once."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from transformers import DataCollatorWithPadding, default_data_collator

from trainwright import RemoveColumnsCollator, Trainer
from trainwright.data.columns import DatasetWithExtras, is_columnar, remove_unused
from trainwright.errors import DataError

from .._support.small import OURS, REFERENCE, data, differing, make_trainer, models, module
from ..contract import doubles

ITEMS = [{"x": 1, "labels": 0, "text": "a", "index": 7}, {"x": 2, "labels": 1, "text": "b", "index": 8}]


def keep(features: list[Any]) -> list[Any]:
    return features


def test_entries_that_are_not_taken_are_dropped_before_the_collator() -> None:
    assert RemoveColumnsCollator(keep, ["x", "labels"])(ITEMS) == [{"x": 1, "labels": 0}, {"x": 2, "labels": 1}]
    assert ITEMS[0].keys() == {"x", "labels", "text", "index"}, "the user's samples stay as they are"


def test_items_other_than_dicts_pass_unchanged() -> None:
    assert RemoveColumnsCollator(keep, ["x"])([(1, 2), "text"]) == [(1, 2), "text"]


def test_what_is_dropped_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("trainwright.data.columns")
    collate = RemoveColumnsCollator(keep, ["x", "labels"], logger, "Net", "Training")
    with caplog.at_level(logging.INFO, logger=logger.name):
        for _ in range(3):
            collate(ITEMS)
    (said,) = caplog.messages
    for word in ("Net", "training", "text, index", "remove_unused_columns=False"):
        assert word in said


def test_columns_are_removed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    dataset = data.hf_dataset(ITEMS)
    assert is_columnar(dataset)
    assert not is_columnar(ITEMS)
    with caplog.at_level(logging.INFO, logger="trainwright.data.columns"):
        left = remove_unused(dataset, ["labels", "x", "y"], model_name="Net", description="Evaluation")
    assert left.column_names == ["x", "labels"]
    assert "text, index" in caplog.text
    assert dataset.column_names == ["x", "labels", "text", "index"]


@pytest.mark.parametrize("takes", ["samples", "dataset"])
def test_where_only_labels_are_left_a_warning_says_what_to_do(takes: str, caplog: pytest.LogCaptureFixture) -> None:
    if takes == "samples":
        RemoveColumnsCollator(
            default_data_collator, ["input_ids", "labels"], logging.getLogger("trainwright.x"), "Net"
        )(ITEMS)
    else:
        columns = ["input_ids", "labels"]
        remove_unused(data.hf_dataset(ITEMS), columns, model_name="Net", description="Training")
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "gets only labels" in record.getMessage()
    assert "Tokenize" in record.getMessage()


def test_no_column_left_is_an_error() -> None:
    with pytest.raises(DataError, match=r"x, labels, text, index.*Net\.forward \(a, b\).*remove_unused_columns=False"):
        remove_unused(data.hf_dataset(ITEMS), ["a", "b"], model_name="Net", description="Training")


# -- through a trainer -----------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.linear(x[:, None].float()), labels)}


class TakesAnything(Linear):
    seen: list[set[str]] = []  # noqa: RUF012

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        self.seen.append({*batch})
        return super().forward(batch["x"], batch["labels"])


class Spy:
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.seen |= {name for item in features for name in item}
        return default_data_collator([{k: v for k, v in item.items() if k != "text"} for item in features])


@pytest.mark.parametrize("wrap", [list, data.hf_dataset, data.TorchDataset], ids=["list", "columns", "torch"])
def test_the_collator_sees_what_forward_takes(wrap: Any, tmp_path: Path) -> None:
    spy = Spy()
    trainer = make_trainer(
        tmp_path, model=Linear(), train_dataset=wrap(ITEMS), eval_dataset=wrap(ITEMS), data_collator=spy
    )
    trainer.train()
    trainer.evaluate()
    assert spy.seen == {"x", "labels"}


@pytest.mark.parametrize("wrap", [list, data.hf_dataset], ids=["list", "columns"])
def test_everything_is_kept_where_asked_for(wrap: Any, tmp_path: Path) -> None:
    spy = Spy()
    with pytest.raises(TypeError, match="index"):  # the model does not take it: the user asked for it
        make_trainer(
            tmp_path, model=Linear(), train_dataset=wrap(ITEMS), data_collator=spy, remove_unused_columns=False
        ).train()
    assert spy.seen == {"x", "labels", "text", "index"}


@pytest.mark.parametrize("wrap", [list, data.hf_dataset], ids=["list", "columns"])
def test_a_model_that_takes_any_keyword_gets_all(wrap: Any, tmp_path: Path) -> None:
    """Its signature names nothing, so nothing may be dropped by it."""
    model = TakesAnything()
    model.seen = []
    make_trainer(tmp_path, model=model, train_dataset=wrap(ITEMS), data_collator=Spy()).train()
    assert model.seen[0] >= {"x", "labels", "index"}


def test_the_older_names_of_labels_are_kept(tmp_path: Path) -> None:
    items = [{"x": 1, "label": 0}, {"x": 2, "label": 1}]
    trainer = make_trainer(tmp_path, model=Linear(), train_dataset=data.hf_dataset(items))
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_transform_on_the_fly_gets_the_columns_it_reads(tmp_path: Path) -> None:
    """The model takes none of them; what the transform makes of them is what it takes, and the rest is dropped."""
    raw = datasets.Dataset.from_dict({"text": [f"{i} {i % 3}" for i in range(12)]})

    def transform(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        pairs = [[int(word) for word in text.split()] for text in batch["text"]]
        return {
            "x": [torch.full((8,), a / 12) for a, _ in pairs],
            "labels": [b for _, b in pairs],
            "text": batch["text"],
        }

    trainer = make_trainer(tmp_path, train_dataset=raw.with_transform(transform), num_train_epochs=1)
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"x", "labels"}


# -- a collator of the user's own ------------------------------------------------------------------------------------

WRAPS = pytest.mark.parametrize("wrap", [list, data.hf_dataset, data.TorchDataset], ids=["list", "columns", "torch"])


class ReadsText:
    """Makes the labels of a column that the model does not take."""

    def __init__(self, read: Any = lambda item: item["text"]) -> None:
        self.read = read

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = torch.tensor(["ab".index(self.read(item)) for item in features])
        return {"x": torch.tensor([item["x"] for item in features]), "labels": labels}


ASKS = [
    lambda item: item["text"],
    lambda item: item.get("text"),
    lambda item: item.pop("text"),
    lambda item: item["text"] if "text" in item and "no" not in item else None,
]


@WRAPS
@pytest.mark.parametrize("ask", ASKS, ids=["item", "get", "pop", "in"])
def test_a_column_that_only_the_collator_reads_is_there(ask: Any, wrap: Any, tmp_path: Path) -> None:
    dataset = wrap([{k: v for k, v in item.items() if k != "labels"} for item in ITEMS])
    trainer = make_trainer(
        tmp_path,
        model=Linear(),
        train_dataset=dataset,
        data_collator=ReadsText(ask),
        train_sampling_strategy="sequential",
    )
    (batch,) = trainer.get_train_dataloader()
    assert batch["labels"].tolist() == [0, 1]
    assert trainer.train().global_step == 2


@pytest.mark.process
def test_workers_read_it_too(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        model=Linear(),
        train_dataset=data.hf_dataset(ITEMS),
        dataloader_num_workers=1,
        data_collator=ReadsText(),
    )
    assert trainer.train().global_step == 2


@WRAPS
def test_a_collator_that_makes_everything_of_other_columns(wrap: Any, tmp_path: Path) -> None:
    def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        words = [item["text"] for item in features]
        return {"x": torch.tensor([len(word) for word in words]), "labels": torch.zeros(len(words)).long()}

    dataset = wrap([{"text": "a"}, {"text": "bb"}])
    assert make_trainer(tmp_path, model=Linear(), train_dataset=dataset, data_collator=collate).train().global_step == 2


@WRAPS
def test_a_collator_that_treats_all_entries_alike_gets_what_it_can_pad(wrap: Any, tmp_path: Path) -> None:
    """As under the original, where the text is not there: it would not become a tensor."""

    def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        copies = [{**item} for item in features]
        assert [dict(item) for item in features] == copies
        return {name: torch.tensor([item[name] for item in features]) for name in features[0]}

    trainer = make_trainer(tmp_path, model=Linear(), train_dataset=wrap(ITEMS), data_collator=collate)
    assert trainer.train().global_step == 2


@WRAPS
def test_an_input_that_the_collator_takes_out_is_gone(wrap: Any, tmp_path: Path) -> None:
    def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = [item.pop("labels") for item in features]
        assert not any("labels" in item or item.get("labels") is not None for item in features)
        return {"labels": torch.tensor(labels), "x": torch.tensor([item["x"] for item in features])}

    trainer = make_trainer(tmp_path, model=Linear(), train_dataset=wrap(ITEMS), data_collator=collate)
    assert trainer.train().global_step == 2


@pytest.mark.framework
@pytest.mark.parametrize("kind", [DataCollatorWithPadding, lambda t: functools.partial(DataCollatorWithPadding(t))])
@pytest.mark.parametrize("wrap", [list, data.hf_dataset], ids=["list", "columns"])
def test_collators_of_transformers_get_what_the_model_takes(kind: Any, wrap: Any, tmp_path: Path) -> None:
    items = [{**item, "text": "raw"} for item in data.ragged_texts(8)]
    outcomes = []
    for side in (OURS, REFERENCE):
        model = module(kind=models.bert)
        trainer = make_trainer(
            tmp_path / side.name, side, model=model, train_dataset=wrap(items), data_collator=kind(data.tokenizer())
        )
        outcomes.append(side.train(trainer))
    assert differing(outcomes[0].weights, outcomes[1].weights) == {}


def test_columns_are_only_read_on_demand() -> None:
    reads: list[str] = []

    class Columns:
        """Stands in for the shape of a `datasets.Dataset` that is read here."""

        def __init__(self, *names: str) -> None:
            self.column_names = names

        def remove_columns(self, names: list[str]) -> Any:
            return Columns(*(name for name in self.column_names if name not in names))

        def select_columns(self, name: str) -> Any:
            return Columns(name)

        def __getitem__(self, index: int) -> dict[str, int]:
            reads.extend(self.column_names)
            return dict.fromkeys(self.column_names, index)

    sample = DatasetWithExtras(Columns("x", "image"), ["image"])[3]
    assert (dict(sample), reads) == ({"x": 3}, ["x"])
    assert (sample["image"], reads) == (3, ["x", "image"])
    with pytest.raises(KeyError):
        sample["neither"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by the older name
def test_labels_are_found_through_an_adapter(tmp_path: Path) -> None:
    """And so are the columns: PEFT's own forward takes anything."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(module(kind=models.bert), peft.LoraConfig(target_modules=["query"], r=2))
    items = [{**item, "text": "raw"} for item in data.ragged_texts(8)]
    trainer = make_trainer(
        tmp_path,
        model=model,
        train_dataset=data.hf_dataset(items),
        processing_class=data.tokenizer(),
        num_train_epochs=1,
    )
    assert trainer.label_names == ["labels"]
    assert "text" not in next(iter(trainer.get_train_dataloader()))
    assert trainer.train().global_step == 2
    assert "eval_loss" in trainer.evaluate(data.hf_dataset(items))


class ScoresTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.linear(x[:, None].float())
        return {"logits": logits} | ({} if target is None else {"loss": nn.functional.cross_entropy(logits, target)})


def test_label_names_say_what_a_label_is(tmp_path: Path) -> None:
    items = [{"x": 1, "target": 0, "text": "a"}, {"x": 2, "target": 1, "text": "b"}]
    trainer = make_trainer(
        tmp_path,
        model=ScoresTargets(),
        train_dataset=data.hf_dataset(items),
        label_names=["target"],
        compute_metrics=lambda p: {"sum": float(p.label_ids.sum())},
    )
    trainer.train()
    assert trainer.evaluate(data.hf_dataset(items))["eval_sum"] == 1.0


# -- columns that a trainer or a collator names ------------------------------------------------------------------------


class Reads:
    """A collator that says which column it reads."""

    required_columns = ("index",)

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.seen.append(set(samples[0]))
        return default_data_collator([{k: v for k, v in one.items() if k != "index"} for one in samples])


class Named(Trainer):
    columns = ("x", "labels")


@pytest.mark.parametrize("is_hf", [True, False])
def test_columns_that_a_trainer_and_its_collator_name_are_kept(is_hf: bool, tmp_path: Path) -> None:
    items = [{**row, "index": i, "text": "a", "head": 1.0} for i, row in enumerate(doubles.samples(8))]
    rows = data.hf_dataset(items).with_format("torch") if is_hf else items
    collator = Reads()
    trainer = doubles.trainer(tmp_path, Named, data_collator=collator, train_dataset=rows)
    trainer.train()
    assert all(names == {"x", "labels", "index"} for names in collator.seen)
    assert trainer._signature_columns == ["x", "labels", "index"]
    plain = doubles.trainer(tmp_path, data_collator=collator, train_dataset=rows)
    plain.train()
    assert plain._signature_columns == ["x", "labels", "label", "label_ids", "index"]


@pytest.mark.parametrize("is_hf", [True, False])
def test_named_column_that_the_data_lacks_is_an_error_before_step_1(is_hf: bool, tmp_path: Path) -> None:
    rows = data.hf_dataset(doubles.samples(8)) if is_hf else doubles.samples(8)
    wrong = type("Wrong", (Trainer,), {"columns": ("x", "label")})
    trainer = doubles.trainer(tmp_path, wrong, train_dataset=rows)
    message = "Wrong.columns names the column 'label', which the training data lacks: it has x, labels. Did you mean "
    with pytest.raises(DataError, match=re.escape(f"{message}labels?")):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer = doubles.trainer(tmp_path, Named, data_collator=Reads(), train_dataset=rows)
    with pytest.raises(DataError, match=r"Reads\.required_columns names the column 'index'"):
        trainer.train()
    text = doubles.trainer(tmp_path, type("Text", (Trainer,), {"columns": "x"}), train_dataset=rows)
    with pytest.raises(DataError, match=r"Text.columns is the string 'x'; write a tuple of names: \('x',\)"):
        text.train()


def test_data_to_predict_on_may_lack_labels(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path, Named)
    rows = [{"x": row["x"]} for row in doubles.samples(4)]
    assert trainer.predict(rows).predictions.shape == (4,)


def test_columns_are_chosen_for_a_model_that_takes_anything_too(tmp_path: Path) -> None:
    class Anything(doubles.Regressor):
        def forward(self, x: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:
            assert not kwargs.keys() - {"num_items_in_batch"}
            return super().forward(x, labels)

    rows = [{**row, "more": 1.0} for row in doubles.samples(8)]
    doubles.trainer(tmp_path, Named, model=doubles.model(Anything), train_dataset=rows).train()
