"""A training that is killed while it uploads: the next one brings the Hub all that the dead one could not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.hub.outbox import Outbox

from .._support import forked
from .._support.subprocesses import environment, run_python
from .server import TOKEN, Gate, Hub, commits, running
from .test_push import below, whole

pytestmark = pytest.mark.process

VICTIM = Path(__file__).with_name("victim.py")
STEPS = 4


@pytest.fixture
def other() -> Iterator[Hub]:
    """A Hub for other processes; nothing of this one asks it."""
    with running() as one:
        yield one


def start(hub: Hub, folder: Path, *, steps: int) -> forked.Process:
    return forked.start([str(VICTIM), str(folder), str(steps)], env=environment(**settings(hub)), merge_output=True)


def settings(hub: Hub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


def copies(folder: Path) -> dict[str, dict[str, bytes]]:
    """What waits for the Hub, by where it is to go."""

    def read(root: Path) -> dict[str, bytes]:
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    return {one.ticket.path: read(one.root) for one in Outbox(folder).waiting()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_what_a_killed_training_had_not_uploaded_comes_with_the_next(
    number: signal.Signals, other: Hub, tmp_path: Path
) -> None:
    """The first commit hangs for ever, so all checkpoints wait; rotation deletes the older one meanwhile."""
    gate = Gate()
    folder = tmp_path / "run"
    is_dead = threading.Event()

    def hangs(method: str, path: str) -> int | None:
        if commits(method, path) and not is_dead.is_set():
            gate.is_reached.set()
            is_dead.wait(100)
            return 500
        return None

    other.fault = hangs
    process = start(other, folder, steps=1000)
    try:
        assert gate.is_reached.wait(100)
        while len(copies(folder)) < 3:  # the model, and two checkpoints
            assert process.poll() is None, process.stdout and process.stdout.read()
        process.send_signal(number)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), output
    is_dead.set()
    waiting = copies(folder)
    assert len(waiting) >= 3
    last = max(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))
    last += 4  # two saves more: the kill may have come between a checkpoint and its name, which the next start makes up
    following = start(other, folder, steps=last)
    output, _ = following.communicate(timeout=110)
    assert following.returncode == 0, output
    files = other.only().branches["main"]
    for path, expected in waiting.items():
        assert path == "" or below(files, path) == expected
    assert below(files, f"checkpoint-{last}") == whole(folder / f"checkpoint-{last}"), output
    assert files["model.safetensors"] == (folder / f"checkpoint-{last}" / "model.safetensors").read_bytes()
    assert Outbox(folder).waiting() == []


@pytest.mark.slow
def test_the_end_of_script_waits_for_upload_that_is_left_to_itself(other: Hub, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(VICTIM.parent)!r})
from victim import Net
from trainwright import Trainer, TrainingArguments
Trainer(model=Net(), args=TrainingArguments("left", use_cpu=True, report_to="none")).push_to_hub(blocking=False)
"""
    done = run_python("-c", script, cwd=tmp_path, **settings(other))
    assert other.only().messages == ["End of training"], done.stderr
    assert "model.safetensors" in other.only().branches["main"]
