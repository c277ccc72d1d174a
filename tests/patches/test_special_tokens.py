"""A model's special tokens follow its tokenizer's: as transformers' trainer changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright.support.patches import align_special_tokens

from .._support.small import OURS, REFERENCE, data, make_trainer, models

NAMES = ("pad_token_id", "bos_token_id", "eos_token_id")


def tokenizer(**tokens: str) -> Any:
    made = data.tokenizer()
    for name, token in tokens.items():
        setattr(made, name, token)
    return made


TOKENIZERS: dict[str, dict[str, str]] = {
    "pad alone": {},
    "eos": {"eos_token": "w3"},
    "bos": {"bos_token": "w4"},
    "all": {"eos_token": "w3", "bos_token": "w4", "pad_token": "w5"},
}


@pytest.mark.framework
@pytest.mark.parametrize("tokens", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@pytest.mark.parametrize("build", [models.llama, models.gpt2, models.t5, models.bert])
@pytest.mark.parametrize("eos", [None, 9, [9, 10]], ids=str)
@pytest.mark.one_in(5)
def test_as_in_transformers(build: Any, tokens: dict[str, str], eos: Any, tmp_path: Path) -> None:
    after = []
    for side in (OURS, REFERENCE):
        model = models.seeded(build)
        if eos is not None:
            model.config.eos_token_id = eos
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.eos_token_id = eos
        items = {models.bert: data.texts, models.t5: data.pairs}.get(build, data.sequences)(4)
        make_trainer(
            tmp_path, side, model=model, train_dataset=items, max_steps=1, processing_class=tokenizer(**tokens)
        ).train()
        configs = [model.config, getattr(model, "generation_config", None)]
        after.append([{name: getattr(config, name, None) for name in NAMES} for config in configs if config])
    assert after[0] == after[1]


def test_what_changed_is_returned_and_a_second_time_there_is_nothing() -> None:
    model = models.llama()
    assert align_special_tokens(model, tokenizer(eos_token="w3"))["eos_token_id"] == 8
    assert align_special_tokens(model, tokenizer(eos_token="w3")) == {}


@pytest.mark.parametrize("processing_class", [None, object()])
def test_without_a_tokenizer_nothing_changes(processing_class: Any) -> None:
    model = models.llama()
    before = {name: getattr(model.config, name) for name in NAMES}
    assert align_special_tokens(model, processing_class) == {}
    assert {name: getattr(model.config, name) for name in NAMES} == before


def test_a_plain_module_is_left_alone() -> None:
    assert align_special_tokens(models.ReturnsDict(), data.tokenizer()) == {}
