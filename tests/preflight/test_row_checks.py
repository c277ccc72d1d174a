"""Checks of single rows: a table of data and what is found in it, by `check()` and before `train()`."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    LlamaForSequenceClassification,
)

from trainwright import Trainer
from trainwright.errors import DataError
from trainwright.journal.record import read
from trainwright.preflight.rows import Budget, fetch_rows, quote_sample, quoted

from .._support.small import REFERENCE, data, make_trainer, models

Items = list[dict[str, Any]]
NUM = 40
BAD = 33  # the row that is wrong
LIMIT = 32  # positions of the models


def texts(**changed: Any) -> Items:
    """Rows of token ids of one length and a label, of which one is changed."""
    items = data.texts(NUM)
    items[BAD] |= changed
    return items


def ragged_texts(length: int = 5) -> Items:
    items = data.ragged_texts(NUM)
    items[BAD] |= {"input_ids": [7] * length, "attention_mask": [1] * length}
    return items


def tagged(label: int) -> Items:
    items = [{"input_ids": one["input_ids"], "labels": [i % 3] * 7} for i, one in enumerate(data.texts(NUM))]
    items[BAD]["labels"] = [0, -100, label, 0, 0, 0, 0]
    return items


def tensors(items: Items) -> Items:
    return [{name: torch.tensor(cell) for name, cell in item.items()} for item in items]


def as_dataset(items: Items) -> Any:
    return data.hf_dataset(items)


def as_shuffled_dataset(items: Items) -> Any:
    order = [*range(0, NUM, 2), *range(1, NUM, 2)]
    back = np.argsort(order)
    return data.hf_dataset([items[i] for i in order]).select(back)


def as_mixture(items: Items) -> Any:
    return {"a": items[:20], "b": as_dataset(items[20:])}


def as_subset(items: Items) -> Any:
    return Subset([items[0], *items], range(1, NUM + 1))  # type: ignore[arg-type]


FORMS: dict[str, Callable[[Items], Any]] = {
    "list": list,
    "tensors": tensors,
    "dataset": as_dataset,
    "shuffled dataset": as_shuffled_dataset,
    "mixture": as_mixture,
    "subset": as_subset,
}


# Rows are named as they were before a shuffle, and before others were held out.
NAMED = {"mixture": "b[13]", "subset": "train[34]", "shuffled dataset": "train[36]"}


class Case(NamedTuple):
    """A training and what is found in its data."""

    make: Callable[[], dict[str, Any]]  # arguments of `make_trainer`
    found: str | None = None  # check
    says: str = ""
    ends: bool = False  # the training ends with an error, here before its first step, in the original within it


def classifier(items: Items, **how: Any) -> dict[str, Any]:
    return {"model": models.seeded(models.bert), "train_dataset": items, "num_train_epochs": 1, **how}


def tagger(items: Items) -> dict[str, Any]:
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(
        vocab_size=models.VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config.num_labels = models.CLASSES
    model = models.seeded(lambda: BertForTokenClassification(config))
    collator = DataCollatorForTokenClassification(data.tokenizer())
    return {"model": model, "train_dataset": items, "num_train_epochs": 1, "data_collator": collator}


def language_model(items: Items, **how: Any) -> dict[str, Any]:
    return {"model": models.seeded(models.llama), "train_dataset": items, "num_train_epochs": 1, **how}


def padded(items: Items, **how: Any) -> dict[str, Any]:
    return classifier(items, processing_class=data.tokenizer(), **how)


def in_pairs() -> Items:
    """Rows of two lengths that never come into one batch where they are read in order."""
    return [{**one, "input_ids": one["input_ids"][: 7 - i // 4 % 2]} for i, one in enumerate(data.texts(NUM))]


CASES = {
    "a label beyond the classes": Case(lambda: classifier(texts(labels=3)), "classes", "3 in train[33]", ends=True),
    "a label below 0": Case(lambda: classifier(texts(labels=-1)), "classes", "-1 in train[33]", ends=True),
    "an ignored label": Case(lambda: classifier(texts(labels=-100))),
    "labels that are numbers": Case(
        lambda: classifier(
            [{**one, "labels": [float(one["labels"] == k) for k in range(3)]} for one in data.texts(NUM)]
        )
    ),
    "a tag beyond the classes": Case(lambda: tagger(tagged(5)), "classes", "5 in train[33]", ends=True),
    "tags": Case(lambda: tagger(tagged(2))),
    "a label that is never trained": Case(
        lambda: classifier(texts(labels=3), max_steps=2, train_sampling_strategy="sequential"),
    ),
    "samples that differ in length": Case(
        lambda: classifier(texts(input_ids=[1, 2])),
        "ragged",
        "'input_ids' has 7 elements in train[",
        ends=True,
    ),
    "samples that differ in length, padded": Case(lambda: padded(ragged_texts())),
    "samples that differ in length, one at a time": Case(
        lambda: classifier(texts(input_ids=[1, 2]), per_device_train_batch_size=1)
    ),
    "samples that differ in length, apart": Case(lambda: classifier(in_pairs(), train_sampling_strategy="sequential")),
    "lists and arrays": Case(
        lambda: classifier(
            [
                {**one, "input_ids": np.array(one["input_ids"]) if i == 1 else one["input_ids"]}
                for i, one in enumerate(data.texts(NUM))
            ]
        )
    ),
    "a text that differs in length, which is dropped": Case(
        lambda: classifier([{**one, "text": "a" * i} for i, one in enumerate(data.texts(NUM))])
    ),
    "a row longer than the model": Case(
        lambda: padded(ragged_texts(33), max_steps=1, train_sampling_strategy="sequential"),
    ),
    "a row as long as the model": Case(lambda: padded(ragged_texts(LIMIT))),
    "rows that are flattened": Case(
        lambda: language_model(
            [{"input_ids": one["input_ids"]} for one in data.ragged_texts(NUM)],
            data_collator=DataCollatorWithFlattening(),
            per_device_train_batch_size=8,
        )
    ),
    "a long row that is flattened": Case(
        lambda: language_model(
            [{"input_ids": one["input_ids"]} for one in ragged_texts(40)], data_collator=DataCollatorWithFlattening()
        ),
        "long_rows",
        "1 training row has more than the 32 tokens that LlamaForCausalLM was made for, up to 40: train[33] [7, 7",
    ),
    "evaluation rows that are trained": Case(
        lambda: classifier(data.texts(NUM)[:30], eval_dataset=data.texts(NUM)[25:]),
        "held_out",
        "5 of 15 evaluation rows are in the training data too, 33.3%: eval[0] is train[25], eval[1] is train[26]",
    ),
    "evaluation rows that were held out": Case(
        lambda: classifier(data.texts(NUM)[:30], eval_dataset=data.texts(NUM)[30:])
    ),
    "an evaluation of rows that are trained, by its name": Case(
        lambda: classifier(data.texts(NUM)[:30], eval_dataset={"train": data.texts(NUM)[:5]})
    ),
    "masked words": Case(
        lambda: {
            "model": models.seeded(models.bert_mlm),
            "train_dataset": [{"input_ids": one["input_ids"]} for one in data.ragged_texts(NUM)],
            "data_collator": DataCollatorForLanguageModeling(data.tokenizer()),
            "num_train_epochs": 1,
        }
    ),
}
ROW_CHECKS = ("classes", "ragged", "long_rows", "held_out", "truncation", "vocabulary")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "preflight" in r.name]
    return [line for line in lines if line.startswith(ROW_CHECKS)]


@pytest.mark.parametrize("name", CASES)
def test_training_says_what_is_found_once_and_ends_where_the_original_does(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    trainer = make_trainer(tmp_path, **case.make())
    if case.ends:
        with pytest.raises(DataError) as caught:
            trainer.train()
        assert str(caught.value).startswith(f"{case.found}: ")
        assert case.says in str(caught.value)
        assert trainer.state.global_step == 0
        return
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer.train()
    assert trainer.state.global_step > 0
    lines = told(caplog)
    assert [line.partition(":")[0] for line in lines] == ([] if case.found is None else [case.found])
    assert case.says in "".join(lines)


@pytest.mark.framework
@pytest.mark.parametrize("name", CASES)
def test_the_original_ends_exactly_where_ours_refuses_to_begin(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    trainer = make_trainer(tmp_path, REFERENCE, **case.make())
    if case.ends:
        with pytest.raises((IndexError, ValueError)):
            trainer.train()
    else:
        trainer.train()


# What a training never comes to is for `check()` alone.
IN_CHECK = {
    "a label that is never trained": ("classes", "3 in train[33]"),
    "a row longer than the model": ("long_rows", "up to 33: train[33] 'w2 w2"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_check_up_finds_the_same_and_what_is_not_trained(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    report = make_trainer(tmp_path, **case.make()).check()
    found, says = IN_CHECK.get(name, (case.found, case.says))
    worse = [one for one in report.findings if one.check in ROW_CHECKS and one.severity != "note"]
    assert [one.check for one in worse] == ([] if found is None else [found]), str(report)
    assert says in "".join(one.evidence for one in worse)
    assert all(one.rows for one in worse)


@pytest.mark.parametrize("form", FORMS)
def test_data_that_runs_no_code_of_users_is_looked_at_before_run(form: str, tmp_path: Path) -> None:
    where = NAMED.get(form, f"train[{BAD}]")
    trainer = make_trainer(tmp_path / "label", **classifier(FORMS[form](texts(labels=4))))
    with pytest.raises(DataError) as caught:
        trainer.train()
    assert f"4 in {where} [" in str(caught.value)
    trainer = make_trainer(tmp_path / "length", **classifier(FORMS[form](texts(input_ids=[1, 2]))))
    with pytest.raises(DataError, match="samples differ in length") as caught:
        trainer.train()
    assert where in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", [form for form in FORMS if form != "mixture"])  # no evaluation has one
def test_evaluation_rows_are_found_whatever_holds_them(form: str, other: str, tmp_path: Path) -> None:
    items = data.texts(NUM)
    trainer = make_trainer(tmp_path, **classifier(FORMS[form](items), eval_dataset=FORMS[other](items)))
    (finding,) = trainer.check().of("held_out")
    assert finding.evidence.startswith(f"{NUM} of {NUM} evaluation rows are in the training data too, 100.0%: eval[")


def test_a_row_is_shown_by_its_text_and_not_by_its_id() -> None:
    assert quote_sample({"id": "a-17", "text": "a film worth seeing", "label": "good"}, None) == "'a film worth seeing'"


def test_a_run_keeps_them_in_its_journal(tmp_path: Path) -> None:
    items = data.texts(NUM)
    how = classifier(items, eval_dataset=items)
    make_trainer(tmp_path, **how, max_steps=8, journal=True, log_level="warning").train()
    (finding,) = read(tmp_path).findings()
    assert finding["check"] == "held_out"
    assert finding["text"].startswith(f"held_out: 32 of {NUM} evaluation rows are in the training data too")


class Own(torch.utils.data.Dataset[Any]):
    """Draws from a generator of its own at each read, so that one read more changes all that follow."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self.random = random.Random(0)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        ids = self.items[index]["input_ids"]
        return {**self.items[index], "input_ids": self.random.sample(ids, k=len(ids))}


