"""The report and the comparison as a person uses them, in a real browser: sizes, modes, hover, zoom, smoothing, log."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from trainwright.journal.record import FileJournal
from trainwright.report import run_page
from trainwright.report.comparison import comparison, read_runs
from trainwright.report.run_page import write_report

from .browser import BROWSER, WHY_NOT, Browser, browsing

pytestmark = [
    pytest.mark.skipif(not BROWSER, reason=WHY_NOT),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
    pytest.mark.process,
]
PLOT = "document.querySelector('.plot')"
CHART = f"{PLOT}.chart"
ALL_PLOTS = "[...document.querySelectorAll('.plot')]"
INSIDE = ("file:", "data:", "blob:", "chrome:")  # the last are the browser's own pictures


def journal(folder: Path, *, worse: float = 0.0) -> Path:
    """The journal of a run of twenty logs; with `worse` the loss goes another way from step 100 on."""
    run = FileJournal(folder, "a")
    facts = {
        "arguments": {"learning_rate": 1e-3 + worse},
        "changed": {"learning_rate": 1e-3 + worse},
        "environment": {"python": "3"},
        "data": {"train": {"samples": 1600}, "eval": {"a": {"samples": 5}, "b": {}}},
        "model": {"class": "A" * 60, "parameters": 1_234_567, "trained_parameters": 1_234_567},
        "plan": {"max_steps": 200, "total_batch_size": 8},
    }
    run.write("start", step=0, **facts)
    for step in range(10, 210, 10):
        loss = math.nan if step == 30 else 2.0 / step + (worse if step >= 100 else 0)
        values = {"loss": loss, "learning_rate": 1e-3 - step * 1e-6, "grad_norm": 1 / step, "loss/web": loss + 1}
        run.write("log", step=step, values=values | {"loss/books": step / 100})
        run.write("evaluation", step=step, values={"eval_a_loss": 2.0 / step + 0.1, "eval_a_accuracy": step / 250})
        run.write("evaluation", step=step, values={"eval_b_loss": 2.0 / step + 0.2, "eval_b_accuracy": step / 300})
        if step == 100:
            run.write("save", step=step, best="checkpoint-100", peak_memory_bytes=1_500_000_000)
            run.write("resume", step=step, checkpoint="checkpoint-100", **facts)
    run.write("warning", step=50, text="something was odd")
    run.write("incident", step=30, text="Step 30: loss or gradient is not finite </script><b>")
    run.write("end", step=200)
    run.write("time", time_by_phase={"forward": 3.0, "backward": 6.0})
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    return write_report(journal(folder / "run"), folder / "report.html")


@pytest.fixture
def page(browser: Browser, written: Path) -> Browser:
    browser.show_as(1280, 900)
    browser.open(written)
    browser.wait_for(f"{PLOT} && {CHART} && true")
    return browser


def area(page: Browser) -> dict[str, float]:
    """Where the first chart draws its curves, in the window."""
    found: dict[str, float] = page.run(
        f"const r = {CHART}.over.getBoundingClientRect();return {{x: r.x, y: r.y, width: r.width, height: r.height}}"
    )
    return found


def click_on(page: Browser, selector: str) -> None:
    box: dict[str, Any] = page.run(
        f"const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        "return {x: r.x + r.width / 2, y: r.y + r.height / 2}"
    )
    page.click(box["x"], box["y"])


def test_it_is_drawn_without_network_access(page: Browser) -> None:
    curves = page.run(
        f"return Object.fromEntries({ALL_PLOTS}.map(p => [p.spec.title, p.spec.curves.map(c => c.name)]))"
    )
    assert curves == {
        "Loss": ["training", "evaluation a", "evaluation b"],
        "Throughput, samples/s": ["samples/s"],
        "Loss by source": ["web", "books"],
        "Accuracy": ["evaluation a", "evaluation b"],
        "Learning rate": ["training"],
        "Gradient norm": ["training"],
    }
    text = page.run("return document.body.innerText")
    for said in (
        "Where the time went",
        "something was odd",
        "Checkpoints",
        "learning_rate",
        "1.23 M parameters",
        "1,600 rows",
        "Best a loss",
        "0.11",
        "resumed once",
        "1.5 GB",
    ):
        assert said in text
    marks = page.run(f"return {PLOT}.spec.marks.map(mark => [mark.step, mark.kind])")
    assert marks == [[100, "best checkpoint"], [100, "resumed"], [30, "incident"]]
    assert page.errors() == []
    assert [url for url in page.requests() if not url.startswith(INSIDE)] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_window_light_and_dark(page: Browser, width: int) -> None:
    shades = []
    for dark in (False, True):
        page.show_as(width, 900, dark=dark)
        page.wait_for(f"{CHART}.width == {PLOT}.clientWidth")
        assert page.run("return document.documentElement.scrollWidth") == width
        assert (
            page.run(
                "return Math.max(...[...document.querySelectorAll('.card, .tile')]"
                ".map(one => one.getBoundingClientRect().right))"
            )
            <= width
        )
        style = "getComputedStyle(document.querySelector('h1'))"
        page.wait_for(f"{CHART}.series[1].stroke() == {style}.getPropertyValue('--c0').trim()")
        shades.append(
            page.run(f"return [{style}.color, {style}.getPropertyValue('--page'), {CHART}.series[1].stroke()]")
        )
    assert all(light != dark for light, dark in zip(*shades, strict=True))


def test_hovering_shows_the_values_of_the_step_and_what_happened_there(page: Browser) -> None:
    box = area(page)
    middle = page.run(f"return {CHART}.valToPos(100, 'x')")
    page.point(box["x"] + middle, box["y"] + box["height"] / 2)
    shown = page.wait_for(f"!{PLOT}.querySelector('.tip').hidden && {PLOT}.querySelector('.tip').innerText")
    for said in ("step 100", "training 0.02", "evaluation a 0.12", "evaluation b 0.22", "100: resumed"):
        assert said in shown


def test_dragging_zooms_all_charts_in(page: Browser) -> None:
    box = area(page)
    middle = box["y"] + box["height"] / 2
    page.drag((box["x"] + box["width"] * 0.25, middle), (box["x"] + box["width"] * 0.5, middle))
    page.wait_for(f"{CHART}.scales.x.max < 150")
    for low, high in page.run(f"return {ALL_PLOTS}.map(p => [p.chart.scales.x.min, p.chart.scales.x.max])"):
        assert 30 < low < high < 150


def test_the_buttons_smooth_and_make_the_axis_logarithmic_also_after_a_reload(page: Browser, written: Path) -> None:
    click_on(page, "[data-smoothing='0.6']")
    click_on(page, "[data-log='Loss']")
    for _ in range(2):
        values = page.wait_for(f"{CHART}.series.length > 4 && {CHART}.data[1]")
        first = 2 / 10
        second = (0.6 * 0.4 * 2 / 10 + 0.4 * 2 / 20) / 0.64
        gap = None
        third = values[3]
        assert values[:4] == [pytest.approx(first), pytest.approx(second), gap, third]
        assert third == pytest.approx((0.6 * 0.64 * second + 0.4 * 2 / 40) / 0.784)
        assert page.run(f"return {CHART}.scales.y.distr") == 3
        page.open(written)
    click_on(page, "[data-smoothing='0']")
    assert page.wait_for(f"{CHART}.series.length == 4 && {CHART}.data[1][1]") == pytest.approx(0.1)


def test_a_page_of_a_run_under_way_loads_itself_again(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FileJournal(tmp_path, "a")
    process = {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}
    run.write("start", step=0, process=process, plan={"max_steps": 9})

    def look_and_end(seconds: float) -> None:
        browser.open(tmp_path / "report.html")
        browser.wait_for("document.body.innerText.includes('Running')")
        run.write("end", step=9)

    monkeypatch.setattr(run_page, "WATCH_S", 1)
    monkeypatch.setattr(run_page, "time", SimpleNamespace(sleep=look_and_end))
    write_report(tmp_path, watch=True)
    browser.wait_for("document.body && document.body.innerText.includes('Finished')")
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text()


def test_comparison_lays_the_curves_over_each_other_and_marks_where_they_part(browser: Browser, tmp_path: Path) -> None:
    runs = [journal(tmp_path / "one"), journal(tmp_path / "two", worse=0.5)]
    (tmp_path / "comparison.html").write_text(comparison(read_runs(runs)))
    browser.open(tmp_path / "comparison.html")
    browser.wait_for(f"{PLOT} && {CHART} && true")
    assert browser.run(f"return {PLOT}.spec.curves.map(curve => [curve.name, curve.dash])") == [["one", 0], ["two", 1]]
    drawn = browser.run(f"return {CHART}.series.slice(1).map(one => [one.dash.length, one.width])")
    assert drawn[0] != drawn[1]  # the upper one has gaps, or is thinner, so both are seen
    text = browser.run("return document.body.innerText")
    assert "diverge at step 100" in text
    assert "learning_rate" in text
    assert browser.run(f"return {PLOT}.spec.marks") == [{"step": 100, "kind": "the losses diverge", "text": ""}]
    assert [url for url in browser.requests() if not url.startswith(INSIDE)] == []
