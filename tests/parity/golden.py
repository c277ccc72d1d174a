"""Results of the original kept in files, so that a comparison with it trains one side only.

A file has for each case the log of the original, its counts, and one digest for each parameter or array. Its folder
names what the bits depend on: the versions of transformers and torch, and the CPU. Where no file
fits, or a result differs from the kept one, the original is trained: it decides, and shows how large the gap is.
`make golden` writes the files of this machine; a slow test compares each of them with the original.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from .sides import Digest, Outcome

ROOT = Path(__file__).with_name("golden")
FAMILIES: dict[str, Golden] = {}


def key() -> str:
    """Names what the bits of a result depend on.

    CPUs with one instruction set may still differ, by the vendor's libraries: hence also a digest of a few operations.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(28, 16, generator=generator)
    weight = torch.randn(48, 16, generator=generator)
    y = torch.nn.functional.linear(x, weight)
    several = [y, y.softmax(-1), y.log_softmax(-1), y.exp(), y.tanh(), y.norm().reshape(1), y.mean(0)]
    several += [
        torch.nn.functional.gelu(y),
        torch.nn.functional.layer_norm(y, (48,)),
        (x.bfloat16() @ weight.bfloat16().T).float(),
    ]
    bits = Digest.of(torch.cat([one.flatten() for one in several])).removeprefix(Digest.MARK)
    torch_version = torch.__version__.partition("+")[0]
    cpu = torch.backends.cpu.get_cpu_capability()
    return f"transformers-{transformers.__version__}-torch-{torch_version}-{platform.machine()}-{cpu}-{bits}"


KEY = key()
# Where nothing is kept for this machine, the original is trained.
MARKS = [] if (ROOT / KEY).is_dir() else [pytest.mark.framework]


class Golden:
    """The results of the original in one family of cases.

    Args:
        family: name of the file.
        cases: for each case a function that trains the original; it returns an `Outcome`, or a dict of such, of
            arrays and of plain values.
    """

    def __init__(self, family: str, cases: Mapping[str, Callable[[], Any]]) -> None:
        self.cases = cases
        self.path = ROOT / KEY / f"{family}.json"
        self._trained: dict[str, Any] = {}
        FAMILIES[family] = self

    @cached_property
    def _kept(self) -> dict[str, Any]:
        return from_text(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def result(self, case: str) -> Any:
        """The kept result of a case, with digests for arrays; where there is none, that of the original trained now."""
        return self._kept[case] if case in self._kept else self._train(case)

    def check(self, case: str, compare: Callable[[Any], None]) -> None:
        """Calls `compare` with the kept result; if that fails, with the result of the original trained now."""
        try:
            compare(self.result(case))
        except AssertionError as difference:
            if case not in self._kept:
                raise
            try:
                theirs = self._train(case)
            except pytest.fail.Exception:  # no original is trained in the quick tier: the kept result decides
                raise difference from None
            compare(theirs)

    def _train(self, case: str) -> Any:
        if case not in self._trained:
            self._trained[case] = self.cases[case]()
        return self._trained[case]


def to_text(results: dict[str, Any]) -> str:
    """JSON with a line for each case. The keys of a mapping are a number in a list, since many have the same."""
    lists: dict[tuple[str, ...], int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return Digest.of(value)
        if isinstance(value, Outcome):
            value = {name: getattr(value, name) for name in OUTCOME}
        if isinstance(value, dict):
            return {"keys": lists.setdefault(tuple(value), len(lists)), "values": [*map(plain, value.values())]}
        return [*map(plain, value)] if isinstance(value, (list, tuple)) else value

    lines = [
        f"{json.dumps(case)}: {json.dumps(plain(value), separators=(',', ':'))}" for case, value in results.items()
    ]
    keys = ",\n".join(json.dumps(names, separators=(",", ":")) for names in lists)
    return '{"keys": [\n' + keys + '\n],\n"cases": {\n' + ",\n".join(lines) + "\n}}\n"


def from_text(text: str) -> dict[str, Any]:
    """The results of a text of `to_text`, with a `Digest` for each array."""
    read = json.loads(text)

    def whole(value: Any) -> Any:
        if isinstance(value, str) and value.startswith(Digest.MARK):
            return Digest(value)
        if isinstance(value, dict):
            items = dict(zip(read["keys"][value["keys"]], map(whole, value["values"]), strict=True))
            return Outcome(**items) if tuple(items) == OUTCOME else items
        return [*map(whole, value)] if isinstance(value, list) else value

    return {case: whole(value) for case, value in read["cases"].items()}


OUTCOME = tuple(field.name for field in dataclasses.fields(Outcome))
