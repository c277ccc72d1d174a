"""Tiers of the suite: derives their marks, checks that quick tests stay quick, and keeps cores busy on request.

A test is quick unless a mark takes it out of that tier, or its recorded CPU time (`costs.py`): one that costs much is
left to `make more`, and of many cases those for which there is no time. Of the tests with another mark, the first case
of each file is a smoke test, unless it costs too much or the file marks one itself. `make test` runs the quick and the
smoke tests, `make more` the others but for the slow ones. While a quick test runs, starting a process and importing a
second framework are errors, so that the tier stays what it says; the marks are in `pyproject.toml`.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from . import costs

NOT_QUICK = ("slow", "gpu", "lint", "more", "examples", "process", "framework", "costly")
NOT_SMOKE = ("quick", "slow", "gpu", "lint", "more")
# CPU seconds in `make test`, by which it takes five minutes on two cores: of a quick test, of all cases of one, and of
# the first test of a file with processes or frameworks.
QUICK_LIMIT_S = 0.2
CASES_LIMIT_S = 0.5
SMOKE_LIMIT_S = 4.0
RULES = Path(__file__).parents[1] / "sources"  # what `make lint` reads from the sources
FRAMEWORKS = frozenset(
    {
        "comet_ml",
        "deepspeed",
        "dvclive",
        "lightning",
        "mlflow",
        "neptune",
        "pytorch_lightning",
        "ray",
        "sentence_transformers",
        "setfit",
        "swanlab",
        "trackio",
        "trl",
        "wandb",
    }
)
_OF_DEPENDENCIES = frozenset({"deepspeed", "ray", "mlflow"})  # transformers imports them where they are installed
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
# A training asks for its commit and platform, joblib for cores, matplotlib for fonts; all do without an answer.
_FACTS = ("git", "uname", "lscpu", "fc-list")
_NEEDS_NO_MARK = pytest.StashKey[bool]()  # set for a quick test, and for one that is only left out for its cost
_NUM_CASES = pytest.StashKey[defaultdict[tuple[str, str], int]]()  # of each test with the mark `one_in`
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
    group.addoption("--busy", action="store_true", help="keep all cores busy with other processes while the tests run")
    group.addoption("--store-costs", action="store_true", help="write what the tests cost to tests/costs.json")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_audit)
    if config.getoption("store_costs"):
        config.pluginmanager.register(costs.CostRecorder(), "tier-costs")
    if config.getoption("busy") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Load(), "tier-load")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Adds the derived marks, before tests are put into another order or selected."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and callspec.params.get("workers"):  # of a DataLoader
        item.add_marker("process")
    if item.path.parent == RULES:
        item.add_marker("lint")
    if _is_left_to_the_slow_tests(item):
        item.add_marker("slow")


def _is_left_to_the_slow_tests(item: pytest.Item) -> bool:
    """Returns whether a case of a test marked `one_in(n)` is neither the first one nor an n-th one after it."""
    mark = item.get_closest_marker("one_in")
    if mark is None:
        return False
    num_cases = item.session.stash.setdefault(_NUM_CASES, defaultdict(int))
    test = str(item.path), getattr(item, "originalname", item.name)
    num_cases[test] += 1
    return (num_cases[test] - 1) % mark.args[0] != 0


def _mark_quick_tests(items: list[pytest.Item]) -> None:
    by_test = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not any(item.get_closest_marker(name) for name in NOT_QUICK):
            by_test[costs.test_name(item.nodeid)].append(item)
    for cases in by_test.values():
        affordable = affordable_cases(costs.cost_s(cases[0]), len(cases))
        for index, item in enumerate(cases):
            item.stash[_NEEDS_NO_MARK] = True
            item.add_marker("quick" if index in affordable or item.get_closest_marker("smoke") else "more")


def affordable_cases(cost_s: float, num_cases: int) -> set[int]:
    """Returns the cases of a test for which `make test` has time, spread evenly from the first on.

    Args:
        cost_s: CPU seconds of one case; 0.0 where it costs little.
        num_cases: of the test; 1 for a test without cases.
    """
    if cost_s > QUICK_LIMIT_S:
        return set()
    count = num_cases
    if cost_s:
        count = min(num_cases, max(1, int(CASES_LIMIT_S / cost_s)))
    return {index * num_cases // count for index in range(count)}


def _mark_smoke_tests(items: list[pytest.Item]) -> None:
    by_file = defaultdict[Path, list[pytest.Item]](list)
    for item in items:
        if not any(item.get_closest_marker(name) for name in NOT_SMOKE):
            by_file[item.path].append(item)
    chosen = {item.path for item in items if item.get_closest_marker("smoke")}
    for path, found in by_file.items():
        if path not in chosen and costs.cost_s(found[0]) <= SMOKE_LIMIT_S:
            found[0].add_marker("smoke")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the marks that depend on other tests, before tests are put into another order or selected."""
    _mark_quick_tests(items)
    _mark_smoke_tests(items)
    found = sorted((FRAMEWORKS - _OF_DEPENDENCIES) & sys.modules.keys())
    if config.getoption("markexpr") in ("quick", "quick or smoke") and found:
        raise pytest.UsageError(f"collecting the tests imports {', '.join(found)}: import it in the test that needs it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Collects the tests without garbage collection, which takes more than a second and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    if "transformers" in sys.modules:
        _watch_original()
    gc.collect()
    gc.freeze()  # a collection in a test skips the modules, which would take it a second


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    if not item.stash.get(_NEEDS_NO_MARK, False):
        return (yield)
    _now.name = item.nodeid
    _now.pid = os.getpid()
    _now.refused = []
    try:
        with _without_engines():
            return (yield)
    finally:
        _now.name = ""


@contextmanager
def _without_engines() -> Iterator[None]:
    """Runs quick tests as on a machine without DeepSpeed and Ray, which only the slow tests need.

    Accelerate would import DeepSpeed to unwrap a model, and a search Ray to see whether Ray Tune is there.
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
