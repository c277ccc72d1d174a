"""What a notebook shows, in a real kernel: one display with bar and table; results, plans and arguments as tables."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from trainwright import TrainingArguments
from trainwright.callbacks.notebook import MAX_ROWS, MetricsTable

from .._support import kernel
from .._support.kernel import Kernel, Output
from .tiny import TINY

SETUP = (
    "%xmode Minimal"
    + TINY
    + """
import os, signal, time
from trainwright import Trainer, TrainerCallback, TrainingArguments
def accuracy(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean()), "<b>": 1}
def trainer(eval_dataset=items, callbacks=(), **settings):
    settings = {"max_steps": 12, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no",
                **settings}
    args = TrainingArguments("run", use_cpu=True, report_to="none", per_device_train_batch_size=2, preflight=False,
                             hub_token="hf_" + "secret" * 5, **settings)
    return Trainer(model=Net(), args=args, train_dataset=items, eval_dataset=eval_dataset, compute_metrics=accuracy,
                   callbacks=list(callbacks))
class Then(TrainerCallback):
    def __init__(self, at, do): self.at, self.do = at, do
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at: self.do()
def wait():  # until the signal that is sent for the line has come
    came = []
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *what: (came.append(1), handler(*what)))
    print("waiting", flush=True)
    while not came: time.sleep(0.01)
def twice():
    for _ in range(2): os.kill(os.getpid(), signal.SIGINT)
"""
)


class Tables(HTMLParser):
    """Cells of the rows of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._is_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._is_cell = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        elif self._is_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = False

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel.running(tmp_path_factory.mktemp("k")) as running:
        assert not running.run(SETUP).of("error")
        yield running


def display_of(notebook: Kernel, code: str) -> Output:
    cell = notebook.run(code)
    [display] = cell.of("display")
    return display


@pytest.mark.more  # `make test` has no kernel of notebooks
@pytest.mark.process
def test_each_run_has_one_display_with_steps_losses_and_metrics_by_set(notebook: Kernel) -> None:
    cell = notebook.run("one = trainer()\none.train()")
    [display] = cell.of("display")
    [result] = cell.of("result")
    rows = Tables(display.html).rows
    assert rows[:2] == [["", "training", "validation"], ["step", "loss", "loss", "accuracy", "<b>"]]
    assert [row[0] for row in rows[2:]] == ["2", "4", "6", "8", "10", "12"]
    assert [bool(row[2]) for row in rows[2:]] == [False, True] * 3
    assert all(re.fullmatch(r"\d\.\d{3,4}", row[1]) for row in rows[2:]), rows
    assert "finished · step 12/12 · epoch 3.00/3" in display.text
    assert cell.num_updates < 12, "no update at each step"
    assert ["global_step", "12"] in Tables(result.html).rows
    assert "train_loss" in result.html
    again = display_of(notebook, "one = trainer(eval_dataset={'near': items, 'far': items}); _ = one.train()")
    rows = Tables(again.html).rows
    assert rows[0] == ["", "training", "validation: near", "validation: far"]
    assert len(rows) == 8
    assert Tables(display.html).rows[0][-1] == "validation", "the first display stays as it was"


@pytest.mark.more  # `make test` has no kernel of notebooks
@pytest.mark.process
def test_a_resume_shows_the_rows_of_the_run_before_it_once(notebook: Kernel) -> None:
    how = "{'save_strategy': 'steps', 'save_steps': 4}"
    cut = f"trainer(callbacks=[Then(7, lambda: setattr(one.control, 'should_training_stop', True))], **{how})"
    display_of(notebook, f"one = {cut}; _ = one.train()")
    for trainer in (f"trainer(**{how})", "one"):  # a new one, and that of the cell before, again
        display = display_of(notebook, f"one = {trainer}; _ = one.train(resume_from_checkpoint='run/checkpoint-4')")
        rows = Tables(display.html).rows[2:]
        assert [row[0] for row in rows] == ["2", "4", "6", "8", "10", "12"], rows
        assert [bool(row[2]) for row in rows] == [False, True] * 3
        assert "finished · step 12/12" in display.text


@pytest.mark.more  # `make test` has no kernel of notebooks
@pytest.mark.process
def test_evaluations_and_predictions_alone_show_their_metrics(notebook: Kernel) -> None:
    shown = display_of(notebook, "_ = trainer(eval_dataset=items).evaluate()")
    assert Tables(shown.html).rows[0] == ["", "validation"]
    assert Tables(shown.html).rows[1][:2] == ["step", "loss"]
    cell = notebook.run("trainer().predict(items)")
    assert Tables(cell.of("display")[0].html).rows[0] == ["", "test"]
    [result] = cell.of("result")
    assert ["predictions", "float32 of shape (8, 2)"] in Tables(result.html).rows
    assert ["label_ids", "int64 of shape (8,)"] in Tables(result.html).rows


