"""The site is built without a warning, has every argument, fits a phone, and its search finds the right page first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainwright import TrainingArguments

from .._support.subprocesses import run_python
from ..report.browser import BROWSER, WHY_NOT, browsing

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,  # `make lint` builds the site too, and fails at a warning
    pytest.mark.timeout(300),
]
FIRST_PAGE = {
    "early stopping": "fine_tune/",
    "multi-GPU": "distributed/",
    "custom dataset": "tutorials/own_model/",
    "gradient accumulation": "fine_tune/",
    "confusion matrix": "tutorials/classify/",
    "lora": "tutorials/converse/",
    "qlora": "tutorials/converse/",
    "overfitting": "after_first_result/",
    "docker": "troubleshooting/",
    "gguf": "use_the_model/",
    "onnx": "use_the_model/",
    "inference": "use_the_model/",
    "gpu": "gpu/",
    "wandb": "watching/",
}
TYPE = """
const input = document.querySelector(".md-search__input");
input.focus();
input.value = "%s";
input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
"""
PATHS = (
    """[...document.querySelectorAll(".md-search-result__link")].map(link => new URL(link.href).pathname.slice(1))"""
)


TOO_WIDE = """
const right = document.querySelector(".md-content__inner").getBoundingClientRect().right + 1;
const tables = [...document.querySelectorAll(".md-typeset table")];
return tables.filter(table => table.getBoundingClientRect().right > right).length;
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the theme is not installed: pip install -e .[more] -c constraints.txt")
    folder = tmp_path_factory.mktemp("site")
    run_python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder), cwd=ROOT, timeout_s=290)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    pages = {name: (site / f"reference/{name}/index.html").read_text() for name in ("trainer", "arguments")}
    for field in fields(TrainingArguments):
        assert f"<code>{field.name}</code>" in pages["arguments"]
        assert f'id="{field.name}"' in pages["arguments"], "each has a link"
    assert "hyperparameter_search" in pages["trainer"]
    first = [
        pages["trainer"].index(f'id="trainwright.trainer.Trainer.{name}"') for name in ("train", "predict", "steps")
    ]
    assert first == sorted(first)
    assert "e+09" not in pages["arguments"]


@pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
def test_the_search_finds_the_right_page_first(address: str, tmp_path: Path) -> None:
    found = {}
    with browsing(tmp_path) as browser:
        for words in FIRST_PAGE:
            browser.call("Page.navigate", url=address)
            browser.wait_for("document.readyState == 'complete' && location.protocol == 'http:'")
            browser.wait_for("document.querySelector('.md-search__input') !== null")
            browser.run(TYPE % words)
            found[words] = browser.wait_for(f"({PATHS})[0]")
    assert found == FIRST_PAGE


@pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
def test_no_table_is_wider_than_its_page(site: Path, tmp_path: Path) -> None:
    wide = {}
    with browsing(tmp_path) as browser:
        for width in (390, 768, 1280):
            browser.show_as(width, 844)
            for page in sorted(site.rglob("index.html")):
                browser.open(page)
                if number := browser.run(TOO_WIDE):
                    wide[f"{page.parent.relative_to(site)} at {width}"] = number
    assert not wide
