"""What every tracker must do: show the journal's values at the journal's steps, also after a failure and a resume, and
stop no training.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainerCallback
from trainwright.journal.record import read
from trainwright.trackers import base, registry
from trainwright.trackers.base import ENDS
from trainwright.trackers.registry import get_reporting_integration_callbacks

from .._support import forked
from .._support.small import StopAt, data, make_trainer, train
from .services import SERVICES, Service, Values

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_dataset": data.vectors(4),
    "save_strategy": "steps",
    "save_steps": 2,
    "log_level": "warning",
}
# Services that take no values by step, and the test of each.
TOLD_OTHERWISE = {
    "azure_ml": "test_azure",
    "codecarbon": "test_codecarbon",
    "dagshub": "test_dagshub",
    "flyte": "test_flyte",
    "kubeflow": "test_kubeflow",
}
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "dvclive": "dvclive"}
CURVES = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_samples_per_second")

pytestmark = [
    pytest.mark.framework,  # the real clients
    pytest.mark.filterwarnings("default"),  # what the clients' own packages warn of is theirs
]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FLUSH_TIMEOUT_S", 60.0)  # a machine under load starts a client slowly


@pytest.fixture(params=SERVICES, ids=lambda service: service.name)
def service(request: pytest.FixtureRequest) -> Service:
    chosen: Service = request.param
    if chosen.name in PACKAGES:
        pytest.importorskip(PACKAGES[chosen.name])
    return chosen


def journal_values(folder: Path, service: Service) -> Values:
    """What the journal says, under the service's names."""
    return {
        (name, step): value
        for step, values in read(folder).logs()
        for name, value in service.names({k: v for k, v in values.items() if k in CURVES}).items()
    }


def shown(service: Service, seen: Any, folder: Path) -> Values:
    names = set(service.names(dict.fromkeys(CURVES, 0.0)))
    return {key: value for key, value in service.read(seen, folder).items() if key[0] in names}


def test_every_tracker_is_held_to_the_laws_or_has_its_own_test() -> None:
    assert {service.name for service in SERVICES} | TOLD_OTHERWISE.keys() == registry.TRACKERS.keys()
    own = Path(__file__).with_name("test_other_services.py").read_text()
    assert [test for test in TOLD_OTHERWISE.values() if f"def {test}" not in own] == []


def test_the_values_are_those_of_the_journal_also_after_failure_and_resume(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = service.enter(monkeypatch, tmp_path)

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        train(
            make_trainer(
                tmp_path / "run",
                callbacks=[Fails()],
                report_to=[service.name],
                **{**SETTINGS, "save_steps": 4, "logging_steps": 1, "save_strategy": "steps"},
            )
        )
    service.read(seen, tmp_path)  # closes what the end of the process would close
    resumed = make_trainer(tmp_path / "run", report_to=[service.name], **SETTINGS | {"logging_steps": 1})
    train(resumed, resume_from_checkpoint=True)
    expected = journal_values(tmp_path / "run", service)
    assert {step for _, step in expected} == {1, 2, 3, 4, 5, 6}
    assert shown(service, seen, tmp_path) == pytest.approx(expected)


@pytest.mark.parametrize(
    "name", ["tensorboard", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wandb", "mlflow", "dvclive"))]
)
def test_a_resume_after_a_kill_sends_what_the_tracker_had_not_got(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker was at step 2 when the process died at 5; its checkpoint is of step 4."""
    (service,) = (one for one in SERVICES if one.name == name)
    pytest.importorskip(PACKAGES.get(name, "tensorboard"))
    seen = service.enter(monkeypatch, tmp_path)
    victim = ["-m", "tests.trackers.victim", str(tmp_path), name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    codes = [forked.run([*victim, word], env=environment, timeout=300).returncode for word in ("killed", "resumed")]
    assert codes == [-signal.SIGKILL, 0]
    expected = journal_values(tmp_path / "run", service)
    assert {step for _, step in expected} == {1, 2, 3, 4, 5, 6}
    assert shown(service, seen, tmp_path) == pytest.approx(expected)


def test_tracker_that_is_new_in_resumed_run_gets_curves_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (service,) = (one for one in SERVICES if one.name == "tensorboard")
    seen = service.enter(monkeypatch, tmp_path)
    train(make_trainer(tmp_path / "run", report_to="none", callbacks=[StopAt(4)], **SETTINGS))
    train(make_trainer(tmp_path / "run", report_to=[service.name], **SETTINGS), resume_from_checkpoint=True)
    expected = journal_values(tmp_path / "run", service)
    assert {step for _, step in expected} == {2, 4, 6}
    assert shown(service, seen, tmp_path) == pytest.approx(expected)


def test_tracker_that_raises_is_said_once_and_gets_everything_at_the_end(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = service.enter(monkeypatch, tmp_path)
    monkeypatch.setattr(base, "PAUSE_S", 0.0)
    (kind,) = get_reporting_integration_callbacks(service.name)
    send = kind.send
    is_up = [False]

    def unreliable(self: Any, values: dict[str, Any], state: Any) -> None:
        if not is_up[0]:
            raise ConnectionError("the service is away")
        send(self, values, state)

    class ComesBack(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tracker._guard.flush()
            assert tracker._guard.is_disabled
            is_up[0] = True

    monkeypatch.setattr(kind, "send", unreliable)
    trainer = make_trainer(tmp_path / "run", report_to=[service.name], **SETTINGS)
    tracker = next(c for c in trainer.callback_handler.callbacks if isinstance(c, kind))
    trainer.callback_handler.callbacks.insert(0, ComesBack())
    trainer.callback_handler.rebuild()
    train(trainer)
    assert trainer.state.global_step == 6
    assert caplog.text.count("the service is away") == 1
    assert caplog.text.count("left alone until the end") == 1
    assert shown(service, seen, tmp_path) == pytest.approx(journal_values(tmp_path / "run", service))


def test_a_tracker_that_hangs_does_not_hold_up_the_training(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It hangs until the training is over, which therefore cannot have waited for it."""
    seen = service.enter(monkeypatch, tmp_path)
    monkeypatch.setattr(base, "FLUSH_TIMEOUT_S", 0.01)
    (kind,) = get_reporting_integration_callbacks(service.name)
    is_over = threading.Event()
    send = kind.send

    def hangs(self: Any, values: dict[str, Any], state: Any) -> None:
        assert is_over.wait(60)
        send(self, values, state)

    monkeypatch.setattr(kind, "send", hangs)
    trainer = make_trainer(tmp_path / "run", report_to=[service.name], **SETTINGS)
    train(trainer)
    assert trainer.state.global_step == 6
    assert "continues in the background" in caplog.text
    is_over.set()
    tracker = next(c for c in trainer.callback_handler.callbacks if isinstance(c, kind))
    assert tracker._guard.flush(60)
    assert shown(service, seen, tmp_path) == pytest.approx(journal_values(tmp_path / "run", service))


def test_another_process_than_the_first_reports_nothing(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = service.enter(monkeypatch, tmp_path)
    trainer = make_trainer(tmp_path / "run", report_to=[service.name], **SETTINGS | {"save_strategy": "no"})
    monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
    train(trainer)
    assert shown(service, seen, tmp_path) == {}


def test_values_logged_once_at_the_end_are_not_a_curve() -> None:
    assert set(ENDS) & set(CURVES) == set()
