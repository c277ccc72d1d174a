"""Two processes that hold a model in parts, against one that holds it whole: numbers, and each other's checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from trainwright.errors import CheckpointError

from .._support.small import StopAt
from .._support.two_processes import Done, run
from ..parity import models
from .cases import library, outcome, trainer_of
from .shards import CASES, FORMS, SAVED, adapter, roberta, tied_model, tied_trainer

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def done(folder: Path) -> Done:
    one = trainer_of(SAVED, folder / "by_one", 1, save_strategy="steps", save_steps=2)
    one.add_callback(StopAt(2))
    one.train()
    return run(Path(__file__).with_name("sharded.py"), str(folder), folder=folder, timeout_s=200)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    windows = {window for window, _ in CASES.values()}
    return {name: outcome(trainer_of(name, tmp_path_factory.mktemp("alone"), 1)) for name in windows}


def assert_same(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["step"] == other["step"]
    losses, others = ([entry["loss"] for entry in one["log"] if "loss" in entry] for one in (mine, other))
    assert losses == pytest.approx(others, rel=1e-5)
    assert mine["weights"].keys() == other["weights"].keys()
    for name, values in mine["weights"].items():
        assert values == pytest.approx(other["weights"][name], rel=1e-5, abs=2e-7)


@pytest.mark.parametrize("case", CASES)
def test_parts_train_as_the_whole_does(case: str, done: Done, alone: dict[str, dict[str, Any]]) -> None:
    """Accumulated windows, uneven tails, the norm by which gradients are clipped, logged losses, weights."""
    other = alone[CASES[case][0]]
    for told in done.told:
        assert_same(told[case], other)
        for mine, theirs in zip(told[case]["log"], other["log"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_each_process_holds_a_part(done: Done) -> None:
    sizes = [told["size"] for told in done.told]
    assert sum(sizes) == 3 * 4 + 4
    assert max(sizes) < 3 * 4 + 4


def test_evaluations_are_those_of_one_process(done: Done, tmp_path: Path) -> None:
    trainer = trainer_of(CASES["full_shard"][0], tmp_path, 1)
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    for told in done.told:
        assert told["judged"]["loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
        torch.testing.assert_close(
            torch.tensor(told["judged"]["predictions"]), torch.tensor(predicted.predictions), rtol=1e-4, atol=1e-5
        )


def test_hooks_for_libraries(done: Done, tmp_path: Path) -> None:
    """Loops of one's own, prepared windows, items of checkpoints, recorded numbers, and a loss that says its items."""
    alone = library(tmp_path, 1)
    for rank, told in enumerate(done.told):
        assert told["library"]["same"] == [True] * 5
        assert told["library"]["counts"] == [[rank, 4]] * 5
    assert_same(done.told[0]["library"], alone)
    for mine, theirs in zip(done.told[0]["library"]["log"], alone["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["itself", "by_one"])
def test_a_checkpoint_goes_on_where_it_was(
    form: str, source: str, done: Done, alone: dict[str, dict[str, Any]]
) -> None:
    """Written by the two, or by one process with a whole model."""
    for told in done.told:
        assert_same(told[f"{form}: from {form if source == 'itself' else source}"], alone[SAVED])


@pytest.mark.parametrize("form", FORMS)
def test_one_process_goes_on_from_it(
    form: str, done: Done, folder: Path, alone: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    again = trainer_of(SAVED, tmp_path, 1)
    assert_same(outcome(again, resume_from_checkpoint=str(folder / form / "checkpoint-2")), alone[SAVED])


def test_whole_models_go_on_from_parts(done: Done, alone: dict[str, dict[str, Any]]) -> None:
    for told in done.told:
        assert_same(told["whole_from_parts"], alone[SAVED])


def test_what_a_checkpoint_holds(done: Done) -> None:
    common = {
        "manifest.json",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
        "training_args.json",
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    whole, parts = (set(done.told[0][f"{form}: saved"]) for form in FORMS)
    assert whole == common | {"model.safetensors", "optimizer.pt"}
    assert parts == common | {"pytorch_model_fsdp_0", "optimizer_0"}


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_missing_part_of_one_process_is_named(has_manifest: bool, done: Done, folder: Path, tmp_path: Path) -> None:
    """Before step 1; also where another trainer wrote the checkpoint, without a list of its files."""
    damaged = tmp_path / "checkpoint-2"
    shutil.copytree(folder / "SHARDED_STATE_DICT/checkpoint-2", damaged)
    (part,) = (damaged / "pytorch_model_fsdp_0").glob("__1_*.distcp")
    part.unlink()
    if not has_manifest:
        for ours in ("manifest.json", "training_args.json"):
            (damaged / ours).unlink()
    trainer = trainer_of(SAVED, tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match=part.name):
        trainer.train(resume_from_checkpoint=str(damaged))
    assert trainer.state.global_step == 0


def test_the_best_is_loaded_back_into_the_parts(done: Done) -> None:
    for told in done.told:
        _, loaded, seen = told["best"]
        assert loaded == pytest.approx(max(seen[:2]), rel=1e-5)
        assert seen[0] > seen[1]


# -- models of libraries ---------------------------------------------------------------------------------------------


def test_heads_are_sharded_by_the_layers_that_their_model_names(done: Done, tmp_path: Path) -> None:
    """Also where the head shares the weight and the bias of its output embeddings, and by size."""
    assert "FSDPBertLayer" in done.told[0]["units of a head"]
    assert {"FSDPBertEncoder", "FSDPLinear"} <= {*done.told[0]["units of a head, by size"]}
    assert "FSDPBertLayer" not in done.told[0]["units of a head, by size"]
    assert done.told[0]["units whole"] == []
    trainer = tied_trainer(roberta(), tmp_path, processes=1)
    trainer.train()
    assert done.told[0]["roberta"] == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5)


def test_the_final_model_is_read_by_from_pretrained(done: Done, folder: Path, tmp_path: Path) -> None:
    """Tied weights, layers wrapped each for itself, checkpoints in parts: in the end one file with whole weights."""
    trainer = tied_trainer(tied_model(), tmp_path, processes=1)
    trainer.train()
    assert done.told[0]["tied"] == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5)
    assert done.told[0]["kinds"] == ["FSDPGPT2Block"]
    model, info = transformers.GPT2LMHeadModel.from_pretrained(folder / "tied", output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.architectures == ["GPT2LMHeadModel"]
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks it of transformers
def test_an_adapter_in_parts(done: Done, folder: Path, tmp_path: Path) -> None:
    trainer = tied_trainer(adapter(), tmp_path, processes=1)
    trainer.train()
    assert done.told[0]["adapter"] == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5)
    read = peft.PeftModel.from_pretrained(models.seeded(lambda: models.gpt2(0.0)), folder / "adapter")
    ours = {name: value for name, value in trainer.model.state_dict().items() if "lora" in name}
    assert ours
    for name, value in ours.items():
        torch.testing.assert_close(read.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_a_layer_that_is_not_there_is_named_with_its_neighbours(done: Done) -> None:
    for told in done.told:
        assert "ModelError" in told["refused class"]
        assert "'GPT2Blok'" in told["refused class"]
        assert "GPT2Block" in told["refused class"].split("Nearest:")[1]


def test_the_older_version_is_refused_on_the_cpu(done: Done) -> None:
    for told in done.told:
        assert "version 1 needs GPUs" in told["refused older"]
