"""Trainings with copies under a URL: what a run refuses, and what a resume on an empty machine finds."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainingArguments
from trainwright.capabilities.mirror import extension as mirror_extension
from trainwright.capabilities.mirror import mirror as mirror_module
from trainwright.capabilities.mirror import remote as remote_module
from trainwright.capabilities.mirror.lease import RELEASED
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import ArgumentError, CheckpointError, CheckpointNotFoundError
from trainwright.journal.record import read

from ..._support.small import StopAt, differing, make_trainer, weights
from ..._support.stores import fresh_url

pytestmark = pytest.mark.costly

LAST = 8


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store" / "run").as_uri()


def trained(folder: Path, url: str | None, resume: str | bool | None = "auto", **settings: Any) -> Any:
    common = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": LAST, "log_level": "info"}
    trainer = make_trainer(folder, **{**common, "checkpoint_mirror": url, **settings})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps(url: str) -> list[int]:
    store = RemoteStore(url)
    return sorted(one.step for one in store.manifests() if not list(store.problems(one)))


def test_resume_in_empty_directory_ends_with_same_weights_best_model_and_journal(tmp_path: Path, url: str) -> None:
    best = {
        "eval_dataset": make_trainer(tmp_path / "unused").train_dataset,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # which is that of the first evaluation
    }
    whole = trained(tmp_path / "whole", None, None, **best)
    trained(tmp_path / "first", url, callbacks=[StopAt(4)], **best)
    shutil.rmtree(tmp_path / "first")
    again = trained(tmp_path / "second", url, **best)
    assert again.state.best_global_step == 2
    assert again.state.best_model_checkpoint == str(tmp_path / "second" / "checkpoint-2")
    assert not differing(weights(again.model), weights(whole.model))
    entries = read(tmp_path / "second" / "journal.jsonl").entries
    assert [entry["kind"] for entry in entries if entry["kind"] in ("start", "resume")] == ["start", "resume"]


@pytest.mark.parametrize("kind", ["a file", "below a file", "a loop", "a long name"])
def test_a_place_that_can_be_no_directory_is_refused_before_step_1(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "loop").symlink_to("loop")
    place = {"a file": "file", "below a file": "file/copies", "a loop": "loop/copies", "a long name": "x" * 300}[kind]
    with pytest.raises((ArgumentError, CheckpointError)):
        trained(tmp_path / "run", (tmp_path / place).as_uri())
    assert (tmp_path / "file").read_text() == "content"
    assert not [*tmp_path.glob("run/checkpoint-*")]


def test_no_file_of_the_run_stays_open(tmp_path: Path, url: str) -> None:
    trained(tmp_path / "run", url)
    open_files = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
    assert [path for path in open_files if str(tmp_path) in path] == []


def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "first", url, max_steps=4)
    path = tmp_path / "store" / "run" / "checkpoint-4-1" / "optimizer.pt"
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(content)
    again = trained(tmp_path / "second", url)
    assert "optimizer.pt was altered" in caplog.text
    assert "Trying the one before it" in caplog.text
    assert CheckpointStore(tmp_path / "second").steps() == [6, LAST]
    assert again.state.global_step == LAST
    assert not list((tmp_path / "second").glob(".checkpoint-*"))


def test_a_directory_that_is_as_new_is_not_downloaded(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", url, max_steps=4)

    def refused(*args: Any) -> None:
        raise AssertionError("it is here already")

    monkeypatch.setattr(RemoteStore, "download", refused)
    trained(tmp_path / "run", url)
    assert steps(url)[-1] == LAST


def test_an_older_directory_gets_the_newer_copy(tmp_path: Path, url: str) -> None:
    trained(tmp_path / "run", url, max_steps=4)
    shutil.copytree(tmp_path / "run", tmp_path / "older")
    trained(tmp_path / "run", url, max_steps=6)
    again = trained(tmp_path / "older", url, max_steps=6)
    assert again.state.global_step == 6
    assert CheckpointStore(tmp_path / "older").steps()[-1] == 6


def test_a_checkpoint_may_be_named_by_its_url(tmp_path: Path, url: str) -> None:
    trained(tmp_path / "first", url, max_steps=4)
    again = trained(tmp_path / "second", None, f"{url}/checkpoint-4", max_steps=5)
    assert again.state.global_step == 5
    for missing in (f"{url}/checkpoint-5", url):
        with pytest.raises(CheckpointNotFoundError, match="it has no manifest there"):
            trained(tmp_path / "third", None, missing)


def test_output_dir_may_be_a_url(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    whole = trained(tmp_path / "whole", None, None)
    for last in (4, LAST):
        again = make_trainer(
            tmp_path, save_strategy="steps", save_steps=2, save_total_limit=1, max_steps=LAST, callbacks=[StopAt(last)]
        )
        again.args = again.args.__class__(**again.args.to_dict() | {"output_dir": url})
        again.train(resume_from_checkpoint="auto")
        assert Path(again.args.output_dir).parent == tmp_path / "cache" / "runs"
        assert again.args.checkpoint_mirror == url
        assert steps(url) == [last]
        shutil.rmtree(tmp_path / "cache")
    assert not differing(weights(again.model), weights(whole.model))


def test_a_second_url_beside_that_of_output_dir_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="A run has one URL"):
        TrainingArguments(output_dir=url, checkpoint_mirror=f"{url}/other")
    assert TrainingArguments(output_dir=url, checkpoint_mirror=url).checkpoint_mirror == url


def test_a_key_in_the_url_of_output_dir_is_refused_and_masked() -> None:
    with pytest.raises(ArgumentError) as caught:
        TrainingArguments(output_dir="s3://me:secret-word@bucket/run")
    assert "secret-word" not in str(caught.value)


def test_resume_behind_copies_of_the_run_is_a_run_of_its_own(tmp_path: Path, url: str) -> None:
    trained(tmp_path / "first", url, max_steps=4)  # its last step is copied, however slow the store is
    trained(tmp_path / "first", url)
    trained(tmp_path / "second", url, f"{url}/checkpoint-4", max_steps=6)
    newest = RemoteStore(url).manifests()[0]
    assert newest.step == 6  # not 8, which the run before it wrote
    assert trained(tmp_path / "third", url, max_steps=6).state.global_step == 6


def test_a_download_that_breaks_off_leaves_nothing_half(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "first", url, max_steps=4)
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(RemoteStore, "_read", away)
    with pytest.raises(CheckpointError, match=r"cannot be read \(ConnectionError"):
        trained(tmp_path / "second", url)
    assert [path.name for path in (tmp_path / "second").rglob("*") if path.is_file()] == []


def away(*args: Any, **kwargs: Any) -> None:
    raise ConnectionError("Could not connect to the endpoint URL")


def test_store_that_is_away_does_not_make_run_start_from_first_step(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "run", url, max_steps=4)
    monkeypatch.setattr(RemoteStore, "manifests", away)
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_S", 0.0)
    with pytest.raises(CheckpointError, match=r"cannot be read \(ConnectionError.*continue from"):
        trained(tmp_path / "empty", url)
    monkeypatch.setattr(mirror_module, "END_PATIENCE_S", 0.0)  # or it waits a minute
    again = trained(tmp_path / "run", url)
    assert again.state.global_step == LAST
    assert "The run continues from" in caplog.text


def test_without_any_checkpoint_true_is_an_error_that_names_both_places(tmp_path: Path, url: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="checkpoint_mirror='file:"):
        trained(tmp_path / "run", url, True)


@pytest.mark.parametrize(
    "error", [PermissionError("Access Denied"), FileNotFoundError("The specified bucket does not exist")]
)
def test_a_url_that_cannot_be_written_is_refused_before_the_first_step(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: Any) -> None:
        raise error

    monkeypatch.setattr(RemoteStore, "create", refuse)
    with pytest.raises(ArgumentError, match=f"cannot be written: .*{error}.*bucket's name and at the credentials"):
        trained(tmp_path / "run", url)
    assert not list((tmp_path / "run").glob("*"))


@pytest.mark.process
@pytest.mark.parametrize("fault", ["bucket", "credentials"])
def test_an_s3_server_that_refuses_is_an_error_before_the_first_step(
    tmp_path: Path, servers: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with fresh_url("s3", servers) as url:
        if fault == "bucket":
            url = url.replace("s3://", "s3://no-such-")
        else:
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        words = {"bucket": "FileNotFoundError", "credentials": "NoCredentialsError"}[fault]
        with pytest.raises(ArgumentError, match=f"cannot be written: {words}"):
            trained(tmp_path / "run", url)


def test_fresh_run_at_url_of_earlier_one_says_so_deletes_or_refuses(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    # One save each: of two that come faster than they are copied, the newer one alone is.
    trained(tmp_path / "first", url, max_steps=4, save_steps=4)
    with pytest.raises(ArgumentError, match=r"holds checkpoints of an earlier run \(steps 4\)"):
        trained(tmp_path / "second", url, None, overwrite_output_dir=False)
    caplog.clear()
    trained(tmp_path / "third", url, None, max_steps=2, save_steps=2)
    assert "holds checkpoints of an earlier run" in caplog.text
    assert steps(url) == [2, 4]
    trained(tmp_path / "fourth", url, None, max_steps=2, overwrite_output_dir=True)
    assert steps(url) == [2]


def test_a_run_of_another_process_at_the_url_is_refused(tmp_path: Path, url: str) -> None:
    from trainwright.capabilities.mirror.lease import RemoteLease

    lease = RemoteLease(RemoteStore(url))
    assert lease.attempt() is None
    with pytest.raises(ArgumentError, match=r"checkpoint_mirror='file:.*is in use by process"):
        trained(tmp_path / "run", url)
    lease.release()
    trained(tmp_path / "run", url)


def test_run_that_is_ended_by_error_has_its_last_checkpoint_at_url(tmp_path: Path, url: str) -> None:
    from trainwright import TrainerCallback

    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        trained(tmp_path / "run", url, callbacks=[Fails()], mirror_every="1h", save_on_exception=True)
    assert steps(url) == [2, 5]
    assert RemoteStore(url).read(".lease-1.json") == RELEASED


def test_a_changed_checkpoint_is_copied_as_the_callback_left_it(tmp_path: Path, url: str) -> None:
    from trainwright import TrainerCallback

    class Adds(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / "notes.txt").write_text("added")

    trained(tmp_path / "run", url, callbacks=[Adds()])
    assert steps(url)[-1] == LAST
    assert RemoteStore(url).find(f"checkpoint-{LAST}-1")["notes.txt"] == 5


def test_no_key_is_in_a_file_or_a_log(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="trainwright")
    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCY"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setattr(mirror_extension, "is_refusal", lambda error: False)
    whole = RemoteStore.upload
    failed: list[int] = []

    def fails_once(store: RemoteStore, *args: Any, **kwargs: Any) -> None:
        if not failed:
            failed.append(1)
            raise RuntimeError(f"SignatureDoesNotMatch for {secret}")
        whole(store, *args, **kwargs)

    monkeypatch.setattr(RemoteStore, "upload", fails_once)
    trained(tmp_path / "run", url)
    assert failed
    assert "SignatureDoesNotMatch" in caplog.text
    assert secret not in caplog.text
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("delay_s", [0.0, 0.3], ids=["at once", "after the last step"])
def test_the_journal_tells_of_the_copies(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    upload = RemoteStore.upload

    def later(self: RemoteStore, *args: Any, **kwargs: Any) -> None:
        time.sleep(delay_s)
        upload(self, *args, **kwargs)

    monkeypatch.setattr(RemoteStore, "upload", later)
    trained(tmp_path / "run", url, max_steps=4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["kind"] == "mirror"]
    assert told[0]["step"] == 2
    assert told[0]["bytes"] > 0
