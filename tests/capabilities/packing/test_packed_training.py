"""Packed samples train as if each were alone: the same loss, the same gradients, the same count of labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from transformers import DataCollatorForTokenClassification

from trainwright.errors import DataError, ModelError
from trainwright.support.model_facts import is_causal_lm

from ..._support.small import data, make_trainer

SMALL = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KEY_VALUE = {"num_key_value_heads": 1}
LENGTHS = [3, 9, 16, 2, 5, 5, 12, 1, 7, 4, 16, 6]


def seeded(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build()


def gpt2(**settings: Any) -> Any:
    config = T.GPT2Config(
        vocab_size=48,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **settings,
    )
    return T.GPT2LMHeadModel(config)


def encoder(cls: Any, config: Any, **settings: Any) -> Any:
    return cls(config(**SMALL, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **settings))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**SMALL, **KEY_VALUE)),
    "llama-eager": lambda: T.LlamaForCausalLM(T.LlamaConfig(**SMALL, **KEY_VALUE, attn_implementation="eager")),
    "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**SMALL, **KEY_VALUE)),
    "mistral-with-a-window": lambda: T.MistralForCausalLM(T.MistralConfig(**SMALL, **KEY_VALUE, sliding_window=4)),
    "gpt2": gpt2,
    "bert": lambda: encoder(T.BertForMaskedLM, T.BertConfig),
    "bert-eager": lambda: encoder(T.BertForMaskedLM, T.BertConfig, attn_implementation="eager"),
    "bert-tokens": lambda: encoder(T.BertForTokenClassification, T.BertConfig, num_labels=48),
    "roberta": lambda: encoder(T.RobertaForMaskedLM, T.RobertaConfig, pad_token_id=1, max_position_embeddings=40),
}


def texts(lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 48, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def losses_and_gradients(trainer: Any) -> tuple[float, dict[str, torch.Tensor], int]:
    """Of all training data in one window, as the trainer computes them."""
    batches = list(trainer.get_train_dataloader())
    num_items = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    trainer.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=num_items)
        if not is_causal_lm(trainer.model):  # these return a mean over their labels, whatever they are told
            loss = loss * (batch["labels"] != -100).sum() / num_items
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return total, gradients, int(num_items)


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_the_samples_alone(kind: str, tmp_path: Path) -> None:
    def trainer(**settings: Any) -> Any:
        return make_trainer(tmp_path, model=seeded(MODELS[kind]), train_dataset=texts(), **settings)

    loss, gradients, num_items = losses_and_gradients(
        trainer(packing="best_fit", packing_length=16, per_device_train_batch_size=3)
    )
    expected, expected_gradients, expected_items = losses_and_gradients(trainer(per_device_train_batch_size=1))
    assert num_items == expected_items
    assert loss == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        difference = (gradient - expected_gradients[name]).norm() / max(float(expected_gradients[name].norm()), 1e-6)
        assert difference <= 1e-5, name


def test_the_users_collator_is_kept(tmp_path: Path) -> None:
    """What it pads is taken off, what it makes of each sample stays."""
    collator = DataCollatorForTokenClassification(data.tokenizer())
    settings = {"packing": "best_fit", "packing_length": 16, "per_device_train_batch_size": 3}
    model = seeded(MODELS["bert-tokens"])
    own, brought = (
        list(make_trainer(tmp_path, model=model, train_dataset=texts(), **parts, **settings).get_train_dataloader())
        for parts in ({}, {"data_collator": collator})
    )
    for one, other in zip(own, brought, strict=True):
        assert {name: value.tolist() for name, value in one.items()} == {n: v.tolist() for n, v in other.items()}


REFUSED = {
    "one answer for a row": lambda: encoder(T.BertForSequenceClassification, T.BertConfig),
    "a state that runs on": lambda: T.MambaForCausalLM(
        T.MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1)
    ),
    "two sequences a sample": lambda: T.T5ForConditionalGeneration(
        T.T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_mixes_samples_is_refused_before_step_1(kind: str, tmp_path: Path) -> None:
    model = seeded(REFUSED[kind])
    trainer = make_trainer(tmp_path, model=model, train_dataset=texts(), packing="best_fit", packing_length=16)
    with pytest.raises(ModelError, match="packing cannot be used with"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_kernel_that_cannot_take_short_samples_is_named_before_step_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(MODELS["llama"])

    def forward(self: Any, input_ids: Any, **inputs: Any) -> Any:
        raise RuntimeError("NoValidChoicesError: no kernel\nits source follows")

    monkeypatch.setattr(type(model), "forward", forward)
    trainer = make_trainer(tmp_path, model=model, train_dataset=texts(), packing="best_fit", packing_length=16)
    with pytest.raises(ModelError, match=r"sample of 13 tokens with attn_implementation='sdpa'.*no kernel\)"):
        trainer.train()


class Wraps(torch.nn.Module):
    """A model of transformers in a plain module, which says nothing of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded(MODELS["llama"])

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels)


def test_a_module_that_does_not_tell_its_tokens_is_told_which_method_does(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=Wraps(), train_dataset=texts(), packing="best_fit", packing_length=16)
    with pytest.raises(ModelError, match=r"Wraps has no get_input_embeddings\(\)"):
        trainer.train()


def test_an_entry_for_a_whole_sample_cannot_be_packed(tmp_path: Path) -> None:
    items = [{"input_ids": item["input_ids"], "labels": 1} for item in texts()]
    model = seeded(MODELS["bert-tokens"])
    trainer = make_trainer(tmp_path, model=model, train_dataset=items, packing="best_fit", packing_length=16)
    with pytest.raises(DataError, match="'labels' does not have one value per token"):
        trainer.train()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padding_of_rows_is_not_counted_as_tokens(kind: str, tmp_path: Path) -> None:
    settings = {"packing": "best_fit", "packing_length": 16, "include_num_input_tokens_seen": "non_padding"}
    trainer = make_trainer(
        tmp_path,
        model=seeded(MODELS[kind]),
        train_dataset=texts([15, 1, 9, 1, 12, 3, 5]),
        num_train_epochs=1,
        **settings,
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 46


def test_the_probe_leaves_the_model_and_the_random_states_alone(tmp_path: Path) -> None:
    model = seeded(MODELS["bert"])
    model.train()
    model.bert.embeddings.eval()
    trainer = make_trainer(tmp_path, model=model, train_dataset=texts(), packing="best_fit", packing_length=16)
    before = torch.get_rng_state()
    trainer.get_train_dataloader()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.bert.encoder.training
    assert not model.bert.embeddings.training
