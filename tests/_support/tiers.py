"""Tiers of the suite: derives the mark `quick` and checks what quick tests do; random order; busy cores; durations.

A test is quick unless a mark takes it out of that tier. While a quick test runs, starting a process and importing a
second framework are errors, so that the tier stays what it says; the marks are in `pyproject.toml`.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NOT_QUICK = ("slow", "gpu", "examples", "process", "framework", "costly")
FRAMEWORKS = frozenset({"sentence_transformers", "setfit", "trl", "lightning", "pytorch_lightning",
                        "deepspeed", "ray", "wandb", "mlflow", "comet_ml", "dvclive", "neptune", "swanlab",
                        "trackio"})  # fmt: skip
_OF_DEPENDENCIES = frozenset({"deepspeed", "ray", "mlflow"})  # transformers imports them where they are installed
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
_FACTS = ("git", "uname", "lscpu")  # a training asks for its commit and platform, joblib for cores; both do without
_SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(1000000))"


class _QuickTest:
    """Test that runs now, if it is quick; keeps refused operations, since the code under test may catch the error."""

    name = ""
    pid = 0
    refused: list[str]


_now = _QuickTest()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Refuses process starts and imports of second frameworks during a quick test; see `sys.addaudithook`."""
    if not _now.name or _now.pid != os.getpid():
        return
    if event == "subprocess.Popen" and args[0] in _FACTS:
        raise FileNotFoundError(f"quick tests run as on a machine without {args[0]}")
    if event in _STARTS:
        sentence = f"a quick test starts a process ({event} {args[0] if args else ''}): mark it `process`"
    elif event == "import" and args[0] in FRAMEWORKS:
        sentence = f"a quick test imports a second framework ({args[0]}): mark it `framework`"
    else:
        return
    _now.refused.append(sentence)
    if threading.current_thread() is threading.main_thread():
        pytest.fail(sentence)
    raise PermissionError(sentence)  # a thread that ends without an error that it can handle makes others wait


def _watch_original() -> None:
    """Refuses to make a trainer of transformers during a quick test; looking at the class is cheap."""
    import transformers

    init = transformers.Trainer.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if _now.name:
            pytest.fail("a quick test makes a trainer of transformers: mark it `framework`")
        init(self, *args, **kwargs)

    transformers.Trainer.__init__ = checked  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--shuffle", type=int, metavar="SEED", help="random order of files, and of tests in each file")
    group.addoption("--busy", action="store_true", help="keep all cores busy with other processes meanwhile")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_audit)
    if hasattr(config, "workerinput") and config.getoption("shuffle") is None:
        config.pluginmanager.register(LongTestsFirst(config.workerinput["workercount"]), "tier-order")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "tier-durations")
        if config.getoption("busy"):
            config.pluginmanager.register(Load(), "tier-load")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("shuffle")
    return None if seed is None else f"random order: --shuffle {seed}"


@pytest.hookimpl(tryfirst=True)  # before a mark expression selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _move_most_cases(items)
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("workers"):  # of a DataLoader
            item.add_marker("process")
        if not any(item.get_closest_marker(name) for name in NOT_QUICK):
            item.add_marker("quick")
    seed = config.getoption("shuffle")
    if seed is not None:
        items[:] = shuffled(items, seed)
    found = sorted((FRAMEWORKS - _OF_DEPENDENCIES) & sys.modules.keys())
    if config.getoption("markexpr") == "quick" and found:
        raise pytest.UsageError(f"collecting the tests imports {', '.join(found)}: import it in the test that needs it")


def _move_most_cases(items: list[pytest.Item]) -> None:
    """Marks most cases of a test with the mark `one_in(n)` as slow: all but the first, and each n-th one after it."""
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            key = str(item.path), getattr(item, "originalname", item.name)
            if seen[key] % mark.args[0]:
                item.add_marker("slow")
            seen[key] += 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Imports without a collector of garbage, which takes more than a second to find none in what they make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    if "transformers" in sys.modules:
        _watch_original()
    gc.collect()
    gc.freeze()  # a collection in a test looks at what tests made, not at all modules: it takes a second otherwise


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Returns the files in random order, and the tests of each; tests of a file stay together for its fixtures."""
    draw = random.Random(seed)
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[str(item.path)].append(item)
    order = list(files.values())
    draw.shuffle(order)
    return [item for tests in order for item in draw.sample(tests, len(tests))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    if not item.get_closest_marker("quick"):
        return (yield)
    _now.name, _now.pid, _now.refused = item.nodeid, os.getpid(), []
    try:
        with _without_engines():
            return (yield)
    finally:
        _now.name = ""


@contextmanager
def _without_engines() -> Iterator[None]:
    """Lets quick tests run as on a machine without DeepSpeed and Ray, which only the slow tests need.

    Accelerate imports the one to unwrap a model, and a search the other to see whether it has its part for searches.
    """
    from accelerate.utils import other

    from trainwright.search import base

    find_spec = base.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other, "is_deepspeed_available", lambda: False)
        patch.setattr(base, "find_spec", lambda name: None if name == "ray" else find_spec(name))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    result = yield
    if _now.name and _now.refused:
        pytest.fail(_now.refused[0])
    return result


class LongTestsFirst:
    """Gives each worker its share of the files that start processes first: none of these is waited for at the end.

    A worker starts with one contiguous part of the tests, see `--dist worksteal`.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @pytest.hookimpl(trylast=True)  # of the tests that a mark expression has selected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[str(item.path)].append(item)
        long, short = [], []
        for tests in files.values():
            (long if any(test.get_closest_marker("process") for test in tests) else short).append(tests)
        items[:] = [
            test
            for worker in range(self.workers)
            for tests in long[worker :: self.workers] + short[worker :: self.workers]
            for test in tests
        ]


class Durations:
    """Sum of the durations of each tier, printed at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = next((name for name in NOT_QUICK if name in report.keywords), "quick")
        self.seconds[kind] += report.duration
        self.tests[kind].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for kind, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{kind}: {len(self.tests[kind])} tests, {seconds:.0f} s in all workers")


class Load:
    """As many spinning processes as cores, for as long as the session lasts."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def pytest_sessionstart(self) -> None:
        command = [sys.executable, "-S", "-c", _SPIN, str(os.getpid())]
        self.processes = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]

    def pytest_sessionfinish(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
