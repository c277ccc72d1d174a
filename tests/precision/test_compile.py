"""A compiled model: few compilations over many shapes, none for evaluations, and checkpoints that do not know of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from trainwright import Trainer, TrainingArguments
from trainwright.support.patches import repeated_blocks

from .._support import two_processes
from .._support.small import differing, make_trainer, models, weights
from .._support.subprocesses import run_python

pytestmark = [
    pytest.mark.costly,  # compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # of torch, tracing a block
]
NUM_SAMPLES = 50  # batches of 4: the last one of 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids).mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def ragged() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 40, (NUM_SAMPLES,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(0, 11, (n,), generator=generator), "labels": i % 2} for i, n in enumerate(lengths)
    ]


def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return {"input_ids": ids, "labels": torch.tensor([item["labels"] for item in items])}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each graph that is compiled."""
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    from torch._dynamo.backends.registry import register_backend

    torch._dynamo.reset()
    if "trainwright_counting" not in torch._dynamo.list_backends(exclude_tags=()):
        register_backend(lambda graph, inputs: _COUNT[0](graph, inputs), name="trainwright_counting")
    _COUNT[:] = [count]
    yield graphs
    torch._dynamo.reset()


_COUNT: list[Any] = []


def trained(folder: Path, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        disable_tqdm=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=20,
        learning_rate=1e-2,
        **settings,
    )
    trainer = Trainer(Words(), args, data_collator=pad, train_dataset=ragged(), eval_dataset=ragged()[:10])
    trainer.train()
    return trainer


def test_ragged_batches_compile_a_bounded_number_of_times(compilations: list[int], tmp_path: Path) -> None:
    trained(tmp_path, torch_compile_backend="trainwright_counting")
    assert 1 <= len(compilations) <= 4


def test_checkpoints_and_weights_are_those_without_it(compilations: list[int], tmp_path: Path) -> None:
    compiled = trained(tmp_path / "compiled", torch_compile_backend="trainwright_counting")
    plain = trained(tmp_path / "plain")
    names = safetensors.torch.load_file(tmp_path / "compiled" / "checkpoint-20" / "model.safetensors").keys()
    assert names == plain.model.state_dict().keys()
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], weight)
    assert compiled.model_wrapped is not compiled.model


def test_evaluations_compile_nothing(compilations: list[int], tmp_path: Path) -> None:
    trainer = trained(tmp_path, torch_compile_backend="trainwright_counting")
    before = len(compilations)
    trainer.evaluate()
    trainer.predict(ragged())
    assert len(compilations) == before


# -- torch_compile="regional" ------------------------------------------------------------------------------------------


def regional(folder: Path, build: Any = models.llama, **settings: Any) -> Trainer:
    return make_trainer(
        folder,
        model=models.seeded(build),
        train_dataset=sequences(10),
        eval_dataset=sequences(3),
        data_collator=padded,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        optim="sgd",
        **settings,
    )


def sequences(count: int) -> list[dict[str, Any]]:
    """Of another length each, so that every batch has padding."""
    return [{"input_ids": torch.arange(1, 4 + i) % 60} for i in range(count)]


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


REGIONAL = {"torch_compile": "regional", "torch_compile_backend": "trainwright_counting"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"activation_checkpointing": True, "loss_kernel": "chunked"}, marks=pytest.mark.slow),
    ],  # compiles
    ids=["plain", "checkpointing, kernel"],
)
def test_blocks_are_compiled_once_and_learn_the_same(
    settings: dict[str, Any], compilations: list[int], tmp_path: Path
) -> None:
    rest = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2, **settings}
    ours = regional(tmp_path / "ours", **rest, **REGIONAL)
    ours.train()
    assert len(compilations) == 2, "one graph for the first length, one for the others; evaluations have none"
    plain = regional(tmp_path / "plain", **rest)
    plain.train()
    assert not differing(weights(ours.model), weights(plain.model))
    assert [one for one in ours.state.log_history if "eval_loss" in one][-1]["eval_loss"] == pytest.approx(
        [one for one in plain.state.log_history if "eval_loss" in one][-1]["eval_loss"]
    )
    assert ours.model_wrapped is ours.model
    assert not any("forward" in vars(module) for module in ours.model.modules()), "afterwards all is as it was"
    names = safetensors.torch.load_file(tmp_path / "ours" / "checkpoint-4" / "model.safetensors").keys()
    assert names == safetensors.torch.load_file(tmp_path / "plain" / "checkpoint-4" / "model.safetensors").keys()


@pytest.mark.slow  # compiles twice
def test_a_resume_compiles_its_blocks_again(compilations: list[int], tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, **REGIONAL}
    whole = regional(tmp_path, **settings)
    whole.train()
    resumed = regional(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert not differing(weights(resumed.model), weights(whole.model))


class Tower(nn.Module):
    """Two blocks of one class that no list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 4)
        self.first, self.second = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.second(self.first(self.embed(input_ids))).square().mean()}


def test_blocks_are_found() -> None:
    towers = Tower()
    assert repeated_blocks(towers) == [towers.first, towers.second]
    llama = models.llama()
    assert repeated_blocks(llama) == list(llama.model.layers)
    assert repeated_blocks(Words()) == []


def test_a_model_without_blocks_is_compiled_whole(
    compilations: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, **REGIONAL)
    assert 1 <= len(compilations) <= 3  # the last batch is shorter
    assert "Words has no repeated blocks" in caplog.text


RANKS = """
import sys
import torch
from tests._support.small import models, make_trainer, weights
from tests.precision.test_compile import padded, sequences

found = []
for name, settings in {"plain": {}, "ours": {"torch_compile": "regional", "torch_compile_backend": "eager"}}.items():
    trainer = make_trainer(
        sys.argv[1] + "/" + name, model=models.seeded(models.llama), train_dataset=sequences(8), data_collator=padded,
        max_steps=2, per_device_train_batch_size=2, optim="sgd", activation_checkpointing=True, **settings,
    )
    trainer.train()
    found.append(weights(trainer.model))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
for name, one in found[0].items():
    torch.testing.assert_close(found[1][name], one, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.slow  # two processes that compile
@pytest.mark.process
def test_ranks_compile_blocks_inside_of_ddp(tmp_path: Path) -> None:
    two_processes.run(RANKS, str(tmp_path), folder=tmp_path)


@pytest.mark.slow  # inductor, twice: a minute
@pytest.mark.process
def test_inductor_compiles_two_graphs_for_twelve_layers(tmp_path: Path) -> None:
    run_python("-c", INDUCTOR, str(tmp_path))


INDUCTOR = """
import sys, torch
from transformers import LlamaForCausalLM
from tests._support.small import models, make_trainer
from tests.precision.test_compile import padded, sequences
from torch._dynamo.utils import counters
def build():
    config = models.llama().config
    config.num_hidden_layers = 12
    return LlamaForCausalLM(config)
def train(name, **settings):
    trainer = make_trainer(f"{sys.argv[1]}/{name}", model=models.seeded(build),
                           train_dataset=sequences(10), data_collator=padded, max_steps=4,
                           per_device_train_batch_size=4, logging_steps=1, **settings)
    trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]
ours = train("ours", torch_compile="regional")
assert counters["stats"]["unique_graphs"] == 2, counters["stats"]
assert all(abs(a - b) < 1e-4 for a, b in zip(ours, train("plain"), strict=True))
"""
