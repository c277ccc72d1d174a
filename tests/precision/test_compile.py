"""A compiled model: few compilations over many shapes, none for evaluations, and checkpoints that do not know of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from trainwright import Trainer, TrainingArguments

pytestmark = pytest.mark.costly  # compiles
NUM_SAMPLES = 50  # batches of 4: the last one of 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 2)

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
        str(folder), use_cpu=True, disable_tqdm=True, num_train_epochs=2, per_device_train_batch_size=4,
        eval_strategy="steps", eval_steps=5, save_steps=20, learning_rate=1e-2, **settings,
    )  # fmt: skip
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
