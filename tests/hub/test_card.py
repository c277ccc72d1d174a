"""The model card: what it says, that its metadata are valid, and that nobody's words are written over."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from trainwright.hub.model_card import CARD_NAME, CURVE_NAME, CardContent, is_untouched, list_losses, write_card
from trainwright.journal.record import read_logs

from .._support.small import data, make_trainer, trained_trainer
from .server import TOKEN, Hub, Repo


def trained_and_evaluated(folder: Path) -> Any:
    return trained_trainer(
        folder,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=data.vectors(4),
        save_strategy="no",
        hub_token="hf_secret",
    )


def test_card_tells_settings_results_and_versions_and_its_metadata_are_read_back(tmp_path: Path) -> None:
    trainer = trained_and_evaluated(tmp_path / "my-model")
    trainer.create_model_card(
        language="en",
        license="apache-2.0",
        tags="tiny",
        tasks="text-classification",
        dataset="Glue",
        dataset_tags="glue",
        dataset_args="mrpc",
        finetuned_from="google-bert/bert-base-cased",
    )
    card = ModelCard.load(tmp_path / "my-model" / CARD_NAME)
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "google-bert/bert-base-cased"
    assert card.data.datasets == ["glue"]
    assert set(card.data.tags) == {"generated_from_trainer", "trainwright", "tiny"}
    loss = trainer.state.log_history[-2]["eval_loss"]
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_name, result.metric_type) == ("text-classification", "Glue", "loss")
    assert result.metric_value == pytest.approx(loss)
    for said in ("# my-model", "learning_rate: 0.01", "| step |", "torch: 2", f"{loss:.4g}"):
        assert said in card.content
    assert "hf_secret" not in card.content


def test_a_card_has_the_evaluations_of_a_history_that_is_cut(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": data.vectors(4)}
    trainer = trained_trainer(tmp_path / "cut", log_history_limit=1, journal=True, **settings)
    (last,) = trainer.state.log_history
    assert "train_loss" in last
    trainer.create_model_card()
    loss = read_logs(tmp_path / "cut")[-1]["eval_loss"]
    card = ModelCard.load(tmp_path / "cut" / CARD_NAME).content
    assert f"- loss: {loss:.4g}" in card
    assert re.search(r"^\| 2 \| .*\n\| 4 \| ", card, re.MULTILINE)
    assert "| 4 | " in card


def test_a_card_names_the_license_of_the_base_model(tmp_path: Path, hub: Hub) -> None:
    hub.repos["org/base"] = Repo(tags=["pytorch", "license:mit"])
    trainer = make_trainer(tmp_path / "run", max_steps=1, hub_token=TOKEN)

    def license_on_the_card(**given: str) -> str | None:
        trainer.create_model_card(**given)
        found: str | None = ModelCard.load(tmp_path / "run" / CARD_NAME).data.license
        return found

    assert license_on_the_card(finetuned_from="org/base") == "mit"
    assert license_on_the_card(finetuned_from="org/base", license="apache-2.0") == "apache-2.0"
    assert license_on_the_card(finetuned_from="org/unknown") is None
    assert license_on_the_card() is None


def test_a_card_shows_the_losses_where_there_is_something_to_draw_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained_and_evaluated(tmp_path / "run")
    trainer.create_model_card()
    picture = tmp_path / "run" / CURVE_NAME
    assert f"]({CURVE_NAME})" in (tmp_path / "run" / CARD_NAME).read_text()
    with Image.open(picture) as image:
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 50  # lines, letters, a grid
    picture.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer.create_model_card()
    assert not picture.exists()
    assert CURVE_NAME not in (tmp_path / "run" / CARD_NAME).read_text()


def test_the_losses_of_each_evaluation_set_are_curves() -> None:
    history = [{"loss": 2.0, "step": 1}, {"eval_a_loss": 1.5, "step": 2}, {"loss": 1.0, "eval_loss": "nan", "step": 2}]
    assert list_losses(history) == {"training": [(1, 2.0), (2, 1.0)], "eval_a_loss": [(2, 1.5)]}


def test_without_words_of_the_user_there_is_a_card_too(tmp_path: Path) -> None:
    make_trainer(tmp_path / "fresh").create_model_card()
    card = ModelCard.load(tmp_path / "fresh" / CARD_NAME)
    assert card.data.eval_results is None
    assert "a fresh model" in card.content


def test_an_untouched_card_is_renewed_and_an_edited_one_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / CARD_NAME
    assert write_card(tmp_path, CardContent(model_name="one"))
    assert is_untouched(path.read_text())
    assert write_card(tmp_path, CardContent(model_name="two"))
    assert "# two" in path.read_text()
    path.write_text(path.read_text().replace("Not described yet.", "For cats only."))
    assert not write_card(tmp_path, CardContent(model_name="three"))
    assert "For cats only." in path.read_text()
    assert "# two" in path.read_text()
    assert "was written or edited by hand" in caplog.text


def test_a_card_by_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / CARD_NAME).write_text("mine")
    assert not write_card(tmp_path, CardContent(model_name="one"))
    assert (tmp_path / CARD_NAME).read_text() == "mine"


def test_another_process_than_the_first_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path / "run")
    monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
    trainer.create_model_card()
    assert not (tmp_path / "run" / CARD_NAME).exists()
