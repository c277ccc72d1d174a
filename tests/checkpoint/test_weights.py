"""Weights there and back: whole, sharded, adapters, plain modules with weights under several names."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from trainwright.checkpoint.weights import load_weights, save_weights
from trainwright.errors import CheckpointError

from .._support.small import data, differing, make_trainer, models, weights


class Tied(nn.Module):
    """One matrix under two names, and a buffer that is a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight


class Shared(nn.Module):
    """A whole layer that occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer, nn.Linear(4, 4), layer])


class Transposed(nn.Module):
    """A weight that does not lie in memory in its own order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3).t())
        self.scalar = nn.Parameter(torch.tensor(2.0))


class Sliced(nn.Module):
    """Weights that are parts of something larger."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(12)
        self.weight = nn.Parameter(flat[:6].view(2, 3))
        self.bias = nn.Parameter(flat[6:8])
        self.register_buffer("strided", torch.arange(12.0)[::2])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.half = nn.Linear(3, 3).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)  # has a counter: an integer buffer
        self.register_buffer("flags", torch.tensor([True, False]))


PLAIN = [Tied, Shared, Transposed, Sliced, Mixed]


def other_values(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.copy_(torch.zeros_like(tensor))
    return twin


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_module_comes_back(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind()
    save_weights(model, tmp_path)
    twin = other_values(model)
    load_weights(twin, tmp_path)
    assert differing(weights(twin), weights(model)) == {}


@pytest.mark.parametrize("kind", [Transposed, Mixed])
def test_a_plain_module_comes_back_from_a_state_dict(kind: type[nn.Module], tmp_path: Path) -> None:
    """That the caller hands in, as overrides of `_save` do."""
    model = kind()
    save_weights(model, tmp_path, state_dict=model.state_dict())
    twin = other_values(model)
    load_weights(twin, tmp_path)
    assert differing(weights(twin), weights(model)) == {}


@pytest.mark.parametrize("kind", [Tied, Shared])
def test_what_is_shared_is_written_once_and_still_shared_after_loading(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind()
    save_weights(model, tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    twin = other_values(model)
    result = load_weights(twin, tmp_path)
    assert len(list(twin.parameters())) == len(list(model.parameters()))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


HF = [models.bert, models.llama, models.t5, models.gpt2]


@pytest.mark.parametrize("kind", HF)
@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"])
def test_a_model_of_transformers_comes_back_whole_or_in_shards(kind: Any, max_shard_size: str, tmp_path: Path) -> None:
    model = models.seeded(kind)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "4KB")
    twin = other_values(model)
    twin.tie_weights()
    load_weights(twin, tmp_path)
    assert differing(weights(twin), weights(model)) == {}


def test_from_pretrained_reads_what_a_trainer_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", model=models.bert(), train_dataset=data.texts(8), max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert differing(weights(model), weights(trainer.model)) == {}


def test_torch_weights_of_an_older_checkpoint(tmp_path: Path) -> None:
    model = models.seeded(models.bert)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    twin = other_values(model)
    load_weights(twin, tmp_path)
    assert differing(weights(twin), weights(model)) == {}


# peft asks a model of transformers by an attribute's older name
peft_asks = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

# -- adapters --------------------------------------------------------------------------------------------------------


def lora(seed: int = 0) -> Any:
    base = models.seeded(models.bert)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(base, config)


def stirred(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model


@peft_asks
def test_an_adapter_comes_back(tmp_path: Path) -> None:
    model = stirred(lora())
    save_weights(model, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    twin = lora(1)
    trainable = [name for name, p in twin.named_parameters() if p.requires_grad]
    load_weights(twin, tmp_path)
    assert differing(weights(twin), weights(model)) == {}
    assert [name for name, p in twin.named_parameters() if p.requires_grad] == trainable


@peft_asks
def test_several_adapters_come_back(tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["key"])

    def with_two(seed: int) -> Any:
        model = lora(seed)
        model.add_adapter("second", config)
        return model

    model = with_two(0)
    model.set_adapter("second")
    stirred(model)
    model.set_adapter("default")
    stirred(model)
    save_weights(model, tmp_path)
    twin = with_two(1)
    load_weights(twin, tmp_path)
    assert differing(weights(twin), weights(model)) == {}
    assert twin.active_adapters == model.active_adapters


@peft_asks
def test_training_an_adapter_resumes_exactly(tmp_path: Path) -> None:
    def trainer(folder: str) -> Any:
        return make_trainer(
            tmp_path / folder,
            model=lora(),
            train_dataset=data.texts(26),
            save_strategy="steps",
            save_steps=4,
            num_train_epochs=1,
        )

    through = trainer("through")
    through.train()
    second = trainer("second")
    second.train(resume_from_checkpoint=str(tmp_path / "through" / "checkpoint-4"))
    assert differing(weights(second.model), weights(through.model)) == {}


@peft_asks
def test_an_adapter_without_adapter_weights(tmp_path: Path) -> None:
    save_weights(models.seeded(models.bert), tmp_path)
    with pytest.raises(CheckpointError, match=r"no adapter weights \(adapter_model.safetensors\)"):
        load_weights(lora(), tmp_path)


# -- what does not fit -----------------------------------------------------------------------------------------------


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights: neither model.safetensors nor"):
        load_weights(models.ReturnsDict(), tmp_path)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    save_weights(nn.Linear(3, 2), tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)do not fit Linear.*weight"):
        load_weights(nn.Linear(4, 2), tmp_path)


def test_what_is_missing_or_too_much_is_returned(tmp_path: Path) -> None:
    save_weights(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), tmp_path)
    result = load_weights(nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)}), tmp_path)
    assert result.missing_keys == ["c.weight"]
    assert sorted(result.unexpected_keys) == ["b.bias", "b.weight"]


OUTSIDE = ["../secret.safetensors", "/etc/secret.safetensors", "sub/secret.safetensors", "..", "", 7]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_points_outside_is_refused(name: object, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    safetensors.torch.save_file({"weight": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    safetensors.torch.save_file({"weight": torch.ones(2, 2)}, folder / "sub" / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    model = nn.Linear(2, 2, bias=False)
    before = weights(model)
    with pytest.raises(CheckpointError, match="outside its directory"):
        load_weights(model, folder)
    assert differing(weights(model), before) == {}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_weights(nn.Linear(2, 2), tmp_path)


def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    index = {"weight_map": {"weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors"):
        load_weights(nn.Linear(2, 2), tmp_path)


def test_weights_that_are_cut_off(tmp_path: Path) -> None:
    save_weights(nn.Linear(3, 2), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_weights(nn.Linear(3, 2), tmp_path)


def test_a_model_that_is_written_in_older_names_is_read_back(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=4, patch_size=2
    )
    saved = ViTForImageClassification(config)
    other = ViTForImageClassification(config)
    save_weights(saved, tmp_path)
    result = load_weights(other, tmp_path)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in saved.state_dict().items())


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, save_async=False).train()
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "checkpoint-1").iterdir() if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o666 & ~umask)}
    assert "model.safetensors" in {path.name for path in files}
