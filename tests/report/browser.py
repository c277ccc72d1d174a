"""A browser that a test drives: headless Chromium behind its own driver, spoken to in the WebDriver protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._support.two_processes import free_port

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WHY_NOT = "there is no browser: apt-get install chromium chromium-driver"
SIZE = (1200, 900)


class Browser:
    """One window.

    Args:
        session: address of the driver's session.
    """

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, path: Path) -> None:
        self._post("url", {"url": path.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *, timeout_s: float = 60.0) -> Any:
        """The first value of an expression that counts as true."""
        limit = time.monotonic() + timeout_s
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < limit, f"never came true: {script}"
            time.sleep(0.1)
        return value

    def point(self, x: float, y: float) -> None:
        self._act([self._move(x - 3, y), self._move(x, y)])

    def click(self, x: float, y: float) -> None:
        self._act([self._move(x, y), {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}])

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        moves = [self._move(*middle), self._move(*end)]
        self._act(
            [self._move(*start), {"type": "pointerDown", "button": 0}, *moves, {"type": "pointerUp", "button": 0}]
        )

    def requests(self) -> list[str]:
        """The addresses that pages asked for since the last call."""
        entries = self._post("se/log", {"type": "performance"})
        said = [json.loads(entry["message"])["message"] for entry in entries]
        return [one["params"]["request"]["url"] for one in said if one["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path) -> None:
        with urllib.request.urlopen(f"{self._session}/screenshot", timeout=60) as answer:
            path.write_bytes(base64.b64decode(json.load(answer)["value"]))

    @staticmethod
    def _move(x: float, y: float) -> dict[str, Any]:
        return {"type": "pointerMove", "duration": 60, "x": int(x), "y": int(y)}

    def _act(self, actions: list[dict[str, Any]]) -> None:
        self._post("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def _post(self, command: str, values: dict[str, Any]) -> Any:
        return post(f"{self._session}/{command}", values)


def post(address: str, values: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(values).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()[:500]) from error


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`."""
    assert BROWSER, WHY_NOT
    assert DRIVER, WHY_NOT
    port = free_port()
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    session = ""
    try:
        _wait_until_up(address)
        options = {
            "binary": BROWSER,
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     f"--user-data-dir={folder}", f"--window-size={SIZE[0]},{SIZE[1]}"],
        }  # fmt: skip
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL"}}
        made = post(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{address}/session/{made['sessionId']}"
        yield Browser(session)
    finally:
        if session:
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=60).close()
        driver.terminate()
        driver.wait(30)


def _wait_until_up(address: str) -> None:
    limit = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{address}/status", timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < limit, "the browser's driver does not answer"
            time.sleep(0.1)
