"""The process that speaks to a store for a run: killed, stopped, asked wrongly, and at the end of its run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from trainwright.capabilities.mirror import clock as clock_module
from trainwright.capabilities.mirror import process_client, remote
from trainwright.capabilities.mirror.clock import Pace
from trainwright.capabilities.mirror.mirror import Mirror
from trainwright.capabilities.mirror.process_client import ProcessClient, find_setup, restore_error
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.capabilities.mirror.store_client import is_refusal, reason
from trainwright.capabilities.mirror.store_process import describe_error
from trainwright.checkpoint.manifest import Manifest, describe_files
from trainwright.errors import ArgumentError

from ..._support.subprocesses import run_python
from .test_mirror import REAL_S, Bench, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RemoteStore]:
    found = RemoteStore((tmp_path / "store").as_uri(), is_apart=True)
    assert found.is_apart
    yield found
    found.close()


def process(store: RemoteStore) -> psutil.Process:
    assert isinstance(store._fs, ProcessClient)
    assert store._fs.pid is not None
    return psutil.Process(store._fs.pid)


def is_gone(found: psutil.Process) -> bool:
    return not found.is_running() or found.status() == psutil.STATUS_ZOMBIE


def checkpoint(folder: Path, num_bytes: int = 1000) -> tuple[Path, Manifest]:
    path = folder / "checkpoint-1"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(os.urandom(num_bytes))
    manifest = Manifest(step=1, run_id="run", files=describe_files(path))
    return path, manifest


class Paused:
    """Holds an upload until the test lets it go; knows whether it has begun."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.goes = threading.Event()

    def __call__(self, num_bytes: int) -> None:
        self.has_begun.set()
        assert self.goes.wait(REAL_S)


def test_a_checkpoint_arrives_as_it_is(store: RemoteStore, tmp_path: Path) -> None:
    path, manifest = checkpoint(tmp_path, num_bytes=10_000_000)
    store.upload(path, manifest, number=1)
    assert list(RemoteStore(store.url).problems(manifest)) == []
    assert [one.step for one in store.manifests()] == [1]


def test_the_speed_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    paced: list[int] = []
    path, manifest = checkpoint(tmp_path, num_bytes=10_000_001)
    store = RemoteStore((tmp_path / "store").as_uri(), is_apart=True, pace=paced.append)
    store.upload(path, manifest, number=1)
    store.close()
    assert sum(paced) == 10_000_001
    assert len(paced) == 3


def test_a_file_that_was_altered_is_no_copy(store: RemoteStore, tmp_path: Path) -> None:
    path, manifest = checkpoint(tmp_path)
    (path / "model.safetensors").write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match="was altered: its checksum does not match"):
        store.upload(path, manifest, number=1)
    assert store.manifests() == []


# -- killed and stopped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_process_that_dies_between_two_calls_is_started_again_and_said_once(
    store: RemoteStore, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    store.overwrite("one", b"1")
    before = process(store)
    before.send_signal(number)
    until(lambda: store._fs.pid is None)
    assert store.read("one") == b"1"
    assert store.read("one") == b"1"
    assert process(store).pid != before.pid
    assert caplog.text.count("it is started again") == 1
    assert f"ended with {number.name}" in caplog.text


def test_process_that_dies_in_a_call_is_an_error_of_that_call(tmp_path: Path) -> None:
    pace = Paused()
    store = RemoteStore((tmp_path / "store").as_uri(), is_apart=True, pace=pace)
    path, manifest = checkpoint(tmp_path)
    failed: list[BaseException] = []

    def upload() -> None:
        try:
            store.upload(path, manifest, number=1)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=upload)
    thread.start()
    assert pace.has_begun.wait(REAL_S)
    process(store).kill()
    pace.goes.set()
    thread.join(REAL_S)
    assert [str(one) for one in failed] == ["the process that speaks to it ended with SIGKILL"]
    assert not is_refusal(failed[0])
    store.upload(path, manifest, number=1)
    assert [one.step for one in store.manifests()] == [1]
    store.close()


