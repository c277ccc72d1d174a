"""The report and the comparison as a person uses them, in a real browser: hover, zoom, smoothing, logarithmic axis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright.journal.record import FileJournal, read
from trainwright.report.run_page import SMOOTHING, write_comparison, write_report

from .browser import BROWSER, DRIVER, WHY_NOT, Browser, browsing

pytest.importorskip("plotly")
pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason=WHY_NOT),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
]
PLOT = "document.querySelectorAll('.js-plotly-plot')[0]"

INSIDE = ("file:", "data:", "blob:", "chrome:")  # the last are the browser's own pictures


def journal(folder: Path, *, worse: float = 0.0) -> Path:
    """The journal of a run of twenty logs; with `worse` the loss goes another way from step 100 on."""
    run = FileJournal(folder, "a")
    run.write("start", step=0, arguments={"learning_rate": 1e-3 + worse}, changed={"learning_rate": 1e-3 + worse},
              environment={"python": "3"}, data={})  # fmt: skip
    for step in range(10, 210, 10):
        loss = 2.0 / step + (worse if step >= 100 else 0)
        run.write("log", step=step, values={"loss": loss, "learning_rate": 1e-3, "grad_norm": 0.5})
        run.write("evaluation", step=step, values={"eval_loss": loss + 0.1})
    run.write("warning", step=50, text="something was odd")
    run.write("save", step=200, best=None)
    run.write("end", step=200)
    run.write("time", time_by_phase={"forward": 3.0, "backward": 6.0})
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    path = write_report(journal(tmp_path / "run"), tmp_path / "report.html")
    browser.requests()
    browser.open(path)
    browser.wait_for(f"{PLOT} && {PLOT}._fullLayout && {PLOT}.calcdata && true")
    return browser


def area(page: Browser) -> dict[str, float]:
    """Where the first chart draws its curves, in the window."""
    found: dict[str, float] = page.run(f"const r = {PLOT}.querySelector('.nsewdrag').getBoundingClientRect();"
                                       "return {x: r.x, y: r.y, width: r.width, height: r.height}")  # fmt: skip
    return found


def press(page: Browser, menu: int, label: str) -> None:
    """Opens a menu of the first chart and chooses an entry."""
    header = f"{PLOT}.querySelectorAll('.updatemenu-header')[{menu}]"
    click_on(page, header)
    entry = f"[...{PLOT}.querySelectorAll('.updatemenu-dropdown-button')].find(b => b.textContent.trim() == '{label}')"
    page.wait_for(f"{entry} && true")
    click_on(page, entry)


def click_on(page: Browser, element: str) -> None:
    box: dict[str, Any] = page.run(f"const r = {element}.getBoundingClientRect();"
                                   "return {x: r.x + r.width / 2, y: r.y + r.height / 2}")  # fmt: skip
    page.click(box["x"], box["y"])


def test_it_is_drawn_and_asks_nobody_for_anything(page: Browser) -> None:
    assert page.run("return document.querySelectorAll('.js-plotly-plot').length") == 3
    text = page.run("return document.body.innerText")
    for said in ("Where the time went", "something was odd", "Checkpoints", "learning_rate"):
        assert said in text
    buttons = page.run("return [...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title)")
    assert "Zoom" in buttons
    assert not [title for title in buttons if "share" in title.lower() or "cloud" in title.lower()]
    outside = [url for url in page.requests() if not url.startswith(INSIDE)]
    assert outside == []


def test_hovering_shows_the_values_of_the_step(page: Browser) -> None:
    box = area(page)
    page.point(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shown = page.wait_for(f"{PLOT}.querySelector('.hoverlayer').textContent")
    assert "loss" in shown
    assert "eval_loss" in shown
    points = page.run(f"return {PLOT}._hoverdata.map(point => [point.data.name, point.x, point.y])")
    found = {name: value for name, _, value in points}
    (step,) = {step for _, step, _ in points}
    assert found == pytest.approx({"loss": 2.0 / step, "eval_loss": 2.0 / step + 0.1})
    assert str(step) in shown


def test_dragging_zooms_in(page: Browser) -> None:
    box = area(page)
    middle = box["y"] + box["height"] / 2
    page.drag((box["x"] + box["width"] * 0.25, middle), (box["x"] + box["width"] * 0.5, middle))
    low, high = page.wait_for(f"{PLOT}._fullLayout.xaxis.range[1] < 150 && {PLOT}._fullLayout.xaxis.range")
    assert 30 < low < high < 150


def test_the_menus_smooth_and_make_the_axis_logarithmic(page: Browser) -> None:
    visible = f"{PLOT}._fullData.map(trace => trace.visible)"
    num = len(page.run(f"return {visible}")) // len(SMOOTHING)
    assert page.run(f"return {visible}") == [True] * num + [False] * (num * (len(SMOOTHING) - 1))
    press(page, 0, f"smoothing {SMOOTHING[-1]:g}")
    page.wait_for(f"{PLOT}._fullData[{num * (len(SMOOTHING) - 1)}].visible")
    assert page.run(f"return {visible}") == [False] * (num * (len(SMOOTHING) - 1)) + [True] * num
    press(page, 1, "log")
    page.wait_for(f"{PLOT}._fullLayout.yaxis.type == 'log'")


def test_the_comparison_lays_the_curves_over_each_other_and_marks_where_they_part(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [journal(tmp_path / "one"), journal(tmp_path / "two", worse=0.5)]
    browser.requests()
    browser.open(write_comparison(runs, tmp_path / "comparison.html"))
    names = browser.wait_for(f"{PLOT} && {PLOT}._fullData && {PLOT}._fullData.map(trace => trace.name)")
    assert set(names) == {"one", "two"}
    text = browser.run("return document.body.innerText")
    assert "differ for the first time at step 100" in text
    assert "learning_rate" in text
    assert browser.run(f"return {PLOT}._fullLayout.shapes[0].x0") == 100
    assert [url for url in browser.requests() if not url.startswith(INSIDE)] == []


def test_the_journals_of_the_test_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read(journal(tmp_path / "run")).series("loss")[1][0] == pytest.approx(0.2)
