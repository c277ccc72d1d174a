"""Activation checkpointing of plain modules: computed again in the backward pass, the same gradients, undone after."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import Trainer, TrainingArguments
from trainwright.errors import ArgumentError, ModelError
from trainwright.support.patches import checkpointed_activations

from .._support.small import make_trainer
from ..parity import data, models


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return torch.tanh(self.linear(x))


class Deep(nn.Module):
    def __init__(self, holder: type = nn.ModuleList) -> None:
        super().__init__()
        layers = [Layer() for _ in range(4)]
        self.layers = nn.ModuleList(layers) if holder is nn.ModuleList else nn.Sequential(*layers)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trained(folder: Path, holder: type, **settings: Any) -> Deep:
    torch.manual_seed(0)
    model = Deep(holder)
    items = [{"x": torch.full((4,), i / 8), "labels": i % 2} for i in range(16)]
    args = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=2, **settings)
    Trainer(model, args, train_dataset=items).train()
    return model


@pytest.mark.parametrize("holder", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize(
    ("options", "calls"), [(None, [4, 4, 4, 4]), ({"every_n_layers": 2}, [4, 2, 4, 2]), ({"offload": True}, [4] * 4)]
)
def test_layers_run_again_and_the_weights_are_the_same(
    options: dict[str, Any] | None, calls: list[int], holder: type, tmp_path: Path
) -> None:
    plain = trained(tmp_path, holder)
    again = trained(tmp_path, holder, activation_checkpointing=True, activation_checkpointing_kwargs=options)
    assert [layer.num_calls for layer in plain.layers] == [2, 2, 2, 2]
    assert [layer.num_calls for layer in again.layers] == calls
    for name, weight in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    assert all("forward" not in vars(layer) for layer in again.layers)


def test_a_module_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"activation_checkpointing=True.*Linear.*ModuleList"):
        checkpointed_activations(nn.Linear(2, 2), None).__enter__()


# -- attention is kept -------------------------------------------------------------------------------------------------


class Counts(TorchDispatchMode):
    """Counts the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[op.name()] += 1
        return op(*args, **(kwargs or {}))


class Attends(nn.Module):
    """A layer around attention, as a module of the user's own has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).unsqueeze(1)
        return x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends() for _ in range(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.mse_loss(x.mean((1, 2)), labels)}


def stack(folder: Path, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    items = [{"x": torch.full((5, 8), i / 8), "labels": float(i % 2)} for i in range(16)]
    return make_trainer(folder, model=Stack(), train_dataset=items, max_steps=2, **settings)


def llama(folder: Path, settings: dict[str, Any]) -> Any:
    return make_trainer(
        folder, model=models.seeded(models.llama), train_dataset=data.sequences(16), max_steps=2, **settings
    )


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
NUM_LAYERS = 2
NUM_STEPS = 2


@pytest.mark.parametrize("make", [stack, llama], ids=["module", "llama"])
def test_outputs_of_attention_are_kept_and_the_weights_are_the_same(make: Any, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "all again": {"activation_checkpointing": True},
        "kept": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"save": "attention"}},
    }
    found = {}
    for name, settings in ways.items():
        trainer = make(tmp_path / name, settings)
        with Counts() as counts:
            trainer.train()
        found[name] = (trainer.model.state_dict(), counts.found)
    assert {name: counts[ATTENTION] for name, (_, counts) in found.items()} == {
        "plain": NUM_STEPS * NUM_LAYERS,
        "all again": 2 * NUM_STEPS * NUM_LAYERS,
        "kept": NUM_STEPS * NUM_LAYERS,
    }
    products = {name: counts["aten::addmm"] + counts["aten::mm"] for name, (_, counts) in found.items()}
    assert products["kept"] == products["all again"] > products["plain"]
    for name, weight in found["plain"][0].items():
        assert torch.equal(found["kept"][0][name], weight)
        assert torch.equal(found["all again"][0][name], weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"save": "mlp"}, "only save='attention'"), ({"save": "attention", "context_fn": print}, "Remove one")],
)
def test_another_choice_of_what_is_kept_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        checkpointed_activations(Stack(), options).__enter__()
