"""A server on this machine that speaks the part of the Hub's API that huggingface_hub uses to upload and to download:
repositories, branches, preupload, large files (LFS), commits, listings, files. It can be slow, refuse, and hang up.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlparse

LARGE = (".safetensors", ".pt", ".pth", ".bin")
TOKEN = "hf_good"
DROP = -1  # a fault in place of a status: the connection ends without an answer


@dataclass
class Repo:
    """One repository: its branches, each a mapping of paths to contents, and what was said of each commit."""

    private: bool = False
    tags: list[str] = field(default_factory=list)
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[tuple[str, str]] = field(default_factory=list)  # branch, message
    added: list[set[str]] = field(default_factory=list)  # the paths of each commit

    @property
    def messages(self) -> list[str]:
        return [message for _, message in self.commits]


@dataclass
class Hub:
    """What the server holds, and how it misbehaves.

    Attributes:
        fault: (method, path) -> a status to answer with, DROP, or None to do as asked. It may wait as long as it likes.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    fault: Callable[[str, str], int | None] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def only(self) -> Repo:
        (repo,) = self.repos.values()
        return repo

    def commits_asked(self) -> int:
        return sum("/commit/" in path for _, path in self.requests)


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def instead_of_the_real_one(monkeypatch: Any) -> Iterator[Hub]:
    """A server that huggingface_hub asks in this process, and that is not waited for after a failure."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http
    from transformers.utils import hub as reference

    with running() as one:
        monkeypatch.setattr(constants, "ENDPOINT", one.url)
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix("https://").partition("/")[2]
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{one.url}/{files}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        impatient = SimpleNamespace(sleep=lambda seconds: None, time=time.time, monotonic=time.monotonic)
        monkeypatch.setattr(_http, "time", impatient)  # the client tries again, but not after seconds
        monkeypatch.setattr(reference, "_hf_api", None)  # transformers keeps the address that it first saw
        yield one


class Refused(Exception):
    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        path = unquote(urlparse(self.path).path)
        body = self._body()
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
        status = self.hub.fault(self.command, path)
        if status == DROP:
            self.close_connection = True
            self.connection.close()
            return
        try:
            if status is not None:
                raise Refused(status)
            with self.hub.lock:
                self._answer(path, body)
        except Refused as refusal:
            self._send(refusal.status, {"error": f"status {refusal.status}"}, {"X-Error-Code": refusal.code})
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client was killed

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, path: str, body: bytes) -> None:
        for method, pattern, answer, is_open in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                if not is_open and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    raise Refused(401)
                answer(self, body, **match.groupdict())
                return
        raise Refused(404)

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _repo(self, name: str) -> Repo:
        if name not in self.hub.repos:
            raise Refused(404, "RepoNotFound")
        return self.hub.repos[name]

    def _branch(self, name: str, revision: str) -> dict[str, bytes]:
        found = self._repo(name).branches.get(revision)
        if found is None and revision == _sha(self._repo(name)):
            found = self._repo(name).branches["main"]
        if found is None:
            raise Refused(404, "RevisionNotFound")
        return found

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        is_there = name in self.hub.repos
        self.hub.repos.setdefault(name, Repo(private=asked.get("private") or asked.get("visibility") == "private"))
        self._send(409 if is_there else 200, {"url": f"{self.hub.url}/{name}", "name": name})

    def make_branch(self, body: bytes, repo: str, branch: str) -> None:
        branches = self._repo(repo).branches
        is_there = branch in branches
        branches.setdefault(branch, dict(branches["main"]))
        self._send(409 if is_there else 201, {})

    def validate(self, body: bytes) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        there = self._branch(repo, revision)
        self._send(
            200,
            {
                "files": [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                        "oid": _oid(there.get(one["path"]), is_large=one["path"].endswith(LARGE)),
                    }
                    for one in json.loads(body)["files"]
                ]
            },
        )

    def batch(self, body: bytes, repo: str) -> None:
        asked = json.loads(body)["objects"]
        place = {"upload": {"href": f"{self.hub.url}/large/"}}
        self._send(
            200,
            {
                "transfer": "basic",
                "objects": [
                    {
                        **one,
                        **(
                            {}
                            if one["oid"] in self.hub.large
                            else {"actions": {"upload": {"href": f"{place['upload']['href']}{one['oid']}"}}}
                        ),
                    }
                    for one in asked
                ],
            },
        )

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400)
        self.hub.large[oid] = body
        self._send(200, {})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        there = self._branch(repo, revision)
        lines = [json.loads(line) for line in body.splitlines()]
        (header,) = (line["value"] for line in lines if line["key"] == "header")
        files = {line["value"]["path"]: self._content(line) for line in lines if line["key"] != "header"}
        there |= files
        made = self._repo(repo)
        made.commits.append((revision, header["summary"]))
        made.added.append(set(files))
        self._send(
            200,
            {
                "commitUrl": f"{self.hub.url}/{repo}/commit/{_sha(made)}",
                "commitOid": _sha(made),
                "pullRequestUrl": None,
            },
        )

    def _content(self, line: dict[str, Any]) -> bytes:
        if line["key"] == "file":
            return base64.b64decode(line["value"]["content"])
        if line["value"]["oid"] not in self.hub.large:
            raise Refused(400)
        return self.hub.large[line["value"]["oid"]]

    def account(self, body: bytes) -> None:
        self._send(200, {"name": "me"})

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        files = [{"rfilename": name} for name in self._branch(repo, revision)]
        self._send(200, {"id": repo, "sha": _sha(self._repo(repo)), "siblings": files, "tags": self._repo(repo).tags})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        self._send(
            200,
            [
                {"type": "file", "path": name, "size": len(content), "oid": _oid(content, is_large=False)}
                for name, content in self._branch(repo, revision).items()
            ],
        )

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        branch = self._branch(repo, revision)
        if path not in branch:
            raise Refused(404, "EntryNotFound")
        tag = hashlib.sha1(branch[path]).hexdigest()
        self._send(200, branch[path], {"ETag": f'"{tag}"', "X-Repo-Commit": _sha(self._repo(repo))})


def _sha(repo: Repo) -> str:
    return hashlib.sha1(str(len(repo.commits)).encode()).hexdigest()


def _oid(content: bytes | None, *, is_large: bool) -> str | None:
    """As git names a file, and the Hub a large one."""
    if content is None:
        return None
    if is_large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_NAME = r"(?P<repo>[^/]+/[^/]+)"
ROUTES: tuple[tuple[str, str, Any, bool], ...] = (
    ("GET", "/api/whoami-v2", _Handler.account, False),
    ("POST", "/api/repos/create", _Handler.create, False),
    ("POST", "/api/validate-yaml", _Handler.validate, True),
    ("POST", f"/api/models/{_NAME}/branch/(?P<branch>.+)", _Handler.make_branch, False),
    ("POST", f"/api/models/{_NAME}/preupload/(?P<revision>.+)", _Handler.preupload, False),
    ("POST", f"/{_NAME}\\.git/info/lfs/objects/batch", _Handler.batch, False),
    ("PUT", "/large/(?P<oid>.+)", _Handler.put, True),
    ("POST", f"/api/models/{_NAME}/commit/(?P<revision>.+)", _Handler.commit, False),
    ("GET", f"/api/models/{_NAME}", _Handler.info, False),
    ("GET", f"/api/models/{_NAME}/revision/(?P<revision>.+)", _Handler.info, False),
    ("GET", f"/api/models/{_NAME}/tree/(?P<revision>[^/]+)", _Handler.tree, False),
    ("HEAD", f"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve, False),
    ("GET", f"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve, False),
)


def commits(method: str, path: str) -> bool:
    return "/commit/" in path


class Fault:
    """Answers the first `times` requests that `fits` with a status."""

    def __init__(self, status: int, fits: Any, *, times: int = 10**6) -> None:
        self.status = status
        self.fits = fits
        self.times = times

    def __call__(self, method: str, path: str) -> int | None:
        if self.times and self.fits(method, path):
            self.times -= 1
            return self.status
        return None


class Gate:
    """Holds up commits until it is opened; from then on they pass."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()

    def __call__(self, method: str, path: str) -> None:
        if commits(method, path):
            self.is_reached.set()
            assert self.is_open.wait(100)
