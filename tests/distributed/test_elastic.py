"""torchrun starts the processes again: after one died, when a node is lost, leaves or comes. The run goes on."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .._support.two_processes import Done, end_group, finish, free_port, launch, run

SCRIPT = Path(__file__).with_name("elastic.py")
SIZE = 48
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


def trained(folder: Path) -> Counter[int]:
    """How often each sample is in the weights: of each start, the steps that the next one did not go back behind."""
    files = sorted(folder.glob("samples.*.jsonl"))  # in order of time; processes of one start have the same steps
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    counts: Counter[int] = Counter()
    for position, notes in enumerate(lines):
        resumed_at = [later[0]["step"] for later in lines[position + 1 :] if later[0]["step"] > notes[0]["step"]]
        end = min(resumed_at, default=10**9)
        for note in notes:
            if note["step"] < end:
                counts.update(note["samples"])
    return counts


def assert_no_step_twice(log: list[dict[str, Any]], folder: Path, last: int) -> None:
    assert [entry["step"] for entry in log if "loss" in entry] == list(range(1, last + 1))
    assert trained(folder) == dict.fromkeys(range(SIZE), 2)


# -- a process dies --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("whole")
    return run(SCRIPT, str(folder / "run"), "whole", folder=folder, timeout_s=200)


def by_port() -> list[str]:
    return ["--master-addr", "localhost", "--master-port", str(free_port())]


def by_meeting() -> list[str]:
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]


@pytest.mark.parametrize(
    ("case", "meeting"),
    [
        ("dies in a step", by_port),
        ("dies in a step", by_meeting),
        ("dies while saving", by_meeting),
        ("dies behind training", by_port),
    ],
)
def test_all_are_started_again_and_end_with_the_same_weights(
    case: str, meeting: Callable[[], list[str]], whole: Done, tmp_path: Path
) -> None:
    """Bit for bit. One restart is enough, so no start met the addresses of the one before it."""
    launcher = ("torch.distributed.run", "--nnodes", "1:1", "--nproc-per-node", "2", "--max-restarts", "1", *meeting())
    done = run(SCRIPT, str(tmp_path / "run"), case, folder=tmp_path, launcher=launcher, timeout_s=250)
    assert "exitcode: -9" in done.out  # it did die
    for told, uninterrupted in zip(done.told, whole.told, strict=True):
        assert told["step"] == uninterrupted["step"] == 12
        assert told["weights"] == uninterrupted["weights"]
        assert told["log"][:-1] == uninterrupted["log"][:-1]  # the last entry has rates of the time
    assert_no_step_twice(done.told[0]["log"], tmp_path / "run", 12)
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


# -- a node goes or comes --------------------------------------------------------------------------------------------


class Nodes:
    """Launchers that meet at one place, each with one process. The first one keeps the place, and stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self._port = free_port()
        quick = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=4"
        place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}")
        self._launcher = (
            "torch.distributed.run",
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "2",
            *place,
            "--rdzv-id",
            "nodes",
            "--rdzv-conf",
            quick,
        )
        self.started: list[subprocess.Popen[str]] = []

    def start(self, **environment: str) -> subprocess.Popen[str]:
        if self.started:
            self._wait_for_the_place()
        started = launch(
            SCRIPT, str(self.run), "slowly", folder=self.folder, launcher=self._launcher, environment=environment
        )
        self.started.append(started)
        return started

    def _wait_for_the_place(self) -> None:
        """Whoever comes first keeps the place, and takes it along when it goes."""
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("localhost", self._port)):
                return
            assert time.monotonic() < deadline, "nobody keeps the place"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not (self.run / f"checkpoint-{step}").is_dir():
            assert time.monotonic() < deadline, "no such checkpoint"
            assert self.started[0].poll() is None, "the launcher ended"
            time.sleep(0.05)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for started in nodes.started:
        end_group(started)
        started.communicate()


@pytest.mark.parametrize("how", ["killed", "asked to leave"])
def test_a_node_goes_and_the_other_one_trains_the_rest(how: str, nodes: Nodes) -> None:
    one = nodes.start()
    other = nodes.start()
    nodes.wait_for_step(2)
    if how == "killed":
        end_group(other)
    else:
        other.send_signal(signal.SIGTERM)
    done = finish(one, nodes.folder, timeout_s=200)
    assert done.code == 0, done.out[-6000:]
    told = done.told[0]
    assert told["world"] == 1
    assert_no_step_twice(told["log"], nodes.run, told["step"])
    if how == "asked to leave":
        assert "which is saved" in done.out


def test_a_node_comes_and_both_train_the_rest(nodes: Nodes) -> None:
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torch 2.13 does not tell a new node where the shared one is
    one = nodes.start(**own)
    nodes.wait_for_step(2)
    other = nodes.start(**own)
    dones = [finish(started, nodes.folder, timeout_s=200) for started in (one, other)]
    assert [done.code for done in dones] == [0, 0], "\n".join(done.out[-5000:] for done in dones)
    for told in dones[0].told:
        assert told["world"] == 2
        assert told["step"] < 24
    assert_no_step_twice(dones[0].told[0]["log"], nodes.run, dones[0].told[0]["step"])
    assert "which is saved" in dones[0].out
