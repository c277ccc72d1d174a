"""A signal to the whole process group while the workers of a DataLoader start, or after they have started.

As Ctrl-C in a terminal, `timeout` and `scancel` send it: the workers get it too.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from trainwright import get_last_checkpoint

from .._support import forked
from .test_signals import code_of

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("group_victim.py")
PLACES = ["first worker", "between workers", "in the worker", "in a step"]
LOADERS = ["ours", "of the user"]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


def run_signalled(folder: Path, place: str, number: signal.Signals, loader: str = "ours") -> tuple[int | None, str]:
    """Trains; the exit code and what was written to standard error. The script says HERE when it is at the place."""
    process = forked.start([str(SCRIPT), str(folder), place, loader], start_new_session=True)
    try:
        assert process.stdout is not None
        assert any(line.strip() == "HERE" for line in process.stdout), process.communicate(60)[1]
        os.killpg(process.pid, number)
        said = process.communicate(60)[1]
    finally:
        process.kill()
    return process.returncode, said


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    done = forked.run([str(SCRIPT), str(folder), "nowhere", "ours"])
    assert done.returncode == 0, done.stderr
    return (folder / "final.safetensors").read_bytes()


CASES = [(number, place, loader) for loader in LOADERS for place in PLACES for number in SIGNALS]
# One of each place and of each loader; the others differ by the signal only.
SHORT = [
    (signal.SIGTERM, "first worker", "ours"),
    (signal.SIGINT, "between workers", "ours"),
    (signal.SIGTERM, "in the worker", "ours"),
    (signal.SIGINT, "between workers", "of the user"),
    (signal.SIGTERM, "in a step", "of the user"),
]


@pytest.mark.parametrize(
    ("number", "place", "loader"),
    [pytest.param(*case, marks=[] if case in SHORT else pytest.mark.slow) for case in CASES],
    ids=lambda value: str(getattr(value, "name", value)).replace(" ", "-"),
)
def test_the_last_step_is_saved_when_the_whole_group_is_signalled(
    number: signal.Signals, place: str, loader: str, uninterrupted: bytes, tmp_path: Path
) -> None:
    code, said = run_signalled(tmp_path, place, number, loader)
    assert code == code_of(number), said
    assert f"Interrupted by {number.name} after step" in said
    assert "is killed by signal" not in said
    assert "exited unexpectedly" not in said
    saved = get_last_checkpoint(tmp_path)
    assert saved is not None, said
    assert f"after step {saved.rpartition('-')[2]}, which is saved" in said
    again = forked.run([str(SCRIPT), str(tmp_path), "nowhere", loader])
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "final.safetensors").read_bytes() == uninterrupted
