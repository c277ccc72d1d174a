"""Evaluation by generation with models that continue a prompt: what they are given, and what counts as theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, GPT2Config, GPT2LMHeadModel, set_seed

from trainwright import Seq2SeqTrainer, Seq2SeqTrainingArguments
from trainwright.errors import DataError, ModelError
from trainwright.evaluation.generation import make_prompted_task, make_task, new_tokens, pack, pad_right

from .._support.small import data, models, module

PAD = 0
NEW = 5


def gpt2(dropout: float = 0.0) -> Any:
    config = GPT2Config(
        vocab_size=models.VOCAB,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        initializer_range=0.5,
    )
    return models.seeded(lambda: GPT2LMHeadModel(config))


def questions(size: int = 7) -> list[tuple[list[int], list[int]]]:
    g = torch.Generator().manual_seed(3)

    def tokens(length: int) -> list[int]:
        return torch.randint(5, models.VOCAB, (length,), generator=g).tolist()

    return [(tokens(2 + i % 4), tokens(1 + i * 2 % 5)) for i in range(size)]


def together() -> list[dict[str, Any]]:
    return [
        {"input_ids": p + a, "attention_mask": [1] * len(p + a), "labels": [-100] * len(p) + a} for p, a in questions()
    ]


def apart() -> list[dict[str, Any]]:
    return [{"input_ids": p, "attention_mask": [1] * len(p), "labels": a} for p, a in questions()]


def trainer(folder: Path, rows: Any, *, side: str = "left", model: Any = None, **settings: Any) -> Seq2SeqTrainer:
    tokenizer = data.tokenizer()
    tokenizer.padding_side = side
    args = Seq2SeqTrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        log_level="error",
        **{"predict_with_generate": True, "per_device_eval_batch_size": 3, **settings},
    )
    return Seq2SeqTrainer(
        model=gpt2() if model is None else model,
        args=args,
        train_dataset=together(),
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda prediction: {"shape": len(prediction.predictions)},
    )


def by_hand(max_new_tokens: int = NEW) -> list[list[int]]:
    """One prompt at a time, without any padding."""
    model = gpt2().eval()
    rows = []
    for prompt, _ in questions():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, pad_token_id=PAD)
        rows.append(out[0, len(prompt) :].tolist())
    return [row + [PAD] * (max_new_tokens - len(row)) for row in rows]


FORMS = {"together": together, "apart": apart}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_the_prompt_is_continued_and_cut_off(form: str, side: str, tmp_path: Path) -> None:
    output = trainer(tmp_path, FORMS[form](), side=side).predict(FORMS[form](), max_new_tokens=NEW)
    assert output.predictions.tolist() == by_hand()
    answers = [answer for _, answer in questions()]
    assert [[token for token in row if token != -100] for row in output.label_ids.tolist()] == answers


@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_the_mean_over_the_answers(form: str, batch_size: int, tmp_path: Path) -> None:
    model = gpt2().eval()
    total = 0.0
    count = 0
    for prompt, answer in questions():
        logits = model(torch.tensor([prompt + answer])).logits.detach()[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
        count += len(answer)
    one = trainer(tmp_path, FORMS[form](), per_device_eval_batch_size=batch_size)
    assert one.evaluate(max_new_tokens=1)["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def test_beams_and_no_labels(tmp_path: Path) -> None:
    rows = [{"input_ids": p, "attention_mask": [1] * len(p)} for p, _ in questions()]
    output = trainer(tmp_path, rows, generation_num_beams=3).predict(rows, max_new_tokens=NEW)
    assert output.predictions.shape == (7, NEW)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    assert output.predictions.tolist() != by_hand()


def test_without_a_length_twenty_tokens_are_written(tmp_path: Path) -> None:
    assert trainer(tmp_path, apart()).predict(apart()).predictions.shape == (7, 20)


def test_drawing_tokens_leaves_the_random_state_and_the_mode_alone(tmp_path: Path) -> None:
    one = trainer(tmp_path, apart(), model=gpt2(dropout=0.5))
    one.model.train()
    set_seed(5)
    before = torch.get_rng_state()
    drawn = [one.predict(apart(), max_new_tokens=NEW, do_sample=True, top_k=0).predictions for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(*drawn)
    assert drawn[0].tolist() != by_hand()


@pytest.mark.parametrize("draws", [False, True])
def test_evaluating_by_generation_changes_no_weight_of_the_run(draws: bool, tmp_path: Path) -> None:
    def weights(**settings: Any) -> dict[str, torch.Tensor]:
        one = trainer(tmp_path, apart(), model=gpt2(dropout=0.3), max_steps=4, **settings)
        one.model.generation_config.update(max_new_tokens=2, do_sample=draws)
        one.train()
        return one.model.state_dict()

    plain = weights()
    judged = weights(eval_strategy="steps", eval_steps=1)
    assert all(torch.equal(plain[name], judged[name]) for name in plain)


def test_logits_are_never_kept(tmp_path: Path) -> None:
    shapes: list[Any] = []
    one = trainer(tmp_path, together())
    one.preprocess_logits_for_metrics = lambda tokens, labels: shapes.append(tokens.shape) or tokens
    one.evaluate(max_new_tokens=NEW)
    assert shapes == [(3, NEW), (3, NEW), (1, NEW)]


def test_several_sets_are_generated_with_the_settings_of_the_call(tmp_path: Path) -> None:
    one = trainer(tmp_path, {"a": apart(), "b": together()})
    widths: list[int] = []
    one.compute_metrics = lambda prediction: widths.append(prediction.predictions.shape[1]) or {}
    one.evaluate(max_new_tokens=3)
    assert widths == [3, 3]
    assert one._gen_kwargs == {}


def test_no_prompt_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, 6, 7]}]
    with pytest.raises(DataError, match=r"labels begin at the first token.*labels of the prompt to -100"):
        trainer(tmp_path, rows).evaluate()


def test_padding_that_nothing_tells_apart_from_the_prompt_is_an_error() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7], [8, PAD, PAD]])}
    with pytest.raises(DataError, match=r"padding at its right end.*padding_side = 'left'"):
        make_prompted_task(batch, ["labels"], pad_token_id=PAD)


def test_a_model_that_cannot_generate_is_reported_and_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, predict_with_generate=True, max_steps=1, report_to="none", save_strategy="no"
    )
    items = data.vectors(4)
    built = Seq2SeqTrainer(model=module(), args=args, train_dataset=items, eval_dataset=items)
    assert "ReturnsDict cannot generate" in caplog.text
    assert built.train().global_step == 1
    assert "eval_loss" in built.evaluate()
    with pytest.raises(ModelError, match=r"ReturnsDict cannot generate.*AutoModelForSeq2SeqLM"):
        built.predict(items)


def test_missing_padding_token_is_reported_and_an_error_when_rows_are_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.t5()
    model.config.pad_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True)
    built = Seq2SeqTrainer(model=model, args=args)
    assert "pad_token_id" in caplog.text
    with pytest.raises(ModelError, match=r"pad_token_id.*processing_class"):
        built._pad_tensors_to_max_len(torch.ones(1, 2, dtype=torch.long), 4)


def test_rows_of_a_sample_stay_together(tmp_path: Path) -> None:
    """Without the prompt, and in the order of the samples, over batches too."""
    how = {"num_beams": 2, "max_new_tokens": 2}
    one = trainer(tmp_path, apart()).predict(apart(), **how)
    two = trainer(tmp_path, apart()).predict(apart(), **how, num_return_sequences=2)
    assert len(two.predictions) == 2 * len(one.predictions)
    assert two.predictions[::2].tolist() == one.predictions.tolist()
    assert two.label_ids.tolist() == one.label_ids.tolist()
    assert two.metrics["test_loss"] == one.metrics["test_loss"]


def test_samples_with_different_numbers_of_rows_are_an_error() -> None:
    task = make_prompted_task({"input_ids": torch.tensor([[5, 6], [7, 8]])}, ["labels"], pad_token_id=PAD)
    with pytest.raises(DataError, match=r"3 rows for 2 samples.*the same number"):
        new_tokens(torch.zeros(3, 4, dtype=torch.long), task, batch_size=2)


class Echo(torch.nn.Module):
    """A module of the user's own that can generate: it repeats its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.pad_token_id = PAD
        self.config = None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 2, "logits": input_ids}

    def generate(self, input_ids: torch.Tensor, times: int = 1) -> torch.Tensor:
        return input_ids.repeat(1, times)


