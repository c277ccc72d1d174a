"""How many input tokens a batch has."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainwright.state.throughput import count_tokens

IDS = torch.tensor([[5, 6, 0], [7, 0, 0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


class Model:
    main_input_name = "input_ids"


MODEL = Model()
PADS = SimpleNamespace(pad_token_id=0)


@pytest.mark.parametrize(
    ("batch", "tokenizer", "mode", "expected"),
    [
        ({"input_ids": IDS}, None, "all", 6),
        ({"input_ids": IDS, "attention_mask": MASK}, PADS, "all", 6),
        ({"input_ids": IDS, "attention_mask": MASK}, PADS, "non_padding", 5),
        ({"input_ids": IDS}, PADS, "non_padding", 3),
    ],
)
def test_count(batch: dict[str, Any], tokenizer: Any, mode: str, expected: int) -> None:
    assert int(count_tokens(batch, MODEL, tokenizer, mode=mode)) == expected


@pytest.mark.parametrize(
    ("batch", "mode", "expected", "word"),
    [({"pixels": IDS}, "all", 0, "main_input_name"), ({"input_ids": IDS}, "non_padding", 6, "all are counted")],
)
def test_what_cannot_be_counted_is_said_once(
    batch: dict[str, Any], mode: str, expected: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        assert [count_tokens(batch, model, None, mode=mode) for _ in range(3)] == 3 * [expected]
    assert caplog.text.count(word) == 1


def test_the_main_input_of_another_model() -> None:
    model = Model()
    model.main_input_name = "pixels"
    assert count_tokens({"pixels": torch.ones(2, 3)}, model, None, mode="all") == 6
