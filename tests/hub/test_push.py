"""Uploads to a Hub on this machine: what arrives, when, under which words, and that nothing of it is lost."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

from trainwright import TrainerCallback
from trainwright.cli.tasks.recipe_run import upload
from trainwright.errors import TrainwrightError
from trainwright.hub.access import dataset_problem, model_problem
from trainwright.hub.model_card import CURVE_NAME
from trainwright.hub.outbox import OUTBOX_NAME, Outbox, Ticket, root_files
from trainwright.journal.record import read

from .._support.small import OURS, REFERENCE, Side, StopAt, data, make_trainer, models, module, train, weights
from .server import DROP, TOKEN, Fault, Gate, Hub, commits

SETTINGS: dict[str, Any] = {
    "push_to_hub": True,
    "hub_token": TOKEN,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "hub_model_id": "me/model",
    "log_level": "warning",
}
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client, to itself
MODEL = {"model.safetensors", "training_args.bin"}


def pushing(folder: Path, **settings: Any) -> Any:
    return make_trainer(folder, **{**SETTINGS, **settings})


class Beside(TrainerCallback):
    """Calls what it is given after steps."""

    def __init__(self, *, end: Any = lambda: None, **at: Any) -> None:
        self.end = end
        self.at = {int(name.removeprefix("step_")): work for name, work in at.items()}
        self.pushes: list[int] = []

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pushes.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at.get(state.global_step, lambda: None)()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()


def whole(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def below(files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    return {name.removeprefix(f"{folder}/"): value for name, value in files.items() if name.startswith(f"{folder}/")}


def at_its_pace(trainer: Any) -> Any:
    """Each upload is over before the next save."""
    trainer.add_callback(
        Beside(
            **{
                f"step_{step}": lambda: trainer.push_in_progress is None or trainer.push_in_progress.wait_until_done()
                for step in range(1, 9)
            }
        )
    )
    return trainer


EXPECTED: dict[str, tuple[list[str], set[str]]] = {
    "every_save": (["Training in progress, step 2", "Training in progress, step 4"], set()),
    "checkpoint": (
        [
            "Training in progress, step 2",
            "Training in progress, step 2, checkpoint",
            "Training in progress, step 4",
            "Training in progress, step 4, checkpoint",
        ],
        {"last-checkpoint"},
    ),
    "all_checkpoints": (
        [
            "Training in progress, step 2",
            "Training in progress, step 2, checkpoint",
            "Training in progress, step 4",
            "Training in progress, step 4, checkpoint",
        ],
        {"checkpoint-2", "checkpoint-4"},
    ),
    "end": ([], set()),
}


@pytest.mark.parametrize("strategy", EXPECTED)
def test_each_strategy_uploads_what_it_says(strategy: str, hub: Hub, tmp_path: Path) -> None:
    trainer = at_its_pace(pushing(tmp_path / "run", hub_strategy=strategy))
    train(trainer)
    messages, folders = EXPECTED[strategy]
    assert hub.only().messages == messages
    files = hub.only().branches["main"]
    assert {name.partition("/")[0] for name in files if "/" in name} == folders
    if messages:
        assert set(files) >= MODEL
        last = tmp_path / "run" / "checkpoint-4"
        assert files["model.safetensors"] == (last / "model.safetensors").read_bytes()
        assert (tmp_path / "run" / "model.safetensors").read_bytes() == files["model.safetensors"]
        assert not {name for name in files if name.startswith(("journal", "_", "."))}
    for folder in folders:
        local = whole(tmp_path / "run" / folder.replace("last-checkpoint", "checkpoint-4"))
        assert below(files, folder) == local
    assert not (tmp_path / "run" / OUTBOX_NAME).exists()


def test_a_copy_of_a_trainer_uploads_too(hub: Hub, tmp_path: Path) -> None:
    copied = copy.deepcopy(pushing(tmp_path / "run"))
    train(at_its_pace(copied))
    assert hub.only().messages == EXPECTED["every_save"][0]
    copy.deepcopy(copied).push_to_hub(commit_message="by a copy")
    assert hub.only().messages[-1] == "by a copy"


@pytest.mark.framework
@pytest.mark.parametrize("strategy", EXPECTED)
@pytest.mark.parametrize("save_strategy", ["steps", "epoch"])
def test_what_arrives_is_what_transformers_uploads(strategy: str, save_strategy: str, hub: Hub, tmp_path: Path) -> None:
    """Commits, their words, and the files of each; ours add the files that ours checkpoints have."""
    found: dict[str, Any] = {}
    for side in (OURS, REFERENCE):
        found[side.name] = _arrived(side, hub, tmp_path / side.name / "model", strategy, save_strategy)
    ours = found[OURS.name]
    theirs = found[REFERENCE.name]
    assert ours["messages"] == theirs["messages"]
    assert ours["answer"] == theirs["answer"].replace(f"me/{REFERENCE.name}", f"me/{OURS.name}")
    for mine, reference in zip(ours["added"], theirs["added"], strict=True):
        extra = {Path(name).name for name in mine - reference}
        assert extra <= {"manifest.json", "training_args.json", CURVE_NAME}
        assert reference - mine <= {"training_args.bin"}  # theirs is written again, with the time, and so differs


@pytest.mark.framework
def test_a_push_ends_in_upload_folder_where_libraries_wrap_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls on both sides; during a training ours come from a copy beside the checkpoints."""
    calls: dict[str, list[Any]] = {}
    original = huggingface_hub.HfApi.upload_folder
    for side in (OURS, REFERENCE):
        made = calls[side.name] = []

        def wrapped(api: Any, *args: Any, made: list[Any] = made, **given: Any) -> Any:
            names = ("commit_message", "path_in_repo", "revision", "token")
            ignored = {"_*", "checkpoint-*"} <= set(given.get("ignore_patterns") or ())
            made.append([given.get(name) for name in names] + [ignored or "Training" in given["commit_message"]])
            return original(api, *args, **given)

        monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", wrapped)
        trainer = make_trainer(
            tmp_path / side.name,
            side,
            **{**SETTINGS, "hub_model_id": f"me/{side.name}"},
            model=models.seeded(models.bert),
            train_dataset=data.texts(8),
            report_to="none",
            hub_strategy="all_checkpoints",
        )
        side.train(at_its_pace(trainer))
        trainer.push_to_hub(token=TOKEN)
    # The two uploads of a save go at the same time on one side.
    assert sorted(calls["trainwright"], key=str) == sorted(calls["transformers"], key=str)
    assert calls["trainwright"][-1] == ["End of training", None, None, TOKEN, True]


