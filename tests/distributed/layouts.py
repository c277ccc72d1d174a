"""A small model that several processes load in parts, and its runs; used by a script and by the tests that judge it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tests.parity import models
from tests.parity.sides import OURS, without_clock

MODEL = "model"
BY_ONE = "by_one"
SAVED = "checkpoint-4"
TOTAL = 8  # samples in a micro-batch of all processes


def write_model(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.0,
    )
    models.seeded(lambda: transformers.LlamaForCausalLM(config)).save_pretrained(folder)


def whole(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def in_parts(folder: Path, **sizes: int) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, distributed_config=transformers.DistributedConfig(**sizes)
    )


def texts(size: int) -> list[dict[str, Any]]:
    """Texts of which unequal parts are to be learnt."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for i in range(size):
        ids = torch.randint(1, 64, (12,), generator=generator)
        labels = ids.clone()
        labels[: i % 7] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def trainer_of(model: Any, folder: Path, *, replicas: int = 1, **more: Any) -> Any:
    settings = {
        "per_device_train_batch_size": TOTAL // replicas,
        "per_device_eval_batch_size": 4,
        "seed": 5,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "num_train_epochs": 2,
        "max_grad_norm": 0.5,
    }
    rows = texts(45)
    return OURS.make(model, folder, settings | more, train_dataset=rows, eval_dataset=rows[:9])


def outcome_of_parts(trainer: Any, **how: Any) -> dict[str, Any]:
    out = trainer.train(**how)
    state = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in trainer.model.state_dict().items()}
    return {
        "weights": {name: value.double().flatten().tolist() for name, value in state.items()},
        "log": without_clock(trainer.state.log_history),
        "loss": out.training_loss,
        "step": out.global_step,
    }


def judged(trainer: Any) -> dict[str, Any]:
    """Of nine texts, in batches of four."""
    predicted = trainer.predict(trainer.eval_dataset)
    return {
        "loss": trainer.evaluate()["eval_loss"],
        "predictions": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
    }
