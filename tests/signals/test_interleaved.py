"""Several runs alive in one process: each saves its last step, and the handlers are put back in any order of ends."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainerCallback, get_last_checkpoint
from trainwright.state.interrupts import SIGNALS, Interrupts

from .._support import forked
from .._support.small import make_trainer


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """The signals that reach the test's own handler, which must be there again in the end."""
    numbers: list[int] = []
    before = {number: signal.signal(number, lambda one, _: numbers.append(one)) for number in SIGNALS}
    expected = handlers()
    yield numbers
    left = handlers()
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == expected


def trainer(folder: Path, **settings: Any) -> Any:
    return make_trainer(
        folder, **{"max_steps": 3, "save_strategy": "steps", "save_steps": 100, "log_level": "warning"} | settings
    )


def end(number: int, contexts: list[Any]) -> None:
    contexts[number].__exit__(None, None, None)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_listeners_end_in_any_order(order: tuple[int, ...]) -> None:
    before = handlers()
    listeners = [Interrupts() for _ in order]
    contexts = [listener.listening() for listener in listeners]
    for context in contexts:
        context.__enter__()
    alive = set(order)
    for number in order:
        end(number, contexts)
        alive.remove(number)
        assert (handlers() == before) == (not alive)
        if len(alive) == 1:
            signal.raise_signal(signal.SIGTERM)
            assert {i for i, one in enumerate(listeners) if one.received is not None} == alive


def test_a_listener_that_ends_in_another_thread_passes_on(heard: list[int]) -> None:
    before = handlers()
    context = Interrupts().listening()
    context.__enter__()
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert handlers() != before  # only the main thread can set them
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert handlers() == before
    with Interrupts().listening():
        assert handlers() != before
    assert handlers() == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "second"])
@pytest.mark.parametrize("how", ["closed", "collected", "collected in a thread"])
def test_loops_that_take_turns_put_the_handlers_back(how: str, order: tuple[int, int], tmp_path: Path) -> None:
    before = handlers()
    loops = [trainer(tmp_path / str(number)).steps() for number in range(2)]
    steps = [next(loop) for loop in loops]
    assert handlers() != before
    for number in order:
        if how == "closed":
            loops[number].close()
        else:
            holder = [loops[number]]
            loops[number] = steps[number] = None

            def collect(holder: list[Any] = holder) -> None:
                holder.clear()
                gc.collect()

            if how == "collected":
                collect()
            else:
                thread = threading.Thread(target=collect)
                thread.start()
                thread.join()
    if how == "collected in a thread":
        signal.raise_signal(signal.SIGUSR1)  # reaches the handler from before the runs, and puts all back
    assert handlers() == before


def test_a_training_in_a_callback_leaves_the_outer_one_listening(tmp_path: Path) -> None:
    """A signal after the inner training still ends the outer one at its step, which is saved."""

    class Inner(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer(tmp_path / "inner").train()
                signal.raise_signal(signal.SIGTERM)

    outer = trainer(tmp_path / "outer", max_steps=6, callbacks=[Inner()])
    with pytest.raises(SystemExit) as ended:
        outer.train()
    assert ended.value.code == 143
    assert get_last_checkpoint(tmp_path / "outer") == str(tmp_path / "outer" / "checkpoint-2")


def test_a_signal_in_an_inner_training_saves_both(tmp_path: Path) -> None:
    class Signals(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    class Inner(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer(tmp_path / "inner", callbacks=[Signals()]).train()

    outer = trainer(tmp_path / "outer", max_steps=6, callbacks=[Inner()])
    with pytest.raises(SystemExit) as ended:
        outer.train()
    assert ended.value.code == 143
    assert get_last_checkpoint(tmp_path / "inner") == str(tmp_path / "inner" / "checkpoint-1")
    assert get_last_checkpoint(tmp_path / "outer") == str(tmp_path / "outer" / "checkpoint-2")


@pytest.mark.parametrize("at_step", [1, 2])
def test_one_signal_saves_both_loops_that_take_turns(at_step: int, tmp_path: Path) -> None:
    loops = [trainer(tmp_path / name, max_steps=6).steps() for name in "ab"]
    with pytest.raises(SystemExit) as ended:  # noqa: PT012 -- where it is raised is not said
        for number, pair in enumerate(zip(*loops, strict=True), start=1):
            for step in pair:
                for batch in step.batches:
                    step.backward(step.model(**batch)["loss"])
                if number == at_step and step is pair[0]:
                    signal.raise_signal(signal.SIGTERM)
                step.update()
    assert ended.value.code == 143
    del loops, pair, step, batch
    ended = None  # type: ignore[assignment]  # its traceback holds the loops
    gc.collect()
    for name in "ab":
        assert get_last_checkpoint(tmp_path / name) == str(tmp_path / name / f"checkpoint-{at_step}")


SWALLOWED = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests._support.small import make_trainer
for step in make_trainer(Path("run"), max_steps=6, save_strategy="steps", save_steps=100, log_level="warning").steps():
    for batch in step.batches:
        step.backward(step.model(**batch)["loss"])
    step.update()
    if step.number == 2:
        os.kill(os.getpid(), {number})
        break
step = batch = None
print("LEFT", flush=True)
time.sleep(20)
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_just_before_a_loop_is_left_still_ends_the_process(number: signal.Signals, tmp_path: Path) -> None:
    script = SWALLOWED.format(root=str(Path(__file__).parents[2]), number=int(number))
    done = forked.run(["-c", script], cwd=tmp_path, timeout=60)
    assert "Interrupted by" in done.stderr
    assert done.returncode == -number or (number == signal.SIGINT and "KeyboardInterrupt" in done.stderr)
    assert get_last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-2")


@pytest.mark.process
def test_process_that_is_forked_in_run_has_the_handlers_from_before_it() -> None:
    with Interrupts().listening():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        child = os.fork()
        if child == 0:
            heard = []
            before = signal.getsignal(signal.SIGUSR1)
            with Interrupts().listening():
                pass
            signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)
            os._exit(3 if heard and signal.getsignal(signal.SIGUSR1) != before else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
