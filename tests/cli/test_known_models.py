"""`init chat --like NAME`: each file trains a tiny model of that family, and its figures are those of the planner."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tools import plan_recipes
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.cli.recipe.known_models import CARDS_GB, CONTEXT_GB, read_known_models
from trainwright.cli.recipe.schema import LearnPart
from trainwright.cli.tasks.models import learn

from .commands import ROOT, call, done

NAMES = list(read_known_models())
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
TEMPLATE = ROOT / "src/trainwright/cli/tasks/chat_templates/chatml.jinja"

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def write_tiny_model(name: str, folder: Path) -> None:
    """A model of the family with a few thousand weights, and a tokenizer with a chat template."""
    rows = [f"user say {number} assistant {number} it is" for number in range(40)]
    tokenizer = learn(rows, LearnPart(kind="bpe", vocab_size=300))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    shape: dict[str, Any] = plan_recipes.SHAPES[name] | TINY | {"vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(
        shape.pop("model_type"), max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id, **shape
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_conversations(path: Path) -> None:
    with path.open("w") as file:
        for number in range(40):
            turns = [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number} it is"},
            ]
            print(json.dumps({"messages": turns}), file=file)


@pytest.mark.costly
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model_of_each_family_is_trained_from_the_file(name: str, tmp_path: Path) -> None:
    done("init", "chat", "--like", name, "chat.yaml")
    write_tiny_model(name, tmp_path / "tiny")
    write_conversations(tmp_path / "conversations.jsonl")
    written = done(
        "train",
        "chat.yaml",
        "--set",
        "model.path=tiny",
        "--set",
        "training.max_steps=2",
        "--set",
        "training.use_cpu=true",
    )
    assert "parameters, from tiny\n" in written
    assert f"written   runs/{name} (model, results" in written
    assert "MLP (" in written
    run = tmp_path / "runs" / name
    weights = load_file(run / "adapter_model.safetensors")
    assert {part for key in weights for part in key.split(".") if part.endswith("_proj")} == TARGETS
    assert any(value.abs().sum() > 0 for key, value in weights.items() if "lora_B" in key)
    assert json.loads(done("chat", str(run), "--once", "say 7", "--json"))["answer"] is not None


@pytest.mark.parametrize("name", NAMES)
def test_the_file_says_what_fits(name: str, tmp_path: Path) -> None:
    done("init", "chat", "--like", name.upper(), "chat.yaml")
    text = (tmp_path / "chat.yaml").read_text()
    recipe = yaml.safe_load(text)
    model = read_known_models()[name]
    rows = recipe["training"]["per_device_train_batch_size"]
    assert rows * recipe["training"]["gradient_accumulation_steps"] == 16
    assert model.memory_gb[str(rows)] + CONTEXT_GB <= CARDS_GB[0], "the file's batch fits 24 GB"
    assert recipe["model"]["path"] == model.path
    figures = re.search(r"# +GB ((?: +[\d.]+)+)\n", text)
    assert figures is not None
    assert list(map(float, figures[1].split())) == list(model.memory_gb.values())
    assert ("tokens a second" in text) == (model.speed is not None)
    assert max(map(len, text.splitlines())) <= 118


@pytest.mark.parametrize("name", NAMES)
def test_the_name_on_the_hub_is_taken_too(name: str, tmp_path: Path) -> None:
    done("init", "chat", "--like", name, "one.yaml")
    done("init", "chat", "--like", read_known_models()[name].path, "other.yaml")
    assert (tmp_path / "one.yaml").read_text() == (tmp_path / "other.yaml").read_text()


def test_a_name_on_the_hub_that_is_almost_known_is_meant(tmp_path: Path) -> None:
    result = call("init", "chat", "--like", "Qwen/Qwen3-4BB")
    assert result.exit_code == 2
    assert "Did you mean qwen3-4b?" in result.output
    assert all(name in result.output for name in NAMES)


def test_an_unknown_model_lists_those_that_are_known(tmp_path: Path) -> None:
    result = call("init", "chat", "--like", "qwen3-4bb")
    assert result.exit_code == 2
    assert "Did you mean qwen3-4b?" in result.output
    assert all(name in result.output for name in NAMES)
    assert not (tmp_path / "config.yaml").exists()


def test_another_task_is_named(tmp_path: Path) -> None:
    result = call("init", "regression", "--like", "qwen3-4b")
    assert result.exit_code == 2
    assert "trainwright init chat --like qwen3-4b" in " ".join(result.output.split())
    assert not (tmp_path / "config.yaml").exists()


def test_models_and_shapes_have_the_same_names() -> None:
    assert set(plan_recipes.SHAPES) == set(NAMES)
    for name, model in read_known_models().items():
        assert model.speed == plan_recipes.read_speed(name)


@pytest.mark.more  # goes through two steps of 16 layers without computing them
def test_a_figure_is_what_the_planner_says() -> None:
    known = read_known_models()["llama-3.2-1b"]
    model = plan_recipes.make_model("llama-3.2-1b")
    assert plan_recipes.plan_gb("llama-3.2-1b", model, 1) == pytest.approx(known.memory_gb["1"], rel=0.01)
    assert plan_recipes.saved_by_4bit_gb(model) == known.saved_by_4bit_gb


@pytest.mark.slow  # plans 15 steps of models of up to 8B parameters
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_all_figures_are_what_the_planner_says(name: str) -> None:
    known = read_known_models()[name]
    planned = plan_recipes.plan_recipe(name)
    assert planned["memory_gb"] == pytest.approx(dict(known.memory_gb), rel=0.01)
    assert planned["saved_by_4bit_gb"] == known.saved_by_4bit_gb
