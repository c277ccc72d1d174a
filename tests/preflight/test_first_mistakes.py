"""The first mistakes of a new user end in a sentence that says what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trainwright import Trainer, TrainingArguments
from trainwright.errors import DataError, ModelError
from trainwright.run.checks import raise_no_loss

from ..parity import models
from ..parity.data import TorchDataset as OwnRows


class Tagger(nn.Module):
    """Takes token ids; `full` is the error that its forward pass raises, if any."""

    def __init__(self, full: Exception | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2)
        self.full = full

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        if self.full is not None:
            raise self.full
        logits = self.table(input_ids).mean(1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(folder: Path, rows: Any, full: Exception | None = None) -> None:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=2,
    )
    Trainer(model=Tagger(full), args=args, train_dataset=rows).train()


ROWS = [{"input_ids": [1, 2], "labels": 0}, {"input_ids": [3, 4], "labels": 1}]


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_an_output_directory_that_is_a_file_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(FileExistsError, match=r"^output_dir=.*runs' cannot be made: it is a file. Choose another"):
        train(tmp_path / "runs", ROWS)
    with pytest.raises(OSError, match=r"^output_dir=.*first' cannot be made: not a directory. Choose another"):
        train(tmp_path / "runs" / "first", ROWS)


def test_texts_of_different_lengths_are_to_be_padded(tmp_path: Path) -> None:
    ragged = [ROWS[0], {"input_ids": [3, 4, 5], "labels": 1}]
    with pytest.raises(DataError, match=r"samples differ in length: .* 2 elements in train\[0\] and 3 elements"):
        train(tmp_path, ragged)
    with pytest.raises(ValueError, match="expected sequence of length") as caught:  # a class of one's own is not read
        train(tmp_path, OwnRows(ragged))
    assert "differ in length. Pad them with processing_class=tokenizer" in text_of(caught.value)


def test_columns_that_are_no_inputs_are_to_be_renamed_or_tokenized(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\(input_ids, labels.*Rename the columns, tokenize the text first"):
        train(tmp_path, [{"text": "a"}, {"text": "b"}])


def test_labels_that_are_texts_are_to_be_numbered(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "label": word} for word in ("yes", "no")]
    cure = r"Labels that are texts need numbers: dataset.class_encode_column\('label'\)"
    with pytest.raises(DataError, match=f"'label' is a text in train.*{cure}"):
        train(tmp_path, rows)
    with pytest.raises(ValueError, match="too many dimensions 'str'") as caught:  # a class of one's own is not read
        train(tmp_path, OwnRows(rows))
    assert re.search(cure, text_of(caught.value))


COLLATOR = r"data_collator=DataCollatorForLanguageModeling\(tokenizer, mlm=False\) makes labels from input_ids"


@pytest.mark.parametrize(("make", "cure"), [(models.gpt2, COLLATOR), (models.bert, "'labels'. Labels that are texts")])
def test_a_model_without_labels_says_where_they_come_from(make: Callable[[], nn.Module], cure: str) -> None:
    with pytest.raises(ModelError, match=cure):
        raise_no_loss(make(), {"input_ids": torch.ones(1, 2)}, {"logits": None}, None, made_by=None)


class Wide(nn.Module):
    """Whose forward pass does not fit, but whose memory can be planned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 256)
        self.head = nn.Linear(256, 8)

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        if not isinstance(self.table.weight, FakeTensor):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        logits = self.head(self.table(input_ids).relu().exp().tanh())
        return {"loss": nn.functional.cross_entropy(logits[:, 0], labels), "logits": logits}


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (10**9, r"a step needs .*: look for what else holds memory of the device"),
        (400_000, r"this would fit, with .*: per_device_train_batch_size=\d, gradient_accumulation_steps=\d"),
        (1_000, r"no change of settings alone makes it fit"),
    ],
)
def test_a_first_step_that_does_not_fit_says_what_would(
    limit: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.preflight.memory.planner.read_memory", lambda device: limit)
    rows = [{"input_ids": [1, 2] * 32, "labels": 0}] * 16
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, max_steps=2
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        Trainer(Wide(), args, train_dataset=rows).train()
    assert re.search(said, text_of(caught.value)), text_of(caught.value)
    assert text_of(caught.value).count("By the memory plan") == 1


def test_a_step_that_does_not_fit_says_what_to_change(tmp_path: Path) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, ROWS, full)
    assert "A smaller per_device_train_batch_size with more gradient_accumulation_steps" in text_of(caught.value)
