"""Trackers whose services take no values by step: what each of them is told instead. Kubeflow's controller is a server
of this test, DagsHub's store a real one of MLflow; Azure's and Flyte's clients are replaced at their boundary.
"""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from trainwright import TrainerCallback
from trainwright.journal.record import read
from trainwright.trackers import base, platforms

from .._support.small import StopAt, data, make_trainer, train
from .services import (
    azure_values,
    enter_azure,
    enter_clearml,
    enter_comet,
    enter_mlflow,
    enter_neptune,
    enter_swanlab,
    into,
    mlflow_values,
)

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_dataset": data.vectors(4),
    "log_level": "warning",
}
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FLUSH_TIMEOUT_S", 60.0)


class Controller:
    """Takes what a training posts."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.status = 200
        self.url = ""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    one = Controller()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if one.status == 200:
                one.posts.append(body["trainerStatus"])
            one.tokens.add(self.headers["Authorization"])
            self.send_response(one.status)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setattr(platforms, "PAUSE_S", 0.0)
    yield one
    server.shutdown()
    server.server_close()


def numbers(status: dict[str, Any]) -> dict[str, float]:
    return {one["name"]: float(one["value"]) for one in status["metrics"]}


def test_kubeflow_hears_progress_and_the_latest_values(controller: Controller, tmp_path: Path) -> None:
    train(make_trainer(tmp_path / "run", report_to=["kubeflow"], **SETTINGS))
    assert controller.tokens == {"Bearer secret"}
    percents = [post["progressPercentage"] for post in controller.posts]
    assert percents == sorted(percents)
    assert (percents[0], percents[-1]) == (0, 100)
    last = numbers(controller.posts[-1])
    journal = read(tmp_path / "run")
    for name in ("loss", "eval_loss", "learning_rate"):
        assert last[name] == pytest.approx(journal.series(name)[1][-1])
    assert (last["current_step"], last["total_steps"]) == (6, 6)
    for post in controller.posts[1:]:
        step = numbers(post)["current_step"]
        losses = dict(zip(*journal.series("loss"), strict=True))
        if "loss" in numbers(post):
            assert numbers(post)["loss"] in [pytest.approx(value) for at, value in losses.items() if at <= step]


def test_a_controller_that_refuses_stops_nothing(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller.status = 500
    trainer = make_trainer(tmp_path / "run", report_to=["kubeflow"], **SETTINGS)
    train(trainer)
    assert trainer.state.global_step == 6
    assert caplog.text.count("HTTP Error 500") == 1


def test_azure_gets_every_value_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = enter_azure(monkeypatch, tmp_path)
    train(make_trainer(tmp_path / "run", report_to=["azure_ml"], **SETTINGS))
    journal = read(tmp_path / "run")
    for name in ("loss", "eval_loss", "learning_rate"):
        expected = {(name, i + 1): value for i, value in enumerate(journal.series(name)[1])}
        found = {key: value for key, value in azure_values(module, tmp_path).items() if key[0] == name}
        assert found == pytest.approx(expected)


@pytest.mark.framework
def test_dagshub_is_a_store_of_mlflow_named_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    repo = MagicMock()
    into(monkeypatch, dagshub=MagicMock(), dagshub__upload=SimpleNamespace(Repo=repo))
    enter_mlflow(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_DAGSHUB_LOG_ARTIFACTS", "1")
    train(make_trainer(tmp_path / "run", report_to=["dagshub"], **SETTINGS))
    found = {key: value for key, value in mlflow_values(None, tmp_path).items() if key[0] == "loss"}
    steps, values = read(tmp_path / "run").series("loss")
    assert found == pytest.approx({("loss", step): value for step, value in zip(steps, values, strict=True)})
    assert repo.call_args.kwargs["name"] == "mlruns"
    assert repo.call_args.kwargs["owner"] == tmp_path.name
    repo.return_value.directory.return_value.add_dir.assert_called_once_with(str(tmp_path / "run"))


def test_flyte_gets_each_checkpoint_and_shows_the_log_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MagicMock()
    renderer = MagicMock()
    into(
        monkeypatch,
        flytekit=client,
        flytekitplugins=MagicMock(),
        flytekitplugins__deck=MagicMock(),
        flytekitplugins__deck__renderer=renderer,
    )
    trainer = make_trainer(tmp_path / "run", report_to=["flyte"], **SETTINGS)
    train(trainer)
    saved = [Path(call.args[0]).name for call in client.current_context.return_value.checkpoint.save.call_args_list]
    assert saved == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    (shown,) = renderer.TableRenderer.return_value.to_html.call_args.args
    assert shown["loss"].dropna().tolist() == read(tmp_path / "run").series("loss")[1]
    assert client.Deck.call_args.args[0] == "Log History"


def test_codecarbon_measures_from_the_first_step_to_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client measures by itself and writes a file; a stand-in writes one of the same kind."""
    during: list[int] = []

    class Tracker:
        def __init__(self, output_dir: str) -> None:
            self.path = Path(output_dir) / "emissions.csv"
            self.is_on = False

        def start(self) -> None:
            self.is_on = True

        def stop(self) -> None:
            self.is_on = False
            self.path.write_text("project_name,emissions\nrun,0.001\n")

    made: list[Tracker] = []

    def make(output_dir: str) -> Tracker:
        made.append(Tracker(output_dir))
        return made[0]

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tracker = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "CodeCarbonCallback")
            tracker._guard.flush()
            during.append(made[0].is_on)

    into(monkeypatch, codecarbon=SimpleNamespace(EmissionsTracker=make))
    trainer = make_trainer(tmp_path / "run", report_to=["codecarbon"], callbacks=[Looks()], **SETTINGS)
    train(trainer)
    assert during == [True] * 6
    with open(tmp_path / "run" / "emissions.csv", newline="") as file:
        assert [row["emissions"] for row in csv.DictReader(file)] == ["0.001"]


def continued(client: Any, service: str) -> object:
    """What the second training told its client of the first one's run."""
    start = {
        "clearml": client.Task.init,
        "swanlab": client.init,
        "comet_ml": client.start,
        "neptune": client.init_run,
    }[service]
    assert start.call_count == 2
    given = start.call_args_list[1].kwargs
    return {name: given.get(name) for name in ("continue_last_task", "id", "resume", "experiment_key", "with_id")}


NOTHING: dict[str, Any] = dict.fromkeys(("continue_last_task", "id", "resume", "experiment_key", "with_id"))


@pytest.mark.parametrize(
    ("service", "enter", "expected"),
    [
        ("clearml", enter_clearml, {"continue_last_task": "task"}),
        ("swanlab", enter_swanlab, {"id": "run", "resume": "allow"}),
        ("comet_ml", enter_comet, {"experiment_key": "key"}),
        ("neptune", enter_neptune, {"with_id": "RUN-1"}),
    ],
)
def test_a_resumed_run_continues_the_run_of_its_service(
    service: str, enter: Any, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = enter(monkeypatch, tmp_path)
    client.start.return_value.get_key.return_value = "key"
    number = MagicMock()
    number.fetch.return_value = "RUN-1"
    run = client.init_run.return_value
    find = run.__getitem__.side_effect
    run.__getitem__.side_effect = lambda name: number if name == "sys/id" else find(name)
    settings = {**SETTINGS, "report_to": [service]}
    train(make_trainer(tmp_path / "run", callbacks=[StopAt(4)], **settings))
    again = make_trainer(tmp_path / "run", **settings)
    again.train(resume_from_checkpoint=True)
    assert continued(client, service) == NOTHING | expected
