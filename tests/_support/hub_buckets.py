"""A stand-in for buckets of the Hugging Face Hub, which no package serves: answers `HfFileSystem`, in this process.

It is written after what the client of huggingface_hub 2.4 sends, not after the Hub. It lists, reads parts, and takes
batches of additions and deletions over HTTP. Uploads go to a service of their own, Xet, through a library in Rust: the
double `XetSession` takes their place, and hands the bytes to the server by their hash. So Xet itself is not tested.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest

BUCKET = "user/name"


class Hub:
    """What the bucket holds, and how the server answers."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, str, str]] = {}  # content, hash, and time of the upload, by path
        self.contents: dict[str, bytes] = {}  # uploads by their hash
        self.status: int | None = None  # of each answer, instead of the right one
        self.lock = threading.Lock()

    def batch(self, lines: list[dict[str, Any]]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        with self.lock:
            for one in lines:
                if one["type"] == "addFile":
                    self.files[one["path"]] = self.contents[one["xetHash"]], one["xetHash"], now
                elif one["type"] == "deleteFile":
                    self.files.pop(one["path"], None)

    def tree(self, prefix: str, *, recursive: bool) -> list[dict[str, Any]]:
        with self.lock:
            found = sorted(self.files.items())
        entries: dict[str, dict[str, Any]] = {}
        for path, (content, digest, when) in found:
            if prefix and path != prefix and not path.startswith(f"{prefix}/"):
                continue
            inner = path.removeprefix(prefix).lstrip("/")
            if "/" in inner and not recursive:
                folder = f"{prefix}/{inner.partition('/')[0]}".lstrip("/")
                entries[folder] = {"type": "directory", "path": folder, "uploadedAt": when}
            else:
                about = {"type": "file", "path": path, "size": len(content), "xetHash": digest}
                entries[path] = about | {"mtime": when, "uploadedAt": when}
        return list(entries.values())


class XetSession:
    """Stands in for a session of hf_xet."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    @contextmanager
    def new_upload_commit(self, **kwargs: Any) -> Iterator[XetSession]:
        yield self

    def start_upload_file(self, path: str, **kwargs: Any) -> Any:
        return self.start_upload_bytes(Path(path).read_bytes())

    def start_upload_bytes(self, content: bytes, **kwargs: Any) -> Any:
        digest = hashlib.sha256(content).hexdigest()
        self.hub.contents[digest] = content
        found = SimpleNamespace(xet_info=SimpleNamespace(hash=digest, file_size=len(content)))
        return SimpleNamespace(result=lambda: found)


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serves a bucket, `hf://buckets/user/name`, to clients of this process."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def answer_json(self, value: Any, status: int = 200, **headers: str) -> None:
            self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

        def is_answered(self) -> bool:
            if hub.status is not None:
                self.answer_json({"error": "this is a test"}, hub.status)
            return hub.status is not None

        def do_GET(self) -> None:
            url = urlparse(self.path)
            path = unquote(url.path)
            if self.is_answered():
                return
            if path.startswith("/api/buckets/") and not path.startswith(f"/api/buckets/{BUCKET}"):
                self.answer_json({"error": "no such bucket"}, 404, X_Error_Code="RepoNotFound")
            elif path.startswith(f"/api/buckets/{BUCKET}/tree"):
                prefix = path.removeprefix(f"/api/buckets/{BUCKET}/tree").lstrip("/")
                recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() == "true"
                self.answer_json(hub.tree(prefix, recursive=recursive))
            elif path == f"/api/buckets/{BUCKET}":
                about = {"private": True, "createdAt": "2026-01-01T00:00:00Z", "size": 0, "totalFiles": len(hub.files)}
                self.answer_json({"id": BUCKET, **about})
            else:
                self.send_file(path.removeprefix(f"/buckets/{BUCKET}/resolve/"))

        def send_file(self, path: str) -> None:
            if path not in hub.files:
                self.answer_json({"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
                return
            content = hub.files[path][0]
            wanted = self.headers.get("range")
            if wanted is None:
                self.answer(200, content)
                return
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            part = content[int(start) : int(last) + 1]
            self.answer(206, part, Content_Range=f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}")

        def do_POST(self) -> None:
            lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
            if not self.is_answered():
                hub.batch([json.loads(line) for line in lines])
                self.answer_json({"failed": []})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._xet.get_xet_session", lambda: XetSession(hub))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
