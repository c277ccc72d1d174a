"""Reports and comparisons: made of real journals, self-contained, and opened in a browser where there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainwright.cli.main import app
from trainwright.journal.record import FileJournal, Record, read
from trainwright.report.comparison import comparison, differing_arguments, first_difference, partings, read_runs
from trainwright.report.page import card, document, figure, grid, thinned
from trainwright.report.run_page import (
    NUM_POINTS,
    Curve,
    charts,
    described,
    facts,
    page,
    place,
    tables,
    throughput,
    time_by_phase,
    write_report,
)
from trainwright.report.run_table import find_runs

from .._support.small import data, make_trainer, train

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a <run>"
    train(
        make_trainer(
            folder,
            max_steps=6,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset=data.vectors(4),
            save_strategy="steps",
            save_steps=2,
            run_name="<script>alert(1)</script>",
            hub_token="hf_secret",
        )
    )
    return folder


@pytest.mark.costly
def test_a_report_shows_what_the_journal_has_and_asks_no_address(run: Path) -> None:
    FileJournal(run, read(run).run_id).write("incident", step=3, text="a loss was not finite")
    text = write_report(run).read_text(encoding="utf-8")
    for said in (
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Throughput, samples/s",
        "Finished",
        "step 6 of 6",
        "Best loss",
        "26 rows",
        "4 to evaluate",
        "Peak memory",
        "Returns<wbr>Dict",
        "Where the time went",
        "Checkpoints",
        "Environment",
        ">torch</",
        "26 samples, ",
        "learning_rate",
        "a loss was not finite",
    ):
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
        assert str(float(f"{value:.7g}")) in text


def of(losses: dict[int, float], **arguments: Any) -> Record:
    start = {"kind": "start", "run": "a", "step": 0, "arguments": arguments}
    return Record("a", [start], {"loss": dict(losses)})


def test_a_bad_step_and_the_warning_with_its_text_are_one_row() -> None:
    record = of({1: 3.0})
    told = [("incident", 3, "Step 3: bad"), ("warning", 5, "Step 3: bad"), ("warning", 6, "another")]
    record.entries.extend({"kind": kind, "step": step, "text": text} for kind, step, text in told)
    (shown,) = [part for part in tables(record) if "Incidents" in part]
    assert (shown.count("Step 3: bad"), shown.count("another")) == (1, 1)


def test_head_and_table_of_runs_begin_with_the_metrics_of_the_task(tmp_path: Path) -> None:
    for name, seed, accuracy in (("one", 1, 0.75), ("two", 2, 0.875)):
        journal = FileJournal(tmp_path / name, name)
        journal.write("start", step=0, arguments={"seed": seed, "output_dir": name}, plan={"max_steps": 4})
        journal.write("log", step=4, values={"loss": 0.5})
        values = {"eval_loss": 0.25, "eval_accuracy": accuracy, "eval_runtime": 3.0}
        journal.write("evaluation", step=4, values=values)
        journal.write("end", step=4)
    found = {one.name: one for one in find_runs(tmp_path)}
    assert found["one"].metrics == {"loss": 0.25, "accuracy": 0.75}
    assert [found[name].arguments for name in ("one", "two")] == [{"seed": 1}, {"seed": 2}]
    shown = list(facts(read(tmp_path / "two"), "two"))
    assert ("Best loss", "0.25", "at step 4") in shown
    assert ("Accuracy", "0.875", "at step 4") in shown


def test_comparison_says_for_each_pair_where_losses_part_and_which_arguments_differ() -> None:
    runs = {
        "one": of({1: 3.0, 2: 2.0, 3: 1.0}, seed=1, output_dir="a"),
        "two": of({1: 3.0, 2: 2.0 + 1e-9, 3: 1.5}, seed=2, output_dir="b"),
        "late": of({2: 2.5, 3: 1.5}, seed=2),
        "apart": of({7: 1.0}, seed=2),
    }
    found = {pair.runs: str(pair) for pair in partings(runs)}
    assert found[("one", "two")] == "diverge at step 3: 1 and 1.5"
    assert found[("two", "late")] == "diverge at step 2: 2 and 2.5"
    assert found[("one", "apart")] == "no step that both logged"
    assert (first_difference(runs), len(found)) == (2, 6)
    assert first_difference(runs, tolerance=0.3) == 3
    assert differing_arguments(runs) == {"seed": [1, 2, 2, 2]}
    same = {"one": runs["one"], "again": of({1: 3.0, 2: 2.0, 3: 1.0})}
    assert str(partings(same)[0]) == "the same losses at all 3 steps that both logged"
    assert first_difference(same) is None
    text = comparison(runs)
    for said in ("differ for the first time at step 2", "one and two", "diverge at step 3: 1 and 1.5", "What differs"):
        assert said in text


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (("a/run", "b/run", "other"), ["a/run", "b/run", "other"]),
        (("run", "a/run"), [None, "a/run"]),
        (("x/a/run", "y/a/run"), ["x/a/run", "y/a/run"]),
        (("run", "run"), ["run (1)", "run (2)"]),
    ],
)
def test_runs_of_one_name_are_named_with_the_directories_above(
    places: tuple[str, ...], names: list[str | None], tmp_path: Path
) -> None:
    folders = [tmp_path / one for one in places]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        FileJournal(folder, "a").write("start", step=0)
    found = list(read_runs(folders))
    assert found == [f"{tmp_path.name}/run" if name is None else name for name in names]


def test_charts_of_the_task_come_before_what_is_counted() -> None:
    course = {1: 3.0, 2: 2.0}
    record = of(course)
    names = ("entropy", "eval_entropy", "num_tokens", "eval_num_tokens", "rewards/margins", "eval_rewards/margins")
    record.values |= dict.fromkeys(names, course)
    text = "".join(charts(record))
    places = [text.index(title) for title in (">Rewards<", ">Entropy<", ">Number of tokens<")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("kinds", "wide"), [("n", "0"), ("nn", ""), ("nnn", "0"), ("wnnn", "01"), ("nwnn", "01"), ("wnnnwn", "0145")]
)
def test_of_an_odd_number_of_cards_the_first_has_a_row_alone(kinds: str, wide: str) -> None:
    """The throughput, which is the last, has half a row."""
    text = grid([card(f"card {number}", "", is_wide=kind == "w") for number, kind in enumerate(kinds)])
    assert "".join(re.findall(r'card wide">.*?card (\d)', text)) == wide


def test_a_class_of_ours_is_no_fact_about_the_data() -> None:
    assert described({"train": {"type": "trainwright.cli.x.Samples", "samples": 7}}) == [("train", "7 samples")]
    assert described({"train": {"type": "my.Rows", "samples": 7}}) == [("train", "7 samples, Rows")]


def test_the_page_of_runs_draws_no_speed_of_evaluations() -> None:
    course = {1: 3.0, 2: 2.0}
    runs = {name: of(course) for name in ("one", "two")}
    for record in runs.values():
        record.values |= {"eval_samples_per_second": course, "eval_accuracy": course}
    assert "valuation samples per second" not in comparison(runs)


def test_two_real_runs_part_where_their_seeds_make_them(tmp_path: Path) -> None:
    for name, rate in (("one", 1e-2), ("two", 2e-2)):
        train(make_trainer(tmp_path / name, journal=True, max_steps=4, learning_rate=rate))
    text = comparison(read_runs([tmp_path / "one", tmp_path / "two"]))
    assert "differ for the first time at step 2" in text  # the first loss is from before the first update
    assert "learning_rate" in text


def entries(*given: tuple[str, float, int]) -> Record:
    """A record of entries: kind, time, step."""
    return Record(
        "a",
        [
            {"kind": kind, "time": when, "step": step, "plan": {"total_batch_size": 4}, "text": ""}
            for kind, when, step in given
        ],
    )


def test_throughput_leaves_out_evaluations_and_saves() -> None:
    record = entries(
        ("start", 0, 0),
        ("log", 10, 5),
        ("evaluation", 60, 5),
        ("save", 70, 5),
        ("warning", 79, 9),
        ("log", 80, 10),
        ("evaluation", 99, 12),
        ("log", 100, 15),
    )
    speed, unit = throughput(record)
    assert (unit, list(speed.x), list(speed.y)) == ("samples/s", [5, 10, 15], [2.0, 2.0, 12.0])


def test_time_is_that_of_process_and_of_killed_one_what_journal_shows() -> None:
    record = entries(("start", 0, 0), ("log", 10, 5), ("evaluation", 14, 5), ("save", 15, 5), ("resume", 100, 5))
    record.entries[2]["values"] = {"eval_runtime": 3.0}
    record.entries.append({"kind": "time", "time": 120, "time_by_phase": {"forward": 7.0, "evaluation": 2.0}})
    record.entries.append({"kind": "evaluation", "time": 500, "step": 5, "values": {"eval_runtime": 9.0}})  # later
    found = {phase: seconds for phase, seconds in time_by_phase(record).items() if seconds}
    assert found == {"training": 11.0, "evaluation": 5.0, "saving": 1.0, "forward": 7.0}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("loss", ("Loss", "training")),
        ("eval_loss", ("Loss", "evaluation")),
        ("eval_a_loss", ("Loss", "evaluation a")),
        ("eval_a_b_f1", ("F1", "evaluation a_b")),
        ("loss/web", ("Loss by source", "web")),
        ("eval_a_loss/web", ("Loss by source", "web, evaluation a")),
        ("grad_norm", ("Gradient norm", "training")),
        ("reward/mean", ("Reward", "mean")),
        ("samples/My_code", ("Samples by source", "My_code")),
    ],
)
def test_a_logged_value_has_its_chart_and_its_curve(name: str, found: tuple[str, str]) -> None:
    assert place(name, ["a", "a_b"]) == found


def test_long_run_is_thinned_so_that_peaks_stay_and_page_is_small() -> None:
    steps = list(range(1_000_000))
    x, y = thinned(steps, [1000.123456789 if step == 777_777 else step % 7 for step in steps], 1000)
    assert len(x) == len(y) <= 1000
    assert y[x.index(777_777)] == 1000.123
    curves = [Curve(str(i), steps[:100_000], [1 / (step + 3) for step in steps[:100_000]]) for i in range(4)]
    assert len(document("x", [figure("x", curves, num_points=NUM_POINTS // 4)]).encode()) < 1_500_000


@pytest.mark.costly
def test_the_command_line_writes_both_and_says_what_is_wrong(run: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(run), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert 60_000 < (tmp_path / "r.html").stat().st_size < 1_500_000
    done = runner.invoke(app, ["compare", str(run), str(run), "-o", str(tmp_path / "c.html")])
    assert done.exit_code == 0, done.output
    assert "the same losses at all 6 steps that both logged" in done.output
    done = runner.invoke(app, ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 1
    assert "nowhere" in done.output
