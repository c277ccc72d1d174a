"""The files of kept results hold what the original does now; WRITE_GOLDEN=1, as in `make golden`, writes them."""

import os

import pytest
import torch

from . import (  # noqa: F401 -- they name the families
    test_evaluation,
    test_generation,
    test_gpt2_is_right,
    test_precision,
    test_reproduce,
    test_resume,
    test_same_weights,
    test_stream_tail,
)
from .golden import FAMILIES, KEY, ROOT, Digest, from_text, to_text
from .sides import Outcome, are_equal

SIZE_LIMIT = 500_000


@pytest.mark.slow
@pytest.mark.framework
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")  # said to the original
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_holds_what_the_original_does(family: str) -> None:
    golden = FAMILIES[family]
    trained = {case: train() for case, train in golden.cases.items()}
    for result in trained.values():
        if isinstance(result, Outcome):
            assert all(torch.isfinite(value).all() for value in result.weights.values())
    if os.environ.get("WRITE_GOLDEN"):
        golden.path.parent.mkdir(parents=True, exist_ok=True)
        golden.path.write_text(to_text(trained), encoding="utf-8")
    if not golden.path.exists():
        pytest.skip(f"no results are kept for {KEY}; `make golden` keeps them")
    kept = from_text(golden.path.read_text(encoding="utf-8"))
    now = from_text(to_text(trained))
    assert kept.keys() == now.keys()
    assert {case for case in now if kept[case] != now[case]} == set()


@pytest.mark.skipif(not (ROOT / KEY).is_dir(), reason=f"nothing is kept for {KEY}")
def test_every_case_is_kept_and_no_other() -> None:
    kept = {path.stem: set(from_text(path.read_text(encoding="utf-8"))) for path in (ROOT / KEY).glob("*.json")}
    assert kept == {name: set(family.cases) for name, family in FAMILIES.items()}, "`make golden` writes the files"


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in ROOT.rglob("*.json")) < SIZE_LIMIT


def test_what_is_kept_comes_back() -> None:
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.bfloat16)}
    outcome = Outcome(weights, [{"loss": 0.1, "step": 1}, {"loss": 0.2, "step": 2}], 2, 0.15)
    read = from_text(to_text({"case": {"outcome": outcome, "values": [1, None, "text"]}}))["case"]
    assert read["values"] == [1, None, "text"]
    assert read["outcome"].log == outcome.log
    assert (read["outcome"].global_step, read["outcome"].training_loss) == (2, 0.15)
    assert all(
        isinstance(value, Digest) and are_equal(value, weights[name]) for name, value in read["outcome"].weights.items()
    )
    assert not are_equal(read["outcome"].weights["a"], torch.tensor([1.0, 2.0000002]))
    assert not are_equal(read["outcome"].weights["a"], torch.tensor([[1.0, 2.0]]))