def test_process_that_is_stopped_is_error_after_the_limit_and_is_ended(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = process(store)
    monkeypatch.setattr(remote, "CALL_LIMIT_S", 0.5)
    stopped.suspend()
    with pytest.raises(OSError, match=r"has not answered for 0\.5 s"):
        store.names()
    until(lambda: is_gone(stopped))
    monkeypatch.setattr(remote, "CALL_LIMIT_S", REAL_S)
    store.overwrite("one", b"1")
    assert store.names() == ["one"]


def test_a_stopped_process_that_reads_nothing_holds_up_no_writer(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client.ChildProcess.write, "__kwdefaults__", {"limit_s": 0.5})
    process(store).suspend()
    with pytest.raises(ConnectionError, match="ended with SIGKILL"):
        store.overwrite("one", b"x" * 1_000_000)
    store.overwrite("one", b"1")
    assert store.read("one") == b"1"


class ApartBench(Bench):
    """A run whose copies are made by a process."""

    def new_mirror(self) -> Mirror:
        pace = Pace(self.plan.bytes_per_s, self.clock)
        self.store = RemoteStore(self.url, is_apart=True, pace=pace)
        mirror = Mirror(
            self.folder, self.store, self.plan, self.claim, tell=lambda **v: self.told.append(v), clock=self.clock
        )
        pace.sign = mirror.signs.give
        return mirror


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ApartBench]:
    made = ApartBench(tmp_path)
    made.begin()
    yield made
    made.end()
    made.store.close()


def test_the_copies_of_a_run_go_on_in_a_new_process(bench: ApartBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.save(10)
    bench.until_sent(10)
    process(bench.store).kill()
    bench.save(20)
    bench.until_sent_again(20)
    bench.mirror.end()
    assert bench.steps() == [10, 20]
    assert caplog.text.count("SIGKILL") == 1


def test_a_run_with_a_stopped_process_ends_within_a_minute(
    bench: ApartBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "LOOK_S", 0.001)
    bench.save(10)
    bench.until_sent(10)
    stopped = process(bench.store)
    stopped.suspend()
    bench.save(20)
    bench.end()
    assert bench.clock.now() < 60
    assert "has no copy of checkpoint-20: the store does not answer" in caplog.text
    bench.store.close()
    until(lambda: is_gone(stopped))
    until(lambda: not any(one.name == "trainwright-mirror" for one in threading.enumerate()))
    assert bench.steps() == [10]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_at_the_end_the_process_is_gone_and_calls_fail(store: RemoteStore) -> None:
    found = process(store)
    store.close()
    until(lambda: is_gone(found))
    with pytest.raises(ConnectionError, match="the run has ended"):
        store.names()
    until(lambda: not any(one.name == "trainwright-store" for one in threading.enumerate()))


PARENT = """
import os, signal, sys, time
from pathlib import Path
from trainwright.capabilities.mirror.remote import RemoteStore

def wait(num_bytes):
    print(store._fs.pid, flush=True)
    if os.fork() == 0:  # as a worker does, which has the pipe of the run
        time.sleep(100)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

store = RemoteStore(Path(sys.argv[1]).as_uri(), is_apart=True, pace=wait)
Path(sys.argv[2]).write_bytes(b"x" * 10_000_000)
store.put(Path(sys.argv[2]), "journal.jsonl")
"""


def test_process_ends_with_run_that_is_killed_though_worker_has_its_pipe(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    words = f"{sys.executable} {script} {tmp_path}/store {tmp_path}/file > {out} 2> {out}.err"
    run_python("-c", f"import subprocess; subprocess.run({words!r}, shell=True)")
    child = int(out.read_text())
    try:
        until(lambda: not psutil.pid_exists(child) or is_gone(psutil.Process(child)))
    finally:
        for one in psutil.process_iter(["cmdline"]):  # the worker
            if str(script) in (one.info["cmdline"] or ()):
                one.kill()


def test_end_of_run_does_not_wait_for_process_that_hangs_at_start(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client, "MODULE", "tests.checkpoint.hangs_at_start")
    store.reconnect()
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            store.names()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: store._fs.pid is not None)
    found = process(store)
    store.close()
    thread.join(REAL_S)
    assert [type(one) for one in failed] == [ConnectionError]
    assert is_gone(found)


def test_signals_of_a_terminal_or_a_cluster_do_not_reach_it(store: RemoteStore) -> None:
    found = process(store)
    assert os.getsid(found.pid) == found.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        found.send_signal(number)
    store.overwrite("one", b"1")
    assert process(store).pid == found.pid


# -- what it is given --------------------------------------------------------------------------------------------------


def test_nothing_of_the_working_directory_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsspec", "xxhash", "trainwright", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    store = RemoteStore((tmp_path / "store").as_uri(), is_apart=True)
    assert store.is_apart
    store.close()


def test_a_script_without_a_guard_has_one_process_and_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from trainwright.capabilities.mirror.remote import RemoteStore\n"
        "print('begins')\n"
        f"store = RemoteStore('{(tmp_path / 'store').as_uri()}', is_apart=True)\n"
        "store.overwrite('one', b'1')\n"
        "print(store.is_apart, store.names())\n"
    )
    assert run_python(str(script)).stdout == "begins\nTrue ['one']\n"


class OwnFileSystem(LocalFileSystem):  # type: ignore[misc]
    """As a user writes one."""

    protocol = "own"