def _arrived(side: Side, hub: Hub, folder: Path, strategy: str, save_strategy: str) -> dict[str, Any]:
    settings = {
        **SETTINGS,
        "hub_strategy": strategy,
        "save_strategy": save_strategy,
        "hub_model_id": f"me/{side.name}",
        "per_device_train_batch_size": 13,
        "report_to": "none",
    }
    settings["save_steps" if save_strategy == "epoch" else "num_train_epochs"] = 2
    trainer = make_trainer(folder, side, model=models.seeded(models.bert), train_dataset=data.texts(26), **settings)
    trainer = at_its_pace(trainer)
    side.train(trainer)
    answer = trainer.push_to_hub(tags="tiny", dataset_tags="glue")
    repo = hub.repos[f"me/{side.name}"]
    return {"messages": repo.messages, "added": repo.added, "answer": answer.repo_url.repo_id}


def test_what_is_saved_while_upload_is_under_way_waits_for_the_end(hub: Hub, tmp_path: Path) -> None:
    hub.fault = gate = Gate()
    seen = Beside(end=gate.is_open.set)
    train(pushing(tmp_path / "run", max_steps=8, callbacks=[seen], hub_strategy="checkpoint", save_async=False))
    assert seen.pushes == [2]
    last = [message for message in hub.only().messages if "step 8" in message]
    assert last == ["Training in progress, step 8", "Training in progress, step 8, checkpoint"]
    assert not any("step 4" in message or "step 6" in message for message in hub.only().messages)
    assert below(hub.only().branches["main"], "last-checkpoint") == whole(tmp_path / "run" / "checkpoint-8")


