"""Starts moto's S3 server with one lock around its writes: it looks whether an object exists, and then writes it.

python s3_emulator.py PORT
python s3_emulator.py PORT FILE    every second upload fails with 503, and adds a byte to FILE
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

write = S3Response.put_object
lock = threading.Lock()


FAILURES = Path(sys.argv[2]) if len(sys.argv) > 2 else None
turns = itertools.cycle([False, True])


def put_object(self: S3Response) -> Any:
    if FAILURES is not None and next(turns):
        with FAILURES.open("ab") as file:
            file.write(b".")
        return 503, {}, "<Error><Code>ServiceUnavailable</Code><Message>this is a test</Message></Error>"
    if self.headers.get("If-None-Match") is None:
        return write(self)
    with lock:
        return write(self)


if __name__ == "__main__":
    S3Response.put_object = put_object  # type: ignore[method-assign]
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])
