"""Seq2SeqTrainer on a decoder-only model: where code expects transformers' predictions, they begin with the prompt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DataCollatorForSeq2Seq, GPT2Config, GPT2LMHeadModel

import trainwright
from trainwright import compat

from . import data, models
from .sides import Side

OURS = Side("trainwright", trainwright.Seq2SeqTrainer, trainwright.Seq2SeqTrainingArguments)
REFERENCE = Side("transformers", transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments)
PROMPTS = [[7, 8, 9], [10, 11], [12, 13, 14, 15], [16, 17, 18]]
ANSWERS = [[20, 21], [22, 23, 24], [25], [26, 27]]

Row = dict[str, list[int]]


def row(prompt: list[int], labels: list[int], answer: list[int]) -> Row:
    ids = prompt + answer
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


ROWS: dict[str, Callable[[list[int], list[int]], Row]] = {
    "training data": lambda prompt, answer: row(prompt, [-100] * len(prompt) + answer, answer),
    "unmasked labels": lambda prompt, answer: row(prompt, prompt + answer, answer),
    "answers as labels": lambda prompt, answer: row(prompt, [*answer, *[-100] * (len(prompt) - len(answer))], []),
}


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=models.VOCAB,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return models.seeded(lambda: GPT2LMHeadModel(config))


def blanks_prompts(base: Any) -> Any:
    """As LLaMA-Factory's trainer does: labels are taken out before, and the prompt is blanked in what is generated."""

    class Blanks(base):  # type: ignore[misc]  # of either side
        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
        ) -> Any:
            labels = inputs.pop("labels", None) if self.args.predict_with_generate else inputs.get("labels")
            loss, generated, _ = super().prediction_step(
                model, inputs, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys, **gen_kwargs
            )
            if generated is not None and self.args.predict_with_generate:
                generated[:, : inputs["input_ids"].size(-1)] = self.processing_class.pad_token_id
                generated = generated.contiguous()
            return loss, generated, labels

    return Blanks


def predicted(side: Side, folder: Path, rows: str, cls: Any = None, **settings: Any) -> Any:
    tokenizer = data.tokenizer()
    tokenizer.padding_side = "left"
    items = [ROWS[rows](prompt, answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    chosen = side if cls is None else Side(side.name, cls, side.arguments)
    trainer = chosen.make(
        gpt2(),
        folder / side.name,
        {"predict_with_generate": True, "per_device_eval_batch_size": 2} | settings,
        train_dataset=items,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    return trainer.predict(items, max_new_tokens=5)


def assert_same(ours: Any, theirs: Any) -> None:
    np.testing.assert_array_equal(ours.predictions, theirs.predictions)
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)


@pytest.mark.framework
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("switch", ["installed", "reproduce"])
def test_predictions_begin_with_the_input(rows: str, switch: str, tmp_path: Path) -> None:
    theirs = predicted(REFERENCE, tmp_path, rows)
    installed: AbstractContextManager[Any] = compat.install() if switch == "installed" else nullcontext()
    settings = {"reproduce": "transformers"} if switch == "reproduce" else {}
    with installed:
        ours = predicted(OURS, tmp_path, rows, **settings)
    assert_same(ours, theirs)
    if switch == "reproduce":
        assert ours.metrics["test_loss"] == theirs.metrics["test_loss"]


@pytest.mark.framework
@pytest.mark.parametrize("rows", ROWS)
def test_a_subclass_that_blanks_the_prompt_itself_finds_it(rows: str, tmp_path: Path) -> None:
    ours = predicted(OURS, tmp_path, rows, blanks_prompts(OURS.trainer))
    assert_same(ours, predicted(REFERENCE, tmp_path, rows, blanks_prompts(REFERENCE.trainer)))
    assert (ours.predictions != 0).any()


def test_without_a_length_twenty_tokens_are_added_to_a_kept_prompt(tmp_path: Path) -> None:
    trainer = blanks_prompts(OURS.trainer)
    rows = [{"input_ids": torch.arange(5, 35).tolist()}]
    args = OURS.arguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", predict_with_generate=True)
    tokenizer = data.tokenizer()
    made = trainer(model=gpt2(), args=args, data_collator=DataCollatorForSeq2Seq(tokenizer), processing_class=tokenizer)
    made.model.generation_config.eos_token_id = None
    assert made.predict(rows).predictions.shape == (1, 50)


def test_elsewhere_the_prompt_is_cut_off(tmp_path: Path) -> None:
    assert predicted(OURS, tmp_path, "training data").predictions.shape == (len(PROMPTS), 5)
    with pytest.raises(ValueError, match="needs a prompt to continue"):
        predicted(OURS, tmp_path, "unmasked labels")
