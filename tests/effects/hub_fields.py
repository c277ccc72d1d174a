"""Checks of the fields that say what goes to the Hub, on one of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trainwright.config import rules

from ..hub.server import TOKEN, Gate, Hub, instead_of_the_real_one
from .bench import Bench
from .table import shows

SAVES = {"push_to_hub": True, "hub_token": TOKEN, "save_strategy": "steps", "save_steps": 2, "log_level": "warning"}


@contextmanager
def a_hub(bench: Bench) -> Iterator[Hub]:
    bench.monkeypatch.delenv("HF_TOKEN", raising=False)
    with (
        instead_of_the_real_one(bench.monkeypatch) as hub,
        pytest.warns(DeprecationWarning, match="content="),  # of the client, to itself
    ):
        yield hub


def pushed(bench: Bench, hub: Hub, **settings: Any) -> Any:
    """The trainer after a training whose uploads end before the next save."""
    trainer = bench.trainer(**{**SAVES, **settings})
    finish = trainer._finish_current_push
    trainer.callback_handler.callbacks.append(Waits(trainer))
    trainer.callback_handler.rebuild()
    trainer.train()
    finish()
    return trainer


class Waits:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.trainer.push_in_progress is not None:
            self.trainer.push_in_progress.wait_until_done()


@shows("push_to_hub")
def checkpoints_models_go_to_the_hub(bench: Bench) -> None:
    with a_hub(bench) as hub:
        bench.train(save_strategy="steps", save_steps=2)
        assert hub.requests == []
        pushed(bench, hub)
        assert hub.only().messages == [f"Training in progress, step {step}" for step in (2, 4, 6)]
        assert "model.safetensors" in hub.only().branches["main"]


@shows("hub_model_id")
def it_names_the_repository(bench: Bench) -> None:
    with a_hub(bench) as hub:
        assert pushed(bench, hub, hub_model_id="team/model").hub_model_id == "team/model"
        assert set(hub.repos) == {"team/model"}
        trainer = pushed(bench, hub)
        assert set(hub.repos) == {"team/model", trainer.hub_model_id}
        assert trainer.hub_model_id.startswith("me/run-")


@shows("hub_strategy")
def it_says_what_is_uploaded_when(bench: Bench) -> None:
    found = {}
    with a_hub(bench) as hub:
        for strategy in ("end", "every_save", "checkpoint", "all_checkpoints"):
            pushed(bench, hub, hub_model_id=f"me/{strategy}", hub_strategy=strategy)
            files = hub.repos[f"me/{strategy}"].branches["main"]
            found[strategy] = sorted({name.partition("/")[0] for name in files if "/" in name}), bool(files)
    every = [f"checkpoint-{step}" for step in (2, 4, 6)]
    assert found == {
        "end": ([], False),
        "every_save": ([], True),
        "checkpoint": (["last-checkpoint"], True),
        "all_checkpoints": (every, True),
    }


@shows("hub_token")
def it_opens_the_hub_and_is_written_nowhere(bench: Bench) -> None:
    with a_hub(bench) as hub:
        with pytest.raises(OSError, match="401"):
            bench.trainer(**{**SAVES, "hub_token": "hf_wrong"})
        trainer = pushed(bench, hub)
        assert hub.only().messages
    written = [str(trainer.args), repr(trainer.args), trainer.args.to_json_string()]
    assert not any(TOKEN in text for text in written)
    assert not any(TOKEN.encode() in path.read_bytes() for path in bench.folder.rglob("*") if path.is_file())


@shows("hub_private_repo")
def a_new_repository_is_private(bench: Bench) -> None:
    with a_hub(bench) as hub:
        pushed(bench, hub, hub_model_id="me/open")
        pushed(bench, hub, hub_model_id="me/closed", hub_private_repo=True)
        assert [hub.repos[name].private for name in ("me/open", "me/closed")] == [False, True]


@shows("hub_always_push")
def no_save_is_left_out_while_an_upload_is_slow(bench: Bench) -> None:
    messages = {}
    for always in (False, True):
        with a_hub(bench) as hub:
            hub.fault = gate = Gate()
            trainer = bench.trainer(**SAVES, hub_always_push=always)
            trainer.callback_handler.callbacks.append(Opens(gate))
            trainer.callback_handler.rebuild()
            trainer.train()
            messages[always] = hub.only().messages
    assert messages == {
        False: ["Training in progress, step 2", "Training in progress, step 6"],
        True: [f"Training in progress, step {step}" for step in (2, 4, 6)],
    }
    assert rules.advise(bench.args(hub_always_push=True)) == ["hub_always_push has no effect without push_to_hub."]


class Opens:
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.gate.is_open.set()


@shows("hub_revision")
def it_names_the_branch(bench: Bench) -> None:
    with a_hub(bench) as hub:
        pushed(bench, hub, hub_revision="try-2")
        assert {branch for branch, _ in hub.only().commits} == {"try-2"}
        assert hub.only().branches["main"] == {}
