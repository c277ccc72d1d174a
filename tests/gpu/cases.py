"""Small models whose steps draw and compute on the device, and trainings of them.

`REHEARSAL=1` runs these tests on the CPU, so that on a GPU only the device is new; what needs CUDA is left out then.
They need what a run needs: no `datasets`, and any transformers from the lowest version on.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset

IS_REHEARSAL = os.environ.get("REHEARSAL") == "1"
DEVICE = "cpu" if IS_REHEARSAL else "cuda"
VOCABULARY = 64 if IS_REHEARSAL else 1024
LENGTH = 16 if IS_REHEARSAL else 128
NUM_STEPS = 12
# On a GPU kernels may add in varying order; with it, runs are equal to the bit.
DETERMINISTIC = {"full_determinism": True}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
on_cuda = pytest.mark.skipif(IS_REHEARSAL, reason="needs a CUDA device")
precisions = pytest.mark.parametrize(
    "precision", ["fp32", "bf16", pytest.param("fp16", marks=on_cuda)], ids=lambda name: name
)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, num: int = 400, *, is_ragged: bool = False) -> None:
        draw = torch.Generator().manual_seed(1)
        self._ids = torch.randint(3, VOCABULARY, (num, LENGTH), generator=draw)
        self._lengths = [4 + i * 37 % (LENGTH - 4) if is_ragged else LENGTH for i in range(num)]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._ids[index, : self._lengths[index]]
        return {"input_ids": ids, "labels": ids}


def gpt2() -> Any:
    """Its dropout draws on the device."""
    torch.manual_seed(0)
    sizes: dict[str, int] = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str = "sdpa", *, width: int = 128, layers: int = 2, positions: int = LENGTH) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def trainer_of(
    folder: Path,
    model: Any,
    *,
    library: str = "trainwright",
    cls: Any = None,
    callbacks: Iterable[Any] = (),
    rows: Any = None,
    **settings: Any,
) -> Any:
    package = importlib.import_module(library)
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_steps": NUM_STEPS,
        "logging_steps": 4,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "seed": 7,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": IS_REHEARSAL,
    }
    return (cls or package.Trainer)(
        model=model,
        args=package.TrainingArguments(str(folder), **chosen | settings),
        train_dataset=Rows() if rows is None else rows,
        data_collator=transformers.default_data_collator,
        callbacks=list(callbacks),
    )


def trained(folder: Path, model: Any, *, resume: Any = None, **parts: Any) -> Any:
    trainer = trainer_of(folder, model, **parts)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu() for name, value in trainer.model.state_dict().items()}


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two states; 0.0 means equal bits."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """Within it, the process has so much of the device's memory, beside what it holds."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
