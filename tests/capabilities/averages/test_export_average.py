"""`trainwright export --weights average`: for each kind of model, what is loaded from it is the average."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from trainwright.capabilities.averages.saved import read_average
from trainwright.cli.tasks.export import export_average
from trainwright.errors import CheckpointError

from ...cli.commands import call, done, small
from ...contract import doubles

SETTINGS = {"average": {"kind": "ema", "decay": 0.5}, "max_steps": 3, "save_strategy": "steps", "save_steps": 3}
LAST = "checkpoint-3"


def gpt2() -> Any:
    """Its output layer is its embedding."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2))


def vit() -> Any:
    """transformers writes it in other names than those of its parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))


def adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    return get_peft_model(gpt2(), lora)


def texts() -> list[dict[str, Any]]:
    rows = torch.randint(0, 32, (16, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def images() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": i % 2} for i in range(16)]


def loaded_adapter(folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(gpt2(), folder)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Path], Any]]] = {
    "tied": (gpt2, texts, AutoModelForCausalLM.from_pretrained),
    "bf16": (lambda: gpt2().bfloat16(), texts, AutoModelForCausalLM.from_pretrained),
    "renamed": (vit, images, AutoModelForImageClassification.from_pretrained),
    "adapter": (adapter, texts, loaded_adapter),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # which peft reads
@pytest.mark.parametrize("name", MODELS)
def test_the_exported_model_has_the_average(name: str, tmp_path: Path) -> None:
    make, data, load = MODELS[name]
    trainer = doubles.trainer(tmp_path / "run", settings=SETTINGS, model=make(), train_dataset=data())
    trainer.train()
    average = read_average(tmp_path / "run" / LAST)
    assert average.keys() == {key for key, value in trainer.model.named_parameters() if value.requires_grad}
    export_average(tmp_path / "run" / LAST, tmp_path / "model")
    found = dict(load(tmp_path / "model").named_parameters())
    for key, value in average.items():
        assert torch.equal(found[key], value.to(found[key].dtype)), key
    assert any(not torch.equal(found[key], trainer.model.get_parameter(key)) for key in average)


def test_a_plain_module_is_written_with_the_average(tmp_path: Path) -> None:
    doubles.trainer(tmp_path / "run", settings=SETTINGS).train()
    export_average(tmp_path / "run" / LAST, tmp_path / "model")
    average = read_average(tmp_path / "run" / LAST)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in average.items())
    doubles.model().load_state_dict(written)


@pytest.mark.costly
def test_the_command_takes_a_run_and_names_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done("train", str(small(tmp_path)), "--set", "training.average=lawa")
    shown = done("export", "run", "model", "--weights", "average")
    assert "From run/checkpoint-8: the newest checkpoint" in shown
    written = load_file(tmp_path / "model" / "model.safetensors")
    average = read_average(tmp_path / "run" / "checkpoint-8")
    assert all(torch.equal(written[name], value) for name, value in average.items())
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    assert "write trained or average" in call("export", "run", "m", "--weights", "best").output
    assert "export the average first" in call("export", "run", "m", "--weights", "average", "--merge").output


def test_a_checkpoint_without_an_average_is_refused(tmp_path: Path) -> None:
    doubles.trainer(tmp_path / "run", settings={**SETTINGS, "average": None}).train()
    with pytest.raises(CheckpointError, match=r"no averaged weights\. Train with average='ema'"):
        export_average(tmp_path / "run" / LAST, tmp_path / "model")
    assert not (tmp_path / "model").exists()