def transformed(items: Items, reads: list[int]) -> Any:
    def read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        reads.extend(batch["labels"])
        return batch

    return data.hf_dataset(items).with_transform(read)


def test_no_code_of_the_users_is_called_before_a_run(tmp_path: Path) -> None:
    own = Own(data.texts(NUM))
    reads: list[int] = []
    for number, rows in enumerate((own, transformed(data.texts(NUM), reads))):
        make_trainer(tmp_path / str(number), **classifier(rows)).train()  # type: ignore[arg-type]
    assert own.reads == NUM
    assert len(reads) == NUM


def test_check_up_reads_dataset_of_the_users_class_and_restores_random_states(tmp_path: Path) -> None:
    own = Own(texts(labels=7))
    trainer = make_trainer(tmp_path, **classifier(own))  # type: ignore[arg-type]
    before = torch.get_rng_state()
    (finding,) = trainer.check().of("classes")
    assert "7 in train[33]" in finding.evidence
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_is_not_read(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **classifier(data.Stream(texts(labels=3)), max_steps=3))  # type: ignore[arg-type]
    assert "a stream is only read in training" in dict(trainer.check().not_done)["classes"]


class Relabels(Trainer):
    """Makes labels the model has of those in the data."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs({**inputs, "labels": inputs["labels"].clamp(max=2)})


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {**inputs, "labels": inputs["labels"].clamp(max=2)}, *args, **kwargs)


def clamps(items: Items) -> Any:
    return {name: torch.tensor([item[name] for item in items]).clamp(max=2) for name in items[0]}


OWN: dict[str, dict[str, Any]] = {
    "inputs": {"cls": Relabels},
    "loss": {"cls": OwnLoss},
    "collator": {"data_collator": clamps},
}


@pytest.mark.parametrize("name", OWN)
def test_labels_that_code_of_the_users_makes_fit_are_trained(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **classifier(texts(labels=3)), **OWN[name])
    assert trainer.train().global_step == 10


def test_a_decoder_with_a_classifier_has_its_classes_checked(tmp_path: Path) -> None:
    config = models.seeded(models.llama).config
    config.num_labels = 3
    model = LlamaForSequenceClassification(config)
    trainer = make_trainer(tmp_path, model=model, train_dataset=texts(labels=3), num_train_epochs=1)
    with pytest.raises(DataError, match="beyond the classes"):
        trainer.train()


def test_a_budget_bounds_what_is_read() -> None:
    items = [{"input_ids": [number] * 10, "label": number} for number in range(1000)]
    names = "train[{}]".format
    rows = fetch_rows(items, Budget(rows=100, size_bytes=1), find_name=names)
    assert rows is not None
    assert len(rows) == len(set(rows.numbers)) == 100
    assert rows.what == "Of 100 of 1000 rows examined: "
    few = fetch_rows(datasets.Dataset.from_list(items), Budget(rows=500, size_bytes=6000), find_name=names)
    assert few is not None
    assert 64 <= len(few) <= 150  # of 50 bytes or so
    own = Own(data.texts(NUM))
    assert fetch_rows(own, Budget(rows=10, size_bytes=1), find_name=names) is None
    assert own.reads == 0
    timed = fetch_rows(own, Budget(rows=10, size_bytes=1, seconds=0.0), find_name=names)
    assert timed is not None
    assert own.reads == len(timed) == 1


def test_blanks_and_odd_characters_are_seen() -> None:
    assert quoted(" good\t") == "' good\\t'"
    shown = quoted("begin " + "x" * 500 + " end")
    assert shown.startswith("'begin x")
    assert shown.endswith("x end'")
    assert len(shown) == 60
