"""One side of the comparison: `python side.py ours|theirs OUT.json [CASE ...]` runs the cases, writes what came out."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(side: str, out: str, wanted: list[str]) -> None:
    if side == "ours":
        import trainwright.compat

        trainwright.compat.install()
    sys.path.insert(0, str(Path(__file__).parent))
    import cases

    results: dict[str, Any] = {}
    for name in wanted or cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = cases.CASES[name](Path(folder))
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    results["versions"] = {
        name: version(name) for name in ("transformers", "trl", "sentence-transformers", "peft", "setfit")
    }
    results["base"] = f"{cases.Trainer.__module__}.{cases.Trainer.__name__}"
    Path(out).write_text(json.dumps(results, default=float), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