def test_a_plain_module_with_a_generate_of_its_own(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, i], "labels": [i]} for i in range(7, 11)]
    one = trainer(tmp_path, rows, model=Echo())
    one.data_collator = lambda batch: {key: torch.tensor([row[key] for row in batch]) for key in batch[0]}
    output = one.predict(rows, times=2)
    assert output.predictions.tolist() == [row["input_ids"] * 2 for row in rows]
    assert output.metrics["test_loss"] == 2


def test_what_goes_along_with_the_tokens_moves_with_them() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, PAD], [8, 9, 10, 11]]),
        "token_type_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
        "position_ids": torch.arange(4).repeat(2, 1),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "pixel_values": torch.ones(2, 3),
        "labels": torch.tensor([[-100, -100, 7, -100], [-100, -100, -100, 11]]),
    }
    task = make_prompted_task(batch, ["labels"], pad_token_id=PAD)
    assert task.inputs["input_ids"].tolist() == [[PAD, 5, 6], [8, 9, 10]]
    assert task.inputs["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert task.inputs["token_type_ids"].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert set(task.inputs) == {"input_ids", "attention_mask", "token_type_ids", "pixel_values"}
    assert task.labels is not None
    assert task.labels.tolist() == [[7], [11]]


def test_a_decoder_input_of_its_own_is_a_start_and_stays() -> None:
    batch = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4), "decoder_input_ids": torch.ones(2, 1)}
    assert "decoder_input_ids" in make_task(batch, ["labels"]).inputs
    made = {**batch, "decoder_input_ids": torch.ones(2, 4), "decoder_attention_mask": torch.ones(2, 4)}
    assert set(make_task(made, ["labels"]).inputs) == {"input_ids"}


def test_rows_are_packed_and_filled_up() -> None:
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    keep = torch.tensor([[True, False, True], [False, False, True]])
    assert pack(rows, keep, fill=0).tolist() == [[1, 3], [6, 0]]
    assert pack(rows, keep, fill=0, at_right=True).tolist() == [[1, 3], [0, 6]]
    assert pad_right(rows, 4, fill=9).tolist() == [[1, 2, 3, 9], [4, 5, 6, 9]]
    assert pad_right(rows, 2, fill=9) is rows


def test_a_model_that_gives_back_only_what_is_new_loses_nothing() -> None:
    task = make_prompted_task({"input_ids": torch.tensor([[5, 6]])}, [], pad_token_id=PAD)
    assert new_tokens(torch.tensor([[7, 8, 9]]), task, batch_size=1).tolist() == [[7, 8, 9]]
    assert new_tokens({"sequences": torch.tensor([[5, 6, 9]])}, task, batch_size=1).tolist() == [[9]]
