"""No wait is without a limit, and every child leads a session of its own: a partner that hangs holds no run."""

from __future__ import annotations

import ast

import pytest

from .source_calls import found_in, places_where, unused, without_row

pytestmark = pytest.mark.lint

STREAMS = ("stdin", "stdout", "stderr", "pipe", "sock", "conn")
RUNS = ("run", "call", "check_call", "check_output")
CLIENTS = ("_fs", "_api", "api", "fs")  # of object stores and of the Hub


def has(call: ast.Call, name: str) -> bool:
    """Returns whether a call has a keyword that is not None, or passes on all that it was given."""
    for keyword in call.keywords:
        if keyword.arg is None:
            return True
        if keyword.arg == name:
            return not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
    return False


def limits(call: ast.Call) -> int:
    """Returns the number of positional arguments that are not None."""
    return sum(not (isinstance(one, ast.Constant) and one.value is None) for one in call.args)


def endless_wait(node: ast.AST) -> str | None:
    """Returns the name of a wait without a limit, if a node is one."""
    if isinstance(node, ast.For) and ast.unparse(node.iter).split(".")[-1] in STREAMS[:3]:
        return "for line in a stream"
    if isinstance(node, ast.With) and any("Executor(" in ast.unparse(one.context_expr) for one in node.items):
        return "with Executor"
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    *_, last = name.split(".")
    owner = name.removesuffix(f".{last}")
    is_method = isinstance(node.func, ast.Attribute)
    has_limit = has(node, "timeout") or limits(node) > 0
    if (owner == "subprocess" and last in RUNS) or any(ast.unparse(one) == "subprocess.run" for one in node.args):
        return None if has(node, "timeout") else "subprocess.run"
    if last in ("urlopen", "urlretrieve") or owner in ("requests", "httpx"):
        return None if has(node, "timeout") else last
    if last == "select" and owner == "select":
        return None if len(node.args) > 3 else "select"
    if name == "os.read":
        return "os.read"
    if last in ("wait", "as_completed") and (not is_method or owner in ("futures", "connection", "asyncio")):
        return None if has(node, "timeout") or limits(node) > 1 else last
    if not is_method:
        return None
    if last in ("join", "wait", "acquire", "result", "exception") or last.startswith("recv"):
        return None if has_limit else last
    if last == "get" and not has_limit and not node.keywords:
        return "get"
    if last == "communicate":
        return None if has(node, "timeout") else last
    if last in ("read", "readline", "readlines") and any(stream in owner for stream in STREAMS):
        return last
    if last in ("poll", "select") and (node.args or "poll" in owner) and not has_limit:
        return last
    if last == "shutdown" and not has(node, "wait") and not node.args:
        return last
    if owner.rpartition(".")[2] in CLIENTS:
        return f"call of a store: {last}"
    return None


def careless_child(node: ast.AST) -> str | None:
    """Returns what is wrong with the start of a process, if a node is one: no session, modules of the directory."""
    if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
        is_safe = len(node.elts) > 1 and ast.unparse(node.elts[1]) in ("'-P'", "'-I'")
        return None if is_safe else "Python without -P"
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    if node.args and ast.unparse(node.args[0]) == "sys.executable":
        is_safe = len(node.args) > 1 and ast.unparse(node.args[1]) == "'-P'"
        return None if is_safe else "Python without -P"
    is_start = name.startswith("subprocess.") and name.rpartition(".")[2] in ("Popen", *RUNS)
    if is_start or name.rpartition(".")[2] in ("start_process", "create_subprocess_exec", "create_subprocess_shell"):
        return None if has(node, "start_new_session") else "no session of its own"
    return name if name in ("os.system", "os.popen", "os.spawnv") else None