@pytest.mark.more  # `make test` has no kernel of notebooks
@pytest.mark.process
def test_an_error_and_a_kernel_interrupt_leave_a_display_that_says_so(notebook: Kernel) -> None:
    cell = notebook.run("trainer(callbacks=[Then(6, lambda: 1 / 0)]).train()")
    assert cell.of("error")[0].text.startswith("ZeroDivisionError")
    assert cell.of("display")[0].text.startswith("failed: ZeroDivisionError · step 6/12")

    def interrupt(output: Output) -> None:
        if "waiting" in output.text:
            notebook.process.send_signal(signal.SIGINT)

    cell = notebook.run("trainer(callbacks=[Then(6, wait)]).train()", seen=interrupt)
    assert cell.of("error")[0].text.startswith("KeyboardInterrupt")
    assert cell.of("display")[0].text.startswith("interrupted · step 6/12")
    assert Tables(cell.of("display")[0].html).rows[-1][0] in ("4", "6")
    cell = notebook.run("trainer(callbacks=[Then(6, twice)]).train()")
    assert cell.of("error")[0].text.startswith("KeyboardInterrupt"), "the kernel lives on"
    assert display_of(notebook, "_ = trainer().train()").text.startswith("finished"), "and trains again"


@pytest.mark.more  # `make test` has no kernel of notebooks
@pytest.mark.process
def test_the_traceback_of_a_mistake_has_the_users_lines_alone(notebook: Kernel) -> None:
    cell = notebook.run("def start():\n    trainer().train(resume_from_checkpoint='nowhere')\n\nstart()")
    shown = cell.of("error")[0].html
    assert "nowhere" in shown.splitlines()[-1]
    assert "trainer().train(resume_from_checkpoint='nowhere')" in shown
    assert "site-packages" not in shown
    assert "src/trainwright" not in shown
    code = """
from trainwright import errors
def read(): raise KeyError('mine')
try: read()
except KeyError as error: raise errors.DataError('ours') from error
"""
    lines = notebook.run(code).of("error")[0].html.splitlines()
    assert lines.index("KeyError: 'mine'") < lines.index("The error above caused this one:")
    assert lines[-1] == "trainwright.errors.DataError: ours"


@pytest.mark.more  # `make test` has no kernel of notebooks
@pytest.mark.process
def test_disable_tqdm_and_log_level_error_show_no_display(notebook: Kernel) -> None:
    cell = notebook.run("_ = trainer(disable_tqdm=True).train()")
    assert not cell.of("display")
    assert sum(output.text.count("step=") for output in cell.of("stdout")) == 10
    cell = notebook.run("_ = trainer(log_level='error').train()")
    assert not cell.of("display")


@pytest.mark.more  # `make test` has no kernel of notebooks
@pytest.mark.process
def test_arguments_and_check_show_tables(notebook: Kernel) -> None:
    [shown] = notebook.run("one = trainer()\none.args").of("result")
    rows = Tables(shown.html).rows
    assert ["max_steps", "12"] in rows
    assert rows.index(["max_steps", "12"]) < rows.index(["adam_beta1", "0.9"])
    assert "<details>" in shown.html
    assert "secret" not in shown.html
    [shown] = notebook.run("one.check(memory=True)").of("result")
    assert any(row[0] == "fine" for row in Tables(shown.html).rows)
    assert "memory of a step" in shown.html


@pytest.mark.smoke
def test_a_table_of_many_logs_is_bounded_and_keeps_evaluations() -> None:
    table = MetricsTable()
    for step in range(1, 1001):
        table.add(step, {"loss": 1.0, "epoch": 1, "learning_rate": 0.1})
        if step % 100 == 0:
            table.add(step, {"eval_loss": 0.5, "eval_runtime": 1.0, "eval_steps_per_second": 9.0})
    shown = [step for step, _ in table.shown()]
    assert len(shown) <= MAX_ROWS
    assert shown[:9] == [*range(100, 1000, 100)]
    assert shown[-3:] == [998, 999, 1000]
    assert f"{len(shown)} of 1000 rows" in table.html()


def test_values_are_escaped_and_tokens_are_not_shown() -> None:
    args = TrainingArguments("<i>run</i>", hub_token="hf_" + "secret" * 5, use_cpu=True)
    shown = args._repr_html_()
    assert "<i>" not in shown
    assert "&lt;i&gt;run&lt;/i&gt;" in shown
    assert "secret" not in shown
    table = MetricsTable()
    table.add(1, {"<script>": "<img src=x>"})
    assert "<script>" not in table.html()
    assert "<img" not in table.html()
