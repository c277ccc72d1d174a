"""Small real things for the contract: a module, its data, a trainer on the CPU that writes nothing unless told to."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright

FEATURES = 6


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.GELU())
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x)).squeeze(-1)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class CountsItems(Regressor):
    """As a model of transformers: it is handed the number of items in the window and divides by it."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels)
        if labels is not None and num_items_in_batch is not None:
            total = nn.functional.mse_loss(outputs["logits"], labels, reduction="sum")
            outputs["loss"] = total / num_items_in_batch
        return outputs


def model(kind: type[nn.Module] = Regressor) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def samples(size: int = 32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(size)
    return [{"x": torch.randn(FEATURES, generator=generator), "labels": i / size} for i in range(size)]


def arguments(output_dir: Path | str, **settings: Any) -> Any:
    always = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 0.01,
    }
    return trainwright.TrainingArguments(output_dir=str(output_dir), **(always | settings))


def trainer(output_dir: Path | str, cls: Any = None, *, settings: dict[str, Any] | None = None, **parts: Any) -> Any:
    if "model_init" not in parts:
        parts.setdefault("model", model())
    parts.setdefault("train_dataset", samples())
    return (cls or trainwright.Trainer)(args=arguments(output_dir, **settings or {}), **parts)


def weights(of: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in of.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
