"""fp8 by accelerate's recipe with torchao: it trains, saves under the usual names, and resumes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from trainwright import Trainer, TrainingArguments
from trainwright.errors import MissingPackageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 32, generator=generator)
    return [{"x": row, "labels": int(row[0] > 0)} for row in rows]


def trainer(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Trainer:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        disable_tqdm=True,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        logging_steps=4,
        save_steps=6,
        **settings,
    )
    return Trainer(Net(), args, train_dataset=samples())


@pytest.mark.filterwarnings("default")  # torchao warns when it is imported on a machine without its GPU kernels
def test_it_trains_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="the recipe's package: pip install torchao")
    whole = trainer(tmp_path, monkeypatch)
    whole.train()
    kinds = {type(module).__name__ for module in whole.model.modules()}
    assert "Float8Linear" in kinds
    losses = [log["loss"] for log in whole.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]
    saved = safetensors.torch.load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert saved.keys() == Net().state_dict().keys()
    again = trainer(tmp_path, monkeypatch)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name


def test_without_a_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(MissingPackageError, match="pip install torchao"):
        trainer(tmp_path, monkeypatch)
