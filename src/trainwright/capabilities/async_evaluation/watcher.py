"""`trainwright eval RUN --watch`: makes the evaluations that a run with `eval_async="watch"` asks for.

Several watchers may serve one run. Each claims a request by a file that only one watcher can make; the claim of a
watcher that gives no sign of life for a minute is void.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainwright._types import write_text
from trainwright.capabilities.async_evaluation.requests import (
    EVALUATE,
    LOG,
    WATCHER_GONE_S,
    EvaluationRequest,
    Requests,
    Result,
)
from trainwright.support.door import MAX_SETTINGS, OwnFolder, RelativeName, parse_json

logger = logging.getLogger(__name__)

CLAIM_NAME = "claim.json"
LOOKS_EVERY_S = 0.5
SIGN_EVERY_S = 5.0
LEFT_AFTER_S = 5.0  # the thread that gives signs, on a disk that does not answer

EvaluateFolder = Callable[[Path], dict[str, float]]  # directory with a model -> metrics without a prefix


class Watcher:
    """Makes evaluations of a run until it ends.

    Args:
        run: directory of the run; it may not be there yet.
        evaluate: evaluates the model in a directory.
        clock: seconds.
    """

    def __init__(self, run: Path, evaluate: EvaluateFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = Requests(run)
        self._evaluate = evaluate
        self._clock = clock
        self._id = uuid.uuid4().hex[:8]
        self._claims: dict[str, tuple[str, float]] = {}  # request -> claim of another watcher, and when it was seen

    def watch(self, tell: Callable[[EvaluationRequest, dict[str, Any]], None]) -> int:
        """Evaluates until the run that is under way, or the next one, has ended; returns the number of evaluations.

        Args:
            tell: shows an evaluation and its metrics.
        """
        num = 0
        was_open = False
        with self._giving_signs():
            while self._requests.is_open or not was_open:
                was_open = was_open or self._requests.is_open
                request = self._next()
                if request is None:
                    time.sleep(LOOKS_EVERY_S)
                    continue
                metrics = self._make(request)
                if metrics is not None:
                    tell(request, metrics)
                    num += 1
        return num

    def _next(self) -> EvaluationRequest | None:
        """Claims and returns a request; None if there is none."""
        if not self._requests.is_open:
            return None
        return next((request for request in self._requests.waiting() if self._claim(request.name)), None)

    def _claim(self, name: str) -> bool:
        claim = RelativeName.parse(f"{name}/{CLAIM_NAME}")
        try:
            with OwnFolder(self._requests.folder).open(claim, "xb", makes=False) as file:
                file.write(json.dumps({"watcher": self._id}).encode())
        except FileExistsError:
            return self._takes_over(claim, name)
        except OSError:  # the run has deleted the request
            return False
        return True

    def _takes_over(self, claim: RelativeName, name: str) -> bool:
        """Removes the claim of a watcher that is gone; it is claimed at the next look."""
        own = OwnFolder(self._requests.folder)
        try:
            content = own.read(claim, max_bytes=MAX_SETTINGS)
        except FileNotFoundError:
            return False
        except (OSError, ValueError):  # a link, a pipe: no watcher wrote it
            content = b""
        sign = f"{content!r} {self._last_sign(content)}"
        now = self._clock()
        before, since = self._claims.get(name, ("", now))
        if sign != before:
            self._claims[name] = sign, now
        elif now - since > WATCHER_GONE_S:
            logger.warning("%s was claimed by a process that is gone; it is made here.", own.path(claim).parent)
            with suppress(OSError):
                own.remove(claim)
        return False

    def _last_sign(self, content: bytes) -> str:
        """Returns a value that changes while the owner of a claim is alive."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            owner = RelativeName.parse(f"watcher-{parse_json(content)['watcher']}.json", parts=1)
            return str((self._requests.folder / owner).stat().st_mtime)
        return "gone"

    def _make(self, request: EvaluationRequest) -> dict[str, Any] | None:
        """Evaluates a request and writes its result; None if the run has deleted it meanwhile."""
        place = self._requests.place(request.name)
        events: list[tuple[str, dict[str, Any]]] = []
        metrics: dict[str, Any] = {}
        for prefix in request.parts:
            weights = self._requests.weights(request.name, prefix)
            if not weights.is_dir():
                return None
            found = {f"{prefix}_{name}": value for name, value in self._evaluate(weights).items()}
            found["epoch"] = request.epoch
            events += [(LOG, found), (EVALUATE, found)]
            metrics |= found
        try:
            Result(events=tuple(events), metrics=metrics).write(place)
        except OSError:
            return None
        return metrics

    @contextmanager
    def _giving_signs(self) -> Iterator[None]:
        """Within the context the run, and other watchers, see that this one lives."""
        ends = threading.Event()
        path = self._requests.folder / f"watcher-{self._id}.json"
        about = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})

        def give() -> None:
            while True:
                with suppress(OSError):
                    if self._requests.is_open:
                        write_text(path, about)
                if ends.wait(SIGN_EVERY_S if path.is_file() else LOOKS_EVERY_S):
                    return

        thread = threading.Thread(target=give, name="trainwright-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join(LEFT_AFTER_S)
            with suppress(OSError):
                path.unlink(missing_ok=True)
