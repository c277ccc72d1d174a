"""What a person sees: plain lines in a pipe or a file, a bar on a terminal. In processes of their own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path

import pytest

from trainwright.callbacks.progress import readable

from .._support import forked
from .tiny import TINY

SCRIPT = (
    TINY
    + """
from trainwright import Trainer, TrainingArguments
args = TrainingArguments("run", use_cpu=True, report_to="none", num_train_epochs=3, per_device_train_batch_size=2,
                         logging_steps=4, eval_strategy="epoch", save_strategy="no", disable_tqdm=DISABLE)
trainer = Trainer(model=Net(), args=args, train_dataset=items, eval_dataset=items)
trainer.train()
trainer.predict(items)
print("the end", flush=True)
"""
)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "COLUMNS": "100", "TERM": "xterm"}


def script(*, disable: bool = False) -> list[str]:
    return ["-c", SCRIPT.replace("DISABLE", str(disable))]


@pytest.mark.process
@pytest.mark.parametrize("disable", [False, True])
def test_in_a_pipe_there_is_one_plain_line_for_each_log(disable: bool) -> None:
    done = forked.run(script(disable=disable), env=environment())
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "it/s" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "the end"
    assert sum(" eval_loss=" in line for line in lines) == 3
    assert sum(" train_loss=" in line for line in lines) == 1
    assert [re.match(r"step=(\d+)/12 ", line)[1] for line in lines if " loss=" in line] == ["4", "8", "12"]


@pytest.mark.process
def test_on_terminal_there_is_bar_with_latest_values_and_one_for_evaluation() -> None:
    text = on_a_terminal(script())
    assert "\r" in text
    last = re.findall(r"(\d+)/12 \[", text)[-1]
    assert last == "12"
    assert re.search(r"12/12 \[\d+:\d+<00:00, .*steps.*loss [\d.]+, lr [\d.e-]+", text), text
    assert re.search(r"evaluation: .*1/1", text), "a bar for the evaluation"
    lines = [line.rpartition("\r")[2] for line in plain(text).splitlines()]
    head, *rows = [line for line in lines if re.match(r" +(step|\d+/12)  +", line)]
    assert head.split() == ["step", "epoch", "loss", "eval_loss"]
    assert [row.split()[:2] for row in rows] == [["4/12", "1"], ["8/12", "2"], ["12/12", "3"]], (
        "one for each evaluation"
    )
    assert {len(row.split()) for row in rows} == {4}
    assert {len(row) for row in rows} == {len(head)}, "columns stand below each other"
    assert f"\x1b[2m{head}\x1b[0m" in text
    assert "_runtime" not in text
    assert "_per_second" not in text
    assert text.rstrip().endswith("the end")


@pytest.mark.process
def test_warning_in_mid_run_has_line_of_its_own_above_the_bar() -> None:
    warns = """
import logging
from trainwright import TrainerCallback
class Warns(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            logging.getLogger("trainwright.test").warning("look here")
trainer.add_callback(Warns)
trainer.train()
"""
    words = script()
    text = plain(on_a_terminal([words[0], words[1].replace("trainer.train()\n", warns, 1)]))
    (line,) = [line for line in text.splitlines() if "look here" in line]
    assert line.rpartition("\r")[2] == "WARNING trainwright: look here"
    assert re.search(r"12/12 \[", text), "the bar is drawn again"


@pytest.mark.process
def test_no_colours_where_they_are_not_wanted() -> None:
    assert "\x1b[2m" not in on_a_terminal(script(), NO_COLOR="1")


@pytest.mark.process
def test_on_a_terminal_without_a_bar_where_asked_for() -> None:
    text = on_a_terminal(script(disable=True))
    assert "\r" not in text.replace("\r\n", "\n")
    assert text.count(" loss=") == 3


@pytest.mark.process
@pytest.mark.parametrize("disable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_log_level_error_nothing_is_shown(disable: bool) -> None:
    *words, text = script(disable=disable)
    command = [*words, text.replace("use_cpu=True", 'use_cpu=True, log_level="error"')]
    shown = plain(on_a_terminal(command))
    assert "loss" not in shown
    assert "%|" not in shown
    assert "steps" not in shown
    done = forked.run(command, env=environment())
    assert done.stdout.splitlines() == ["the end"], done.stderr


def plain(text: str) -> str:
    """Without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def on_a_terminal(command: list[str], **variables: str) -> str:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # a new one has no columns
    process = forked.start(command, env={**environment(), **variables}, terminal=child)
    os.close(child)
    written = b""
    try:
        while select.select([parent], [], [], 100)[0]:
            try:
                part = os.read(parent, 4096)
            except OSError:  # the terminal is gone with the process
                break
            if not part:
                break
            written += part
    finally:
        os.close(parent)
        code = process.wait(timeout=100)
    assert code == 0, written.decode()
    return written.decode()


def test_what_a_log_looks_like() -> None:
    shown = readable({"loss": 0.123456, "step": 3, "note": "x" * 200, "total_flos": 1e12, "rate": 1e-7}, 100)
    assert shown["loss"] == "0.1235"
    assert shown["rate"] == "1e-07"
    assert shown["step"] == 3
    assert shown["note"].startswith("x" * 100 + "...")
    assert "200 characters" in shown["note"]
    assert "total_flos" not in shown
