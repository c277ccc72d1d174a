"""Differential fuzz against transformers' Trainer: drawn configurations, trained on both sides and compared.

    python -m tests.parity.fuzz --seeds 0:200 [--jobs 2] [--reproduce]

prints each difference that docs/migrate.md does not explain, with the smallest configuration that still shows it, and
how often each explained difference occurred. `fuzz_table.py` has what is drawn, `fuzz_sides.py` what is compared,
`fuzz_corrections.py` what is explained.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

if __name__ == "__main__":  # before torch is imported: it reads the number of threads once
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

from .fuzz_corrections import CORRECTIONS, Correction
from .fuzz_sides import Difference, compare
from .fuzz_table import Case, draw, with_meaning

Found = tuple[int, Case, Difference | None, "Counter[Correction]"]


def check(seed: int, *, reproduces: bool = False) -> Found:
    """The case of a seed, its difference if it has one, and the corrections that it used."""
    used: Counter[Correction] = Counter()
    case = draw(seed)
    return seed, case, compare(case, used, reproduces=reproduces), used


def shrunk(case: Case, difference: Difference, *, reproduces: bool = False) -> tuple[Case, Difference]:
    """The case less the rows without which the same fact still differs."""
    for name in list(case):
        smaller = with_meaning({other: value for other, value in case.items() if other != name})
        found = compare(smaller, Counter(), reproduces=reproduces)
        if found is not None and _kind(found) == _kind(difference):
            case = smaller
            difference = found
    return case, difference


def _kind(difference: Difference) -> tuple[str, ...]:
    if difference.fact == "error":
        return "error", *(type(one).__name__ for one in (difference.ours, difference.theirs))
    return (difference.fact.split()[-1] if ">" not in difference.fact else difference.fact.split(" > ")[-1],)


@contextlib.contextmanager
def cheap_collections() -> Iterator[None]:
    """Both trainers collect garbage when a run ends: what was imported before is not walked through each time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def report(
    found: Iterable[Found], *, shrink: bool = True, reproduces: bool = False
) -> tuple[list[str], Counter[Correction]]:
    """Texts about unexplained differences, printed as they come, and how often each correction was used."""
    texts = []
    used = Counter[Correction]()
    with cheap_collections():
        for seed, case, difference, counted in found:
            used.update({correction: 1 for correction in counted if counted[correction]})
            if difference is None:
                continue
            if shrink:
                case, difference = shrunk(case, difference, reproduces=reproduces)
            texts.append(f"seed {seed}: {case}\n  {difference}")
            print(texts[-1], flush=True)
    return texts, used


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares drawn configurations with transformers' Trainer.")
    parser.add_argument("--seeds", default="0:200", help="first:end")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--reproduce", action="store_true", help='ours with reproduce="transformers"')
    options = parser.parse_args()
    seeds = range(*map(int, options.seeds.split(":")))
    start = time.monotonic()
    examine = functools.partial(check, reproduces=options.reproduce)
    how = {"shrink": not options.no_shrink, "reproduces": options.reproduce}
    if options.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(options.jobs, gc.freeze) as pool:
            texts, used = report(pool.imap_unordered(examine, seeds), **how)
    else:
        texts, used = report(map(examine, seeds), **how)
    print(f"{len(seeds)} seeds, {len(texts)} unexplained differences, {time.monotonic() - start:.0f} s")
    for correction in CORRECTIONS:
        print(f"{used[correction]:6} {correction.name}")
    return bool(texts)


if __name__ == "__main__":
    sys.exit(main())
