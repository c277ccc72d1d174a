"""Activation checkpointing of plain modules: computed again in the backward pass, the same gradients, undone after."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Trainer, TrainingArguments
from trainwright.errors import ModelError
from trainwright.support.patches import checkpointed_activations


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
