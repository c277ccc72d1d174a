"""Where a check runs its trainer: a classifier that keeps a diary, a dozen samples, a few steps on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright import Trainer, TrainerCallback, TrainingArguments

from .._support.small import StopAt as StopAt
from .._support.small import differing
from .._support.small import logged as logged
from .._support.small import weights as weights
from ..parity.sides import Weights

NUM_SAMPLES = 12
CLASSES = 3
Item = dict[str, Any]

SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "disable_tqdm": True,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "learning_rate": 0.1,
    "logging_steps": 1,
    "save_strategy": "no",
}
PARTS = (
    "model",
    "model_init",
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "processing_class",
    "callbacks",
    "compute_metrics",
    "optimizers",
)


class Toy(nn.Module):
    """Writes down the samples of each batch and the type of its logits, in training and in evaluation."""

    main_input_name = "x"

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(8, CLASSES)
        self.trained: list[list[int]] = []
        self.evaluated: list[list[int]] = []
        self.types: dict[str, torch.dtype] = {}

    def forward(
        self, x: torch.Tensor, index: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x.to(self.head.weight.dtype)))
        self.types["training" if self.training else "evaluation"] = logits.dtype
        if index is not None:
            (self.trained if self.training else self.evaluated).append(index.tolist())
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}

    @property
    def order(self) -> list[int]:
        """The samples it was trained on."""
        return [index for batch in self.trained for index in batch]


def seeded(build: Callable[[], Any]) -> Any:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build()


def samples(size: int = NUM_SAMPLES) -> list[Item]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(4, generator=generator), "index": torch.tensor(i), "labels": torch.tensor(i * i % CLASSES)}
        for i in range(size)
    ]


def llama(**settings: Any) -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **settings,
    )
    return seeded(lambda: LlamaForCausalLM(config))


def sentences(size: int = 4, *, num_padding: int = 0) -> list[Item]:
    """Six tokens each, of which the last `num_padding` are masked out."""
    generator = torch.Generator().manual_seed(5)
    mask = [1] * (6 - num_padding) + [0] * num_padding
    rows = [torch.randint(3, 32, (6,), generator=generator).tolist() for _ in range(size)]
    return [{"input_ids": row, "attention_mask": mask, "labels": row} for row in rows]


def are_equal(one: Weights, other: Weights) -> bool:
    return not differing(one, other)


def steps_with(trainer: Any, name: str) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if name in entry]


def checkpoints(folder: Path | str) -> list[int]:
    """The steps of checkpoints in a directory, or of copies, whose names also have the number of their lease."""
    return sorted(int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*"))


class Listener(TrainerCallback):
    """Calls a function with the model at the beginning of each step."""

    def __init__(self, listen: Callable[[Any], None]) -> None:
        self.listen = listen

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.listen(kwargs["model"])


@dataclass
class Bench:
    """Makes trainers in a directory of its own, and has what a check needs to look over their shoulder."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    caplog: pytest.LogCaptureFixture
    num_made: int = 0

    def args(self, kind: Any = TrainingArguments, **settings: Any) -> Any:
        self.num_made += 1
        return kind(**{"output_dir": str(self.folder / f"run-{self.num_made}"), **SETTINGS, **settings})

    def trainer(self, cls: Any = Trainer, **given: Any) -> Any:
        """A trainer on the toy; of `given`, what is no part of a trainer is a setting."""
        parts = {name: given.pop(name) for name in PARTS if name in given}
        if "model" not in parts and "model_init" not in parts:
            parts["model"] = seeded(Toy)
        parts.setdefault("train_dataset", samples())
        parts.setdefault("eval_dataset", samples())
        return cls(args=self.args(**given), **parts)

    def train(self, cls: Any = Trainer, **given: Any) -> Any:
        """The trainer after its training."""
        trainer = self.trainer(cls, **given)
        trainer.train()
        return trainer

    def weights(self, **given: Any) -> Weights:
        """The weights after a training."""
        return weights(self.train(**given).model)

    def changes_weights(self, field: dict[str, Any], **shared: Any) -> bool:
        """Whether a run with these settings ends elsewhere than one without; each twice would end the same."""
        return not are_equal(self.weights(**shared, **field), self.weights(**shared))

    def warnings(self) -> str:
        """What was logged as a warning since the last call."""
        text = "\n".join(r.getMessage() for r in self.caplog.records if r.levelno >= logging.WARNING)
        self.caplog.clear()
        return text

    def as_process(self, *, rank: int, local_rank: int, size: int = 4, local_size: int = 2) -> None:
        """From here on the environment is that of one process among several."""
        names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size}
        for name, value in names.items():
            self.monkeypatch.setenv(name, str(value))

    def with_gpu(self) -> None:
        """From here on a GPU is found; nothing may be computed on it."""
        self.monkeypatch.setattr("trainwright.distributed.world._accelerator", lambda: ("cuda", 1))


@contextmanager
def untouched_globals() -> Iterator[None]:
    """Puts back what trainers set for the whole process: torch's switches and the package's log level."""
    logger = logging.getLogger("trainwright")
    level = logger.level
    cudnn = torch.backends.cudnn
    flags = (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.use_deterministic_algorithms(False)
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = flags
        torch.compiler.reset()
