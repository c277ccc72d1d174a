"""A browser that a test drives: headless Chromium, spoken to in its own protocol (CDP) over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WHY_NOT = "there is no browser: apt-get install chromium"
SIZE = (1200, 900)


class Browser:
    """One window.

    Args:
        commands: pipe from which Chromium reads.
        answers: pipe to which it writes.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._unread = b""
        self._number = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.show_as(*SIZE)

    def show_as(self, width: int, height: int, *, dark: bool = False) -> None:
        """Gives the window a size, and the page a light or a dark mode."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState == 'complete' && location.protocol == 'file:'")

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        expression = f"(() => {{ {script} }})()"
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, *, timeout_s: float = 60.0) -> Any:
        """The first value of an expression that counts as true."""
        limit = time.monotonic() + timeout_s
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < limit, f"never came true: {script}"
            time.sleep(0.05)
        return value

    def point(self, x: float, y: float) -> None:
        for shift in (3, 0):
            self._mouse("mouseMoved", x - shift, y)

    def click(self, x: float, y: float) -> None:
        self.drag((x, y), (x, y))

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.point(*start)
        self._mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        if start != end:
            self._mouse("mouseMoved", (start[0] + end[0]) / 2, (start[1] + end[1]) / 2, button="left", buttons=1)
            self._mouse("mouseMoved", *end, button="left", buttons=1)
        self._mouse("mouseReleased", *end, button="left", clickCount=1)

    def requests(self) -> list[str]:
        """The addresses that the page asked for since it was opened."""
        self.run("return 1")
        return [one["params"]["request"]["url"] for one in self._events if one["method"] == "Network.requestWillBeSent"]

    def errors(self) -> list[str]:
        """What scripts of the page raised since it was opened."""
        self.run("return 1")
        return [str(one["params"]) for one in self._events if one["method"] == "Runtime.exceptionThrown"]

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        command |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            if "method" in message:
                self._events.append(message)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=int(x), y=int(y), **more)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], 100)
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`."""
    assert BROWSER, WHY_NOT
    for_it, commands = os.pipe()
    answers, from_it = os.pipe()

    def give_pipes() -> None:  # Chromium reads from file 3 and writes to file 4
        reads, writes = (os.dup(os.dup(os.dup(one))) for one in (for_it, from_it))  # copies that are neither 3 nor 4
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    process = subprocess.Popen(command, close_fds=False, preexec_fn=give_pipes, stderr=subprocess.DEVNULL)
    os.close(for_it)
    os.close(from_it)
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(30)
        os.close(commands)
        os.close(answers)
