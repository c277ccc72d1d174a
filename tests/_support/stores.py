"""Object stores for tests: real servers as processes on this machine, and those that need none.

A store that lacks its package is skipped with the reason; the packages belong to the extra `test`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

START_S = 60.0
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Store:
    """One kind of store: what it needs, and a context that yields a fresh URL."""

    packages: tuple[str, ...]
    url: Callable[[], AbstractContextManager[str]]
    program: str | None = None  # that it needs, of no Python package


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def server(*command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server as a process, which it yields, until the block ends; it has begun when its port answers."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=tempfile.gettempdir())
        try:
            until = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    output.seek(0)
                    assert process.poll() is None, output.read().decode()
                    assert time.monotonic() < until, "the server does not answer"
                    time.sleep(0.05)
            yield process
        finally:
            process.kill()
            process.wait()


S3_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "tests-access-key",
    "AWS_SECRET_ACCESS_KEY": "tests-secret-key",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def s3_server(failures: Path | None = None) -> Iterator[dict[str, str]]:
    """Runs an S3 server; yields the environment in which clients find it.

    With a file `failures`, every second upload fails, and adds a byte to it.
    """
    port = free_port()
    options = [] if failures is None else [str(failures)]
    with server(sys.executable, str(HERE / "s3_emulator.py"), str(port), *options, port=port):
        yield {**S3_VARIABLES, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}


@contextmanager
def gcs_server(failures: Path | None = None) -> Iterator[dict[str, str]]:
    """Runs a server of Google Cloud Storage, like `s3_server`."""
    port = free_port()
    options = [] if failures is None else [str(failures)]
    with server(sys.executable, str(HERE / "gcs_emulator.py"), str(port), *options, port=port):
        # No search for the metadata server of a machine at Google.
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "NO_GCE_CHECK": "true"}


# Name and key of the only account that Azure's emulator has, as its documentation publishes them.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def azure_server() -> Iterator[dict[str, str]]:
    """Runs a server of Azure's blobs; yields the environment in which clients find it."""
    port = free_port()
    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")
    with server("azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(port), *options, port=port):
        endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        account = f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
        yield {"AZURE_STORAGE_CONNECTION_STRING": f"{account};{endpoint};"}


@contextmanager
def _bucket(protocol: str) -> Iterator[str]:
    """Yields the URL of a run in a new bucket; the environment is that of a server."""
    import fsspec

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem(protocol, skip_instance_cache=True).mkdir(name)
    yield f"{protocol}://{name}/runs/first"


@contextmanager
def file_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"file://{folder}/runs/first"


@contextmanager
def memory_url() -> Iterator[str]:
    import fsspec

    name = f"/{uuid.uuid4().hex}"
    yield f"memory://{name}/runs/first"
    found = fsspec.filesystem("memory")
    if found.exists(name):
        found.rm(name, recursive=True)


STORES = {
    "file": Store((), file_url),
    "memory": Store((), memory_url),
    "s3": Store(("s3fs", "moto"), lambda: _bucket("s3")),
    "gs": Store(("gcsfs", "gcp_storage_emulator"), lambda: _bucket("gs")),
    "az": Store(("adlfs",), lambda: _bucket("az"), program="azurite-blob"),
}
SERVERS = {"s3": s3_server, "gs": gcs_server, "az": azure_server}


FROM_PYPI = "pip install -c constraints.txt '.[more]'"
HOW_TO_INSTALL = {"az": f"npm install -g azurite, and {FROM_PYPI}"}


def missing_packages(name: str) -> list[str]:
    store = STORES[name]
    missing = [package for package in store.packages if importlib.util.find_spec(package) is None]
    lacks_program = store.program is not None and shutil.which(store.program) is None
    return [*missing, store.program] if lacks_program and store.program is not None else missing


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], dict[str, str]]]:
    """Returns the environment of a kind of store, whose server runs from the first time on."""
    found: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:

        def environment(name: str) -> dict[str, str]:
            if name not in found:
                found[name] = stack.enter_context(SERVERS[name]()) if name in SERVERS else {}
            return found[name]

        yield environment


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.process if name in SERVERS else ()) for name in STORES],
)
def store_url(request: pytest.FixtureRequest, servers: Callable[[str], dict[str, str]]) -> Iterator[str]:
    """A fresh URL in each kind of store."""
    with fresh_url(request.param, servers) as found:
        yield found


@contextmanager
def fresh_url(name: str, servers: Callable[[str], dict[str, str]]) -> Iterator[str]:
    if missing := missing_packages(name):
        pytest.skip(f"needs {', '.join(missing)}: {HOW_TO_INSTALL.get(name, FROM_PYPI)}")
    os.environ.update(servers(name))  # each test gets its own environment back
    with STORES[name].url() as found:
        yield found