def test_a_slow_upload_or_rotation_loses_no_checkpoint(hub: Hub, tmp_path: Path) -> None:
    hub.fault = gate = Gate()
    kept: dict[int, dict[str, bytes]] = {}

    class Keeps(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept[state.global_step] = whole(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    callbacks = [Keeps(), Beside(end=gate.is_open.set)]
    train(
        pushing(tmp_path / "run", max_steps=8, hub_strategy="all_checkpoints", save_total_limit=1, callbacks=callbacks)
    )
    files = hub.only().branches["main"]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-8"]
    for step in (2, 4, 6, 8):
        assert below(files, f"checkpoint-{step}") == kept[step]


def test_with_hub_always_push_each_save_has_its_commit(hub: Hub, tmp_path: Path) -> None:
    hub.fault = gate = Gate()
    seen = Beside(step_5=gate.is_open.set)
    train(pushing(tmp_path / "run", max_steps=6, callbacks=[seen], hub_always_push=True))
    assert seen.pushes == [2, 4, 6]
    assert hub.only().messages == [f"Training in progress, step {step}" for step in (2, 4, 6)]


@pytest.mark.parametrize("status", [500, 429, 503, DROP])
@pytest.mark.parametrize("what", ["preupload", "/large/", "/commit/"])
def test_service_that_fails_for_a_while_holds_nothing_up_and_gets_everything(
    status: int, what: str, hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails as long as the training lasts: each try of each upload."""
    fault = hub.fault = Fault(status, lambda method, path: what in path)

    class Ends(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.push_in_progress.wait_until_done()
            fault.times = 0

    trainer = at_its_pace(pushing(tmp_path / "run", callbacks=[Ends()], hub_strategy="all_checkpoints"))
    train(trainer)
    assert trainer.state.global_step == 4
    assert "wait in" in caplog.text
    assert "are sent again" in caplog.text
    files = hub.only().branches["main"]
    for name in ("checkpoint-2", "checkpoint-4"):
        assert below(files, name) == whole(tmp_path / "run" / name)
    assert files["model.safetensors"] == (tmp_path / "run" / "checkpoint-4" / "model.safetensors").read_bytes()
    assert Outbox(tmp_path / "run").waiting() == []
    pushes = read(tmp_path / "run").of("push")
    assert [entry for entry in pushes if "error" in entry]
    assert {entry["path"] for entry in pushes if "commit" in entry} == {"", "checkpoint-2", "checkpoint-4"}


def test_what_hub_did_not_take_is_listed_and_sent_by_next_training(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fault = Fault(500, commits)
    train(pushing(tmp_path / "run", hub_strategy="all_checkpoints"))
    for said in ("Training in progress, step 4, checkpoint", "checkpoint-2 of me/model", "trainwright push"):
        assert said in caplog.text
    waiting = {upload.ticket.path for upload in Outbox(tmp_path / "run").waiting()}
    assert waiting == {"", "checkpoint-2", "checkpoint-4"}
    hub.fault = lambda method, path: None
    train(pushing(tmp_path / "run", max_steps=6, hub_strategy="every_save"), resume_from_checkpoint=True)
    files = hub.only().branches["main"]
    for name in ("checkpoint-2", "checkpoint-4"):
        assert below(files, name) == whole(tmp_path / "run" / name)
    assert files["model.safetensors"] == (tmp_path / "run" / "checkpoint-6" / "model.safetensors").read_bytes()
    assert Outbox(tmp_path / "run").waiting() == []


def test_what_others_write_and_delete_is_not_even_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ("config.json", "below/weights.bin", "below/checkpoint-1")
    for name in (
        *kept,
        "_uploads/1/files/a",
        "checkpoint-2/a",
        ".checkpoint-4.1.partial/a",
        ".git/config",
        "incidents/step-000002-nonfinite/batch.safetensors",
        "journal.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    looked: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(os.path.relpath(path, tmp_path)) or scandir(path))
    assert root_files(tmp_path) == {name: tmp_path / name for name in sorted(kept)}
    assert sorted(looked) == [".", "below"]


def test_an_older_upload_never_replaces_a_newer_one(hub: Hub, tmp_path: Path) -> None:
    fault = hub.fault = Fault(500, commits)
    trainer = pushing(tmp_path / "run", max_steps=6)

    def comes_back() -> None:
        trainer.push_in_progress.wait_until_done()
        fault.times = 0

    trainer.add_callback(Beside(step_3=comes_back))
    train(trainer)
    assert hub.only().messages[-1] == "Training in progress, step 6"
    assert "Training in progress, step 2" not in hub.only().messages


def test_a_hub_that_is_away_when_the_trainer_is_made_stops_nothing(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fault = Fault(DROP, lambda method, path: path.endswith("/create"), times=1)
    trainer = pushing(tmp_path / "run", hub_model_id=None)
    assert trainer.hub_model_id == "run"
    assert "cannot be reached" in caplog.text
    train(trainer)
    assert set(hub.repos) == {"me/run"}
    assert hub.only().messages[-1] == "Training in progress, step 4"


def test_an_invalid_token_is_refused_before_training(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="401"):
        pushing(tmp_path / "run", hub_token="hf_wrong")


def test_login_of_the_machine_will_do_and_no_token_is_written_anywhere(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    train(pushing(tmp_path / "login", hub_token=None, hub_model_id=None))
    train(pushing(tmp_path / "given", hub_strategy="all_checkpoints"))
    assert set(hub.repos) == {"me/login", "me/model"}
    stored = [content for repo in hub.repos.values() for content in repo.branches["main"].values()]
    stored += whole(tmp_path).values()
    assert not any(TOKEN.encode() in content for content in stored)


def test_repository_branch_and_privacy_are_those_of_the_arguments(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing(tmp_path / "run", hub_private_repo=True, hub_revision="try-2", hub_model_id="team/model")
    assert trainer.hub_model_id == "team/model"
    train(trainer)
    repo = hub.repos["team/model"]
    assert repo.private
    assert {branch for branch, _ in repo.commits} == {"try-2"}
    assert repo.branches["main"] == {}
    trainer.push_to_hub(revision="main", commit_message="mine")
    assert repo.commits[-1] == ("main", "mine")


def test_save_model_pushes_what_the_user_saves(hub: Hub, tmp_path: Path) -> None:
    trainer = pushing(tmp_path / "run", hub_strategy="end", save_strategy="no")
    train(trainer)
    assert hub.only().messages == []
    trainer.save_model()
    assert hub.only().messages == ["Model save"]
    files = hub.only().branches["main"]
    assert {"README.md", *MODEL} <= set(files)
    assert b"generated_from_trainer" in files["README.md"]


def test_push_to_hub_needs_no_setting_and_can_be_left_to_itself(hub: Hub, tmp_path: Path) -> None:
    model = module()
    model.model_tags = ["mine"]
    trainer = make_trainer(tmp_path / "run", model=model, max_steps=2, save_strategy="no")
    done = trainer.push_to_hub(token=TOKEN, private=True, tags="tiny", language="en", blocking=False)
    assert done.result(60).commit_message == "End of training"
    assert trainer.hub_model_id == "me/run"
    card = hub.only().branches["main"]["README.md"].decode()
    for said in ("- tiny", "- mine", "language: en", "# run"):
        assert said in card
    assert hub.only().private
    assert trainer.push_to_hub(token=TOKEN).commit_url.startswith(f"{hub.url}/me/run/commit/")


def test_a_failed_push_is_an_error_outside_of_training_alone(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = pushing(tmp_path / "run", hub_strategy="end", save_strategy="no")
    fault = hub.fault = Fault(500, commits)
    with pytest.raises(OSError, match="500"):
        trainer.push_to_hub()
    assert [upload.ticket.message for upload in Outbox(tmp_path / "run").waiting()] == ["End of training"]
    with pytest.raises(TrainwrightError, match=r"^The model is in .* was not uploaded: .*500.* Send it with `train"):
        upload(trainer)
    assert [upload.ticket.message for upload in Outbox(tmp_path / "run").waiting()] == ["Model save"]
    trainer.add_callback(Beside(step_2=trainer.push_to_hub, step_4=lambda: setattr(fault, "times", 0)))
    train(trainer)
    assert "wait in" in caplog.text
    assert "are sent again" in caplog.text
    assert hub.only().messages == ["End of training"]


def test_a_checkpoint_that_was_uploaded_can_be_resumed_from_elsewhere(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    train(pushing(tmp_path / "here", max_steps=8, hub_strategy="checkpoint", callbacks=[StopAt(4)]))
    clone = snapshot_download("me/model", local_dir=tmp_path / "there", token=TOKEN)
    resumed = make_trainer(tmp_path / "there", max_steps=8)
    train(resumed, resume_from_checkpoint=str(Path(clone) / "last-checkpoint"))
    uninterrupted = make_trainer(tmp_path / "whole", max_steps=8)
    train(uninterrupted)
    expected = weights(uninterrupted.model)
    assert all(bool((value == expected[name]).all()) for name, value in weights(resumed.model).items())


def test_only_the_first_process_pushes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path / "run", max_steps=2)
    monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
    trainer.init_hf_repo(token=TOKEN)
    assert trainer.push_to_hub(token=TOKEN) is None
    assert hub.requests == []


def test_an_upload_that_cannot_be_read_is_left_alone(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run" / OUTBOX_NAME / "mine"
    folder.mkdir(parents=True)
    (folder / "upload.json").write_text(json.dumps({"nonsense": 1}))
    train(pushing(tmp_path / "run"))
    assert folder.is_dir()
    assert "cannot be read as an upload" in caplog.text


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", "needs a token of the Hub, and none is set. Log in"),
        ("hf_wrong", "the Hub refuses the token. Log in"),
        (TOKEN, "cannot be reached from this machine"),
    ],
)
def test_the_command_line_says_in_one_line_why_nothing_can_be_sent(
    token: str, said: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwright.cli.main import app

    (tmp_path / "config.json").write_text("{}")
    Outbox(tmp_path / "run").put(Ticket(repo="me/model", step=2), linked={"config.json": tmp_path / "config.json"})
    if not token:
        monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    elif token == TOKEN:
        hub.fault = lambda method, path: DROP
    result = CliRunner().invoke(app, ["push", str(tmp_path / "run"), *(["--token", token] if token else [])])
    assert result.exit_code == 1
    assert said in result.output
    assert len(result.output.splitlines()) == 1
    assert not any("preupload" in path for _, path in hub.requests)


@pytest.mark.parametrize("is_offline", [False, True])
def test_model_that_cannot_be_asked_of_hub_is_named_after_one_request(
    is_offline: bool, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fault = lambda method, path: DROP
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    why = "HF_HUB_OFFLINE is set" if is_offline else "cannot be reached from this machine"
    assert why in (model_problem("me/absent") or "")
    assert len(hub.requests) == (not is_offline)
    assert why in (dataset_problem("me/absent") or "")
    assert model_problem(str(tmp_path)) is None
    assert model_problem("not/a/name") is None
    hub.fault = lambda method, path: None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert model_problem("me/absent") is None  # the Hub answers that it has none, which the client words


def test_the_command_line_sends_what_waits(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from trainwright.cli.main import app

    hub.fault = Fault(500, commits)
    train(pushing(tmp_path / "run", hub_strategy="checkpoint"))
    failed = CliRunner().invoke(app, ["push", str(tmp_path / "run"), "--token", TOKEN])
    assert failed.exit_code == 1
    assert "last-checkpoint of me/model" in caplog.text
    hub.fault = lambda method, path: None
    done = CliRunner().invoke(app, ["push", str(tmp_path / "run"), "--token", TOKEN])
    assert done.exit_code == 0
    assert [line.partition(":")[0] for line in done.output.splitlines()] == ["Uploaded", "Uploaded"]
    assert "to me/model/last-checkpoint" in done.output
    assert below(hub.only().branches["main"], "last-checkpoint") == whole(tmp_path / "run" / "checkpoint-4")
