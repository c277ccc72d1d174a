"""Settings and runs of models whose parts are in several processes, used by a script and by the tests that judge it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from tests.parity import data, models
from tests.parity.sides import OURS, without_clock
from transformers import RobertaConfig, RobertaForMaskedLM

SAVED = "means, accumulated"
# name -> (window of `cases.WINDOWS`, settings)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full_shard": ("counted, accumulated", {"fsdp": True}),
    "shard_grad_op": ("means", {"fsdp": "shard_grad_op auto_wrap"}),
    "by size": (
        "means, accumulated",
        {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 20}},
    ),
    "not wrapped": ("means, accumulated", {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}),
    "offloaded": ("means", {"fsdp": "full_shard offload"}),
    "recomputed": ("means", {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}),
    "of a head": ("told and ignored", {"fsdp": "full_shard auto_wrap"}),
    "of a head, by size": ("told and ignored", {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 500}}),
    "hybrid": ("means", {"fsdp": "hybrid_shard_zero2"}),
    "whole": ("means", {"fsdp": "no_shard"}),
    "synchronised": (
        "means, accumulated",
        {"fsdp": True, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    ),
}
FORMS = {name: {"state_dict_type": name} for name in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")}


def outcome_of_parts(trainer: Any, **how: Any) -> dict[str, Any]:
    """As `cases.outcome`, with the parts put together."""
    out = trainer.train(**how)
    state = {
        name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in trainer.model.state_dict().items()
    }
    return {
        "weights": {name: value.double().flatten().tolist() for name, value in state.items()},
        "log": without_clock(trainer.state.log_history),
        "loss": out.training_loss,
        "step": out.global_step,
    }


def judged_parts(trainer: Any) -> dict[str, Any]:
    predicted = trainer.predict(trainer.eval_dataset)
    return {"loss": trainer.evaluate()["eval_loss"], "predictions": predicted.predictions.tolist()}


def tied_model() -> Any:
    return models.seeded(lambda: models.gpt2(0.0))


def roberta() -> Any:
    """Its embeddings have one of the classes that it names for sharding, and contain what becomes a unit by itself."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = RobertaConfig(
        vocab_size=models.VOCAB,
        max_position_embeddings=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    return models.seeded(lambda: RobertaForMaskedLM(config))


def adapter() -> Any:
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    return models.seeded(lambda: peft.get_peft_model(models.gpt2(0.0), config))


def tied_trainer(model: Any, folder: Path, processes: int = 2, **config: Any) -> Any:
    """Four steps of eight texts."""
    sharding: dict[str, Any] = {"fsdp": True, "fsdp_config": config} if processes > 1 else {}
    settings = {
        "per_device_train_batch_size": 8 // processes,
        "max_steps": 4,
        "logging_steps": 4,
        "seed": 3,
        "learning_rate": 0.1,
        "optim": "sgd",
        "save_strategy": "no",
    }
    return OURS.make(model, folder, settings | sharding, train_dataset=data.sequences(32))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
