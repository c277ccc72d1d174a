"""A link that lies in the directory of a run where a part of ours writes or deletes: what it names stays as it is.

Each row is one such part. Other users of a shared directory, or an unpacked archive, can plant a link of any name.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.capabilities.branch.origins import bring_along
from trainwright.capabilities.incidents import bundle
from trainwright.capabilities.mirror.mirror import Mirror
from trainwright.capabilities.mirror.outbox import outbox_path
from trainwright.capabilities.mirror.parts import PartsOrder
from trainwright.capabilities.mirror.plan import MirrorPlan
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.capabilities.mirror.sources import fetch_companions
from trainwright.capabilities.quarantine.file import QUARANTINE_NAME, add_to_quarantine
from trainwright.capabilities.recorded_values.extension import ValueRecorder
from trainwright.capabilities.recorded_values.value_comparison import values_file
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.checkpoint.store import CheckpointStore
from trainwright.checkpoint.weights import use_umask
from trainwright.hub import outbox
from trainwright.hub.outbox import Outbox, Ticket
from trainwright.hub.uploader import Uploader

URL = "memory://planted/run"
TICKET = {"repo": "me/model", "path": "", "revision": None, "message": "x", "step": 1}


def checkpoint_at(folder: Path, step: int = 3) -> Path:
    """Writes a checkpoint with a file in a folder of its own, as adapters are saved."""
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter/file").write_text("new")
    Manifest(step=step, run_id="run", files=describe_files(folder)).write(folder)
    return folder


def mirror_of(run: Path) -> Mirror:
    plan = MirrorPlan(url=URL)
    return Mirror(run, RemoteStore(URL), plan, SimpleNamespace(confirm=lambda: 1))


def stage_for_hub(run: Path) -> None:
    Uploader(run, "me/model")._stage(checkpoint_at(run / "checkpoint-3"), None, message="x", step=3)


def get_companions(run: Path) -> None:
    store = RemoteStore(URL)
    store._fs.pipe_file(f"{store._root}/incidents/file", b"new")
    store._fs.pipe_file(f"{store._root}/incidents/other", b"new")
    found = SimpleNamespace(state=SimpleNamespace(best_global_step=None), manifest=None)
    fetch_companions(URL, found, CheckpointStore(run), [])  # type: ignore[arg-type]


def record_values(run: Path, *, resumes: bool) -> None:
    steps = SimpleNamespace(first=1, num=1)
    recorder = ValueRecorder.__new__(ValueRecorder)
    recorder.__dict__.update(_steps=steps, _folder=run, _rank=0, _about={}, _step=0, _micro_batch=0)
    start = SimpleNamespace(checkpoint="there" if resumes else None)
    progress = SimpleNamespace(state=SimpleNamespace(global_step=0))
    recorder.begin(SimpleNamespace(start=start, progress=progress))  # type: ignore[arg-type]


def branch(run: Path) -> None:
    origin = run.parent / "origin"
    (origin / "checkpoint-3").mkdir(parents=True)
    (origin / QUARANTINE_NAME).write_text("{}\n")
    bring_along(Checkpoint(origin / "checkpoint-3"), str(run))


def commit_over_a_stranger(run: Path) -> None:
    """Commits a checkpoint where a directory without a manifest lies, whose files are kept."""
    store = CheckpointStore(run)
    staging = store.stage(3)
    (staging / "own").write_text("own")
    final = store.commit(staging, Manifest(step=3, run_id="run"))
    assert not any("precious" in path.read_text() for path in final.rglob("*") if path.is_file())


def write_incident(run: Path) -> None:
    bundle.make_staging(run, "step-000001-x")


@dataclass(frozen=True)
class Part:
    """A part that writes or deletes.

    Attributes:
        link: where the link lies in the directory of the run.
        target: what it names in the victim's directory.
        act: lets the part work.
    """

    link: str
    target: str
    act: Callable[[Path], Any]


MIRROR = outbox_path(Path(), URL).name
PARTS = {
    "an upload is put in": Part("_uploads", "", lambda run: Outbox(run).put(Ticket(repo=None), linked={}, copied={})),
    "uploads are cleaned": Part("_uploads", "", lambda run: Outbox(run).clean()),
    "uploads are removed": Part("_uploads", "", lambda run: Outbox(run).remove(Outbox(run).waiting())),
    "an upload's files are a link": Part("_uploads/1/files", "", lambda run: Outbox(run).remove(Outbox(run).waiting())),
    "model files for the Hub": Part("adapter", "", stage_for_hub),
    "model file for the Hub": Part("adapter/file", "file", stage_for_hub),
    "the mirror begins": Part(MIRROR, "", lambda run: mirror_of(run).begin([], continues=True)),
    "the mirror begins afresh": Part(MIRROR, "", lambda run: mirror_of(run).begin([], continues=False)),
    "the mirror stages": Part(MIRROR, "", lambda run: mirror_of(run).committed(checkpoint_at(run / "checkpoint-3"))),
    "the mirror tidies": Part(MIRROR, "", lambda run: mirror_of(run).outbox.take_newest(set())),
    "the mirror places an order": Part(
        MIRROR, "", lambda run: PartsOrder(run / MIRROR, Manifest(step=3, run_id="run"), "token", 1).open()
    ),
    "files of a run come from a URL": Part("incidents", "", get_companions),
    "a file of a run comes from a URL": Part("incidents/other", "missing", get_companions),
    "a sample is put in quarantine": Part(QUARANTINE_NAME, "file", lambda run: add_to_quarantine(run, [1])),
    "a branch takes the quarantine": Part(QUARANTINE_NAME, "missing", branch),
    "values are recorded": Part(values_file("", 0).name, "file", lambda run: record_values(run, resumes=False)),
    "values are recorded on": Part(values_file("", 0).name, "file", lambda run: record_values(run, resumes=True)),
    "weights get their mode": Part("x.safetensors", "file", use_umask),
    "a file in a checkpoint": Part("checkpoint-3/x", "file", commit_over_a_stranger),
    "a checkpoint": Part("checkpoint-3", "", commit_over_a_stranger),
    "an incident": Part("incidents", "", write_incident),
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Returns a directory that looks like each of our own, with files that only their owner may read."""
    place = tmp_path / "victim"
    (place / "deep").mkdir(parents=True)
    for name in ("file", "deep/file", "x.partial"):
        (place / name).write_text("precious")
        (place / name).chmod(0o600)
    for number in ("0001.partial", ".order-3", "checkpoint-1.partial"):
        (place / number).mkdir()
        (place / number / "file").write_text("precious")
    (place / "0002").mkdir()
    (place / "0002/upload.json").write_text(json.dumps(TICKET))
    for step in (1, 2, 3):
        checkpoint_at(place / f"checkpoint-{step}", step)
    return place


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Returns mode, number of names and content of all that is below a directory."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        text = path.read_text() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (stat.S_IMODE(status.st_mode), status.st_nlink, text)
    return found


