"""The models of the parity table: tiny, random, the same at every call."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB = 48
CLASSES = 3
FEATURES = 6


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Build with a fixed seed, and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return build()


def _bert_config(dropout: float) -> BertConfig:
    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def bert(dropout: float = 0.0) -> nn.Module:
    return BertForSequenceClassification(_bert_config(dropout))


def bert_mlm(dropout: float = 0.0) -> nn.Module:
    return BertForMaskedLM(_bert_config(dropout))


def bert_with_frozen_encoder(dropout: float = 0.0) -> nn.Module:
    model = bert(dropout)
    for parameter in model.bert.encoder.parameters():
        parameter.requires_grad_(False)
    return model


def llama(dropout: float = 0.0) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def t5(dropout: float = 0.0) -> nn.Module:
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def vit(dropout: float = 0.0) -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return ViTForImageClassification(config)


class Plain(nn.Module):
    """A module that knows nothing of transformers; `labels` decide whether there is a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(dropout))
        self.head = nn.Linear(12, CLASSES)

    def loss_and_logits(self, x: torch.Tensor, labels: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        logits = self.head(self.body(x))
        return None if labels is None else nn.functional.cross_entropy(logits, labels), logits


class ReturnsDict(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
        loss, logits = self.loss_and_logits(x, labels)
        return {"loss": loss, "logits": logits}


class ReturnsTuple(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor]:
        return self.loss_and_logits(x, labels)
