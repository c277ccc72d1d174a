"""Reports and comparisons: made of real journals, self-contained, and opened in a browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright.cli.main import app
from trainwright.journal.record import FileJournal, Record, read
from trainwright.report.run_page import (
    comparison,
    differing_arguments,
    first_difference,
    page,
    smoothed,
    tables,
    write_comparison,
    write_report,
)

from .._support.small import data, make_trainer, train

pytest.importorskip("plotly")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a <run>"
    train(make_trainer(folder, max_steps=6, eval_strategy="steps", eval_steps=2, eval_dataset=data.vectors(4),
                       save_strategy="steps", save_steps=2, run_name="<script>alert(1)</script>",
                       hub_token="hf_secret"))  # fmt: skip
    return folder


@pytest.mark.costly
def test_a_report_shows_what_the_journal_has_and_asks_no_address(run: Path) -> None:
    FileJournal(run, read(run).run_id).write("incident", step=3, text="a loss was not finite")
    text = write_report(run).read_text(encoding="utf-8")
    for said in ("Loss", "Learning rate", "Grad norm", "Throughput", "Where the time went", "Checkpoints",
                 "Environment", "learning_rate", "a loss was not finite"):  # fmt: skip
        assert said in text
    assert "hf_secret" not in text
    assert "<script>alert(1)" not in text
    own = re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", own)
    assert not re.search(r"<script[^>]*\ssrc=", text)


def test_a_report_has_every_logged_loss(run: Path) -> None:
    record = read(run)
    text = page(record, title="x")
    for value in record.series("loss")[1]:
        assert str(value) in text


@pytest.mark.process
def test_a_browser_draws_it(run: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]  # fmt: skip
    path = write_report(run, tmp_path / "report.html")
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout.count('class="main-svg"') >= 3
    assert "eval_loss" in re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)


@pytest.mark.parametrize(
    ("strength", "expected"), [(0.0, [1.0, 3.0, None, 5.0]), (0.5, [1.0, 7 / 3, None, (0.5 * 1.75 + 2.5) / 0.875])]
)
def test_smoothing_is_a_running_mean_with_gaps_where_nothing_is_finite(strength: float, expected: list[Any]) -> None:
    found = smoothed([1.0, 3.0, float("nan"), 5.0], strength)
    assert [value is None for value in found] == [value is None for value in expected]
    assert [v for v in found if v is not None] == pytest.approx([v for v in expected if v is not None])


def of(losses: dict[int, float], **arguments: Any) -> Record:
    start = {"kind": "start", "run": "a", "step": 0, "arguments": arguments}
    return Record("a", [start], {"loss": dict(losses)})


def test_a_bad_step_and_the_warning_with_its_text_are_one_row() -> None:
    record = of({1: 3.0})
    told = [("incident", 3, "Step 3: bad"), ("warning", 5, "Step 3: bad"), ("warning", 6, "another")]
    record.entries.extend({"kind": kind, "step": step, "text": text} for kind, step, text in told)
    (shown,) = [part for part in tables(record) if "Incidents" in part]
    assert (shown.count("Step 3: bad"), shown.count("another")) == (1, 1)


def test_a_comparison_says_where_the_losses_part_and_which_arguments_differ() -> None:
    runs = {"one": of({1: 3.0, 2: 2.0, 3: 1.0}, seed=1, output_dir="a"),
            "two": of({1: 3.0, 2: 2.0 + 1e-9, 3: 1.5}, seed=2, output_dir="b")}  # fmt: skip
    assert first_difference(runs) == 3
    assert differing_arguments(runs) == {"seed": [1, 2]}
    text = comparison(runs)
    assert "differ for the first time at step 3" in text
    assert first_difference({"one": runs["one"], "again": runs["one"]}) is None


def test_two_real_runs_part_where_their_seeds_make_them(tmp_path: Path) -> None:
    for name, rate in (("one", 1e-2), ("two", 2e-2)):
        train(make_trainer(tmp_path / name, max_steps=4, learning_rate=rate))
    text = write_comparison([tmp_path / "one", tmp_path / "two"], tmp_path / "c.html").read_text(encoding="utf-8")
    assert "differ for the first time at step 2" in text  # the first loss is from before the first update
    assert "learning_rate" in text


@pytest.mark.costly
def test_the_command_line_writes_both_and_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(run), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.html").stat().st_size > 100_000
    done = runner.invoke(app, ["compare", str(run), str(run), "-o", str(tmp_path / "c.html")])
    assert done.exit_code == 0, done.output
    done = runner.invoke(app, ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 1
    assert "nowhere" in done.output
