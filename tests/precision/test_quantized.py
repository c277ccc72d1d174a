"""Quantised models are refused before step 1 exactly where the original refuses them, in all orders of wrapping."""

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_utils import validate_quantization_for_training

from trainwright import Trainer, TrainingArguments
from trainwright.errors import ModelError

ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4
# peft reads it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ADAPTERS = ("none", "peft", "transformers")


def quantized(adapter: str, *, trainable: bool, qat: bool, compiled: bool) -> Any:
    """Returns a small model that says of itself what a quantised one says; its weights are ordinary ones."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=9)
    model: Any = LlamaForCausalLM(config)
    model.is_quantized = True
    model.hf_quantizer = SimpleNamespace(
        is_trainable=trainable, is_qat_trainable=qat, quantization_config=SimpleNamespace(quant_method="some-bits")
    )
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    if adapter == "transformers":
        try:
            model.add_adapter(lora)
        except ValueError as error:  # a release of transformers that wants a newer peft than the index has
            pytest.skip(str(error))
    elif adapter == "peft":
        model = get_peft_model(model, lora)
    return torch.compile(model, backend="eager") if compiled else model


def is_refused_by_the_original(model: Any) -> bool:
    try:
        validate_quantization_for_training(model)
    except ValueError:
        return True
    return False


def trained(model: Any, folder: Path) -> Trainer:
    args = TrainingArguments(str(folder), max_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = Trainer(model, args, train_dataset=ROWS)
    trainer.train()
    return trainer


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_refused_exactly_where_the_original_refuses(adapter: str, tmp_path: Path) -> None:
    for trainable, qat, compiled in itertools.product((False, True), repeat=3):
        model = quantized(adapter, trainable=trainable, qat=qat, compiled=compiled)
        if is_refused_by_the_original(model):
            with pytest.raises(ModelError, match="quantised"):
                trained(model, tmp_path)
        else:
            assert trained(model, tmp_path).state.global_step == 1


@pytest.mark.parametrize(
    ("adapter", "facts", "words"),
    [
        ("none", {"trainable": True, "qat": False, "compiled": False}, "Train an adapter"),
        ("peft", {"trainable": False, "qat": False, "compiled": False}, "some-bits.*Load the model unquantised"),
        ("none", {"trainable": False, "qat": True, "compiled": False}, "some-bits.*Load the model unquantised"),
        ("peft", {"trainable": True, "qat": False, "compiled": True}, "before compiling"),
    ],
)
def test_the_sentence_names_the_cure(adapter: str, facts: dict[str, bool], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        trained(quantized(adapter, **facts), tmp_path)


def test_an_adapter_of_transformers_on_such_a_quantisation_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainwright"):
        trained(quantized("transformers", trainable=False, qat=False, compiled=False), tmp_path)
    assert sum("some-bits" in record.getMessage() for record in caplog.records) == 1