@pytest.fixture
def register() -> Iterator[Callable[[Any], None]]:
    yield lambda kind: fsspec.register_implementation("own", kind, clobber=True)
    sys.modules["fsspec.registry"]._registry.pop("own", None)  # type: ignore[attr-defined]


def test_a_file_system_in_a_module_of_the_user_is_opened_there(tmp_path: Path, register: Callable[[Any], None]) -> None:
    register(OwnFileSystem)
    assert find_setup("own://x").classes == {"own": f"{__name__}.OwnFileSystem"}
    store = RemoteStore(f"own://{tmp_path}/store", is_apart=True)
    assert store.is_apart
    store.close()


def test_a_file_system_of_the_script_alone_works_here_and_says_so(
    tmp_path: Path, register: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    class Local(OwnFileSystem):
        pass

    register(Local)
    store = RemoteStore(f"own://{tmp_path}/store", is_apart=True)
    assert not store.is_apart
    assert "written by a thread of this process" in caplog.text
    assert "Local is not in a module that another process can import" in caplog.text
    path, manifest = checkpoint(tmp_path)
    store.upload(path, manifest, number=1)
    assert store.names() == ["checkpoint-1-1"]


def test_memory_stays_here_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = RemoteStore("memory://stays/run", is_apart=True)
    assert not store.is_apart
    assert caplog.text == ""


def test_settings_of_fsspec_are_handed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(fsspec.config.conf, "dir", {"path": str(tmp_path), "target_protocol": "file"})
    assert find_setup("dir://x").conf["dir"]["path"] == str(tmp_path)
    assert issubclass(fsspec.get_filesystem_class("dir"), DirFileSystem)
    (tmp_path / "run").mkdir()
    store = RemoteStore("dir://run", is_apart=True)
    assert store.is_apart
    store.overwrite("one", b"1")
    store.close()
    assert (tmp_path / "run" / "one").read_bytes() == b"1"


def test_settings_that_are_no_json_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"session": object()})
    assert "cannot be written as JSON" in find_setup("s3://bucket/run").obstacle


def test_a_process_that_cannot_be_started_leaves_the_work_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_client, "MODULE", "trainwright.no_such_module")
    store = RemoteStore((tmp_path / "store").as_uri(), is_apart=True)
    assert not store.is_apart
    assert "a process of its own cannot be started (ConnectionError" in caplog.text
    assert "exit code 1" in caplog.text


def test_an_unknown_kind_of_store_is_an_error_that_names_it() -> None:
    with pytest.raises(ArgumentError, match=r"nothing://bucket cannot be opened: .*nothing"):
        RemoteStore("nothing://bucket", is_apart=True)


# -- errors ------------------------------------------------------------------------------------------------------------


class NoCredentialsError(Exception):
    """As botocore has one."""


class Answer(RuntimeError):
    """As the client of the Hub raises one: what it got from the server has the status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = type("Response", (), {"status_code": status})


@pytest.mark.parametrize(
    ("error", "kind", "is_final"),
    [
        (FileNotFoundError(2, "No such file"), FileNotFoundError, True),
        (FileExistsError("there"), FileExistsError, False),
        (PermissionError("Access Denied"), PermissionError, True),
        (OSError(122, "Disk quota exceeded"), OSError, False),
        (OSError("Forbidden: https://x"), OSError, True),
        (NoCredentialsError("Unable to locate credentials"), RuntimeError, True),
        (Answer(403), RuntimeError, True),
        (Answer(503), RuntimeError, False),
        (SystemExit(3), RuntimeError, False),
        (KeyError("x"), RuntimeError, False),
        (NotImplementedError("mode"), NotImplementedError, True),
    ],
)
def test_an_error_of_the_client_is_raised_as_it_was(error: BaseException, kind: type, is_final: bool) -> None:
    found = restore_error(describe_error(error))
    assert isinstance(found, kind)
    assert reason(found) == reason(error)
    assert is_refusal(found) is is_final
    if isinstance(error, OSError):
        assert found.errno == error.errno  # type: ignore[attr-defined]


def test_errors_of_calls(store: RemoteStore) -> None:
    store.create("one", b"1")
    with pytest.raises(FileExistsError):
        store.create("one", b"2")
    assert store.read("missing") is None
    assert store.read("one") == b"1"
    assert abs(store.modified("one") - time.time()) < 60
    store.delete(["one", "missing"])
    assert store.names() == []


def test_calls_at_the_same_time_get_their_own_answers(store: RemoteStore) -> None:
    for number in range(20):
        store.overwrite(f"object-{number}", str(number).encode())
    found: dict[int, bytes | None] = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: store.read(f"object-{number}")}))
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(REAL_S)
    assert found == {number: str(number).encode() for number in range(20)}