@pytest.mark.parametrize("name", PARTS)
def test_what_a_link_names_stays_as_it_is(name: str, tmp_path: Path, victim: Path) -> None:
    part = PARTS[name]
    run = tmp_path / "run"
    (run / part.link).parent.mkdir(parents=True)
    (run / part.link).symlink_to(victim / part.target)
    if "_uploads/" in part.link:
        (run / "_uploads/1/upload.json").write_text(json.dumps(TICKET))
    before = contents(victim)
    with suppress(OSError):  # it says that a link is in its way
        part.act(run)
    assert contents(victim) == before


def test_an_upload_with_links_is_not_sent(tmp_path: Path, victim: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Outbox(tmp_path)
    upload = own.put(Ticket(repo="me/model"), linked={}, copied={"file": victim / "file"})
    assert [one.folder for one in own.waiting()] == [upload.folder]
    (upload.root / "deep").symlink_to(victim)
    assert own.waiting() == []
    assert "link" in caplog.text


@pytest.mark.parametrize("values", [{"path": "../x"}, {"repo": 3}, {"step": "x"}, {"path": "/x"}, {"more": 1}, []])
def test_a_ticket_of_another_form_is_not_sent(values: Any, tmp_path: Path) -> None:
    own = Outbox(tmp_path)
    upload = own.put(Ticket(repo="me/model"), linked={}, copied={})
    content = TICKET | values if isinstance(values, dict) else values
    (upload.folder / "upload.json").write_text(json.dumps(content))
    assert own.waiting() == []
    assert upload.folder.is_dir()


def test_files_outside_of_a_directory_are_not_published(
    tmp_path: Path, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "own").write_text("own")
    (run / "same").symlink_to("own")
    (run / "secret").symlink_to(victim / "file")
    assert list(outbox.root_files(run)) == ["own", "same"]
    assert "secret" in caplog.text
    assert outbox.links_out(run) == ["secret"]