OWN_THREAD = "a thread of ours that is a daemon waits for work, which another one of ours gives it or ends it"
NO_WAIT = "no wait: "
# Where something waits without a limit -> why it may.
EXCEPTIONS = {
    "checkpoint.async_writer.CheckpointWriter": "the writer of a checkpoint, whose data would be lost",
    "capabilities.mirror.remote.RemoteStore._blocks": "each request of the pool has a limit",
    "capabilities.mirror.remote.RemoteStore.found": "each request of the pool has a limit",
    "capabilities.mirror.remote.RemoteStore._forget_listings": NO_WAIT + "the client forgets what it remembers",
    "capabilities.mirror.remote.RemoteStore.close": NO_WAIT + "the process of the client is killed",
    "capabilities.mirror.remote.RemoteStore.reconnect": NO_WAIT + "the process of the client is killed",
    "capabilities.mirror.store_process.StoreCalls.send_file.pace: get": "it waits for its run, and is ended with it",
    "command_line.answers_alone": NO_WAIT + "a context variable",
    "command_line.print_text": NO_WAIT + "a context variable",
    "cli.ask._next_line": "standard input, which the user writes to; Ctrl-D ends it",
    "cli.mcp_server._end: wait": "within `asyncio.wait_for`",
    "cli.mcp_server.run_command: wait": "within `asyncio.timeout`",
    "cli.tasks.applied.rows_at": "standard input, which the user gives to the command, as to `cat`",
    "data.bad_sample.request_stack: os.read": NO_WAIT + "after a poll with a limit",
    "data.prepared_dataloader.EndsWhenTold._wait": "a daemon of a worker, whose pipe closes when the run ends",
    "distributed.collectives.start_total.receive: wait": "another process, whose standstill `hang_timeout` ends",
    "distributed.device.synchronize": "the device, whose standstill `hang_timeout` ends",
    "evaluation.eval_loop.PredictionAccumulator.output": NO_WAIT + "a metric's result",
    "evaluation.nested_collector.NestedCollector.result": NO_WAIT + "collected rows",
    "capabilities.async_evaluation.evaluators.EvaluationProcess._work: get": OWN_THREAD,
    "hub.uploader.UploadQueue._run": OWN_THREAD,
    "hub.uploader.Uploader._repo": "its client has limits; at the end `Uploader._wait` has one for all of it",
    "hub.uploader.Uploader._upload": "its client has limits; at the end `Uploader._wait` has one for all of it",
    "hub.uploader.Uploader.finish: exception": NO_WAIT + "the upload is done",
    "journal.record.OpenFile.__init__: os.read": NO_WAIT + "a regular file",
    "run.checkpointing.Checkpointer.load_newest: wait": "the writer of a checkpoint, whose data would be lost",
    "capabilities.async_evaluation.process.main: get": "it waits for its run, and is ended with it by its other thread",
    "support.child_process.ChildProcess.next_line": NO_WAIT + "after a poll with a limit",
    "support.child_process.ParentPipes.lines: os.read": NO_WAIT + "after a poll with a limit",
    "support.deadline.call_within": NO_WAIT + "the call has ended",
    "trackers.base._make_next": OWN_THREAD,
    "trackers.services.TrackioCallback.setup": NO_WAIT + "a context variable",
    "trainer.Trainer._finalize_training: wait": "the writer of a checkpoint, whose data would be lost",
    "trainer.Trainer._load_rng_state: wait": "the writer of the checkpoint that is read, whose data would be lost",
    "trainer.Trainer.push_to_hub": "the user asked to wait for it (blocking=True), as in transformers",
}
CHILDREN: dict[str, str] = {}  # where a child has no session of its own, or modules of the directory -> why


def test_every_wait_has_a_limit() -> None:
    assert without_row(places_where(endless_wait), EXCEPTIONS) == []


def test_every_child_leads_a_session_and_imports_nothing_of_the_directory() -> None:
    assert without_row(places_where(careless_child), CHILDREN) == []


def test_every_exception_is_used() -> None:
    assert unused(places_where(endless_wait), EXCEPTIONS) == []
    assert unused(places_where(careless_child), CHILDREN) == []


@pytest.mark.parametrize(
    "code",
    [
        "thread.join()",
        "event.wait()",
        "event.wait(None)",
        "event.wait(timeout=None)",
        "jobs.get()",
        "lock.acquire()",
        "pipe.recv()",
        "socket.recv_bytes()",
        "process.stdout.readline()",
        "sys.stdin.read()",
        "job.result()",
        "process.communicate()",
        "subprocess.run(words)",
        "subprocess.check_output(words)",
        "functools.partial(subprocess.run, check=True)",
        "select.select(a, b, c)",
        "poll.poll()",
        "urllib.request.urlopen(url)",
        "requests.get(url)",
        "futures.wait(jobs)",
        "os.read(number, 1)",
        "self._fs.info(path)",
        "self._api.create_repo(name)",
        "for line in process.stdout: pass",
        "with ThreadPoolExecutor(2) as pool: pass",
    ],
)
def test_the_law_sees(code: str) -> None:
    assert found_in(code, endless_wait)


@pytest.mark.parametrize(
    "code",
    [
        "', '.join(names)",
        "thread.join(5)",
        "event.wait(timeout=5)",
        "values.get(name)",
        "jobs.get(timeout=1)",
        "subprocess.run(words, timeout=5)",
        "futures.wait(jobs, timeout=1)",
        "requests.get(url, timeout=1)",
        "file.read()",
        "self._ask(self._fs.info, path)",
    ],
)
def test_the_law_leaves(code: str) -> None:
    assert not found_in(code, endless_wait)


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.Popen(words)",
        "start_process(words)",
        "subprocess.run(words, timeout=5)",
        "[sys.executable, '-m', 'pip']",
        "run(sys.executable, '-m', 'pip')",
        "os.system(text)",
    ],
)
def test_the_law_sees_children(code: str) -> None:
    assert found_in(code, careless_child)
