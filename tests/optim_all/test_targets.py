"""`optim_target_modules`: names, parts of names, patterns, all linear layers; and what is said when nothing fits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_utils import check_target_module_exists as reference

from trainwright import check_target_module_exists
from trainwright.errors import ArgumentError
from trainwright.optim.parameter_groups import target_parameters

from ..parity import models
from .table import Net, Row, make_trainer

KEYS = ("", "body", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp", "lm_head", "model.norm")
TARGETS: list[Any] = [
    "body",
    "all-linear",
    r".*\.q_proj",
    r"model\.layers\.\d+\.mlp",
    ["attn", "mlp"],
    ["body"],
    [r"model\..*_proj"],
    [r".*norm", "lm_head"],
    [],
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_a_module_is_a_target_as_in_transformers(targets: Any, key: str) -> None:
    assert check_target_module_exists(targets, key) == reference(targets, key)
    assert check_target_module_exists(targets, key, return_is_regex=True) == reference(targets, key, True)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", {"body.weight", "head.weight"}),
        ("all_linear", {"body.weight", "head.weight"}),
        (["body"], {"body.weight"}),
        (("bo", "hea"), {"body.weight", "head.weight"}),
        ("b.*", {"body.weight"}),
        (["embed", "head"], {"head.weight"}),
    ],
)
def test_weights_of_linear_layers_are_meant(targets: Any, expected: set[str]) -> None:
    assert target_parameters(Net(), targets, optimizer="galore_adamw") == expected


def test_nothing_fits_and_the_nearest_names_are_told() -> None:
    with pytest.raises(ArgumentError, match=r"optim_target_modules=.*fits no linear layer") as caught:
        target_parameters(models.llama(), ["q_prj", "selfattn"], optimizer="galore_adamw")
    assert "model.layers.0.self_attn.q_proj" in str(caught.value)


@pytest.mark.parametrize("targets", [None, [], "", 3], ids=str)
def test_no_targets_at_all(targets: Any) -> None:
    with pytest.raises(ArgumentError, match="all-linear"):
        target_parameters(Net(), targets, optimizer="apollo_adamw")


def test_an_invalid_pattern() -> None:
    with pytest.raises(ArgumentError, match=r"'\(' is not a regular expression"):
        target_parameters(Net(), "(", optimizer="apollo_adamw")


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        target_parameters(Net(), ["embed", "boddy", "head"], optimizer="galore_adamw")
    assert "embed, a Embedding" in caplog.text
    assert "'boddy' fits no linear layer" in caplog.text
    assert "body" in caplog.text


def test_a_run_stops_before_its_first_step(tmp_path: Path) -> None:
    pytest.importorskip("galore_torch")
    with pytest.raises(ArgumentError, match="The nearest names: body"):
        make_trainer(tmp_path, Row("galore_adamw"), optim_target_modules=["bodi"]).train()
