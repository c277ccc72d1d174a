"""Each bad value, policy and engine: weights at the end are those of a run with the same steps left out by hand."""

from pathlib import Path

import pytest

from ..._support.two_processes import run
from . import matrix

SCRIPT = Path(matrix.__file__)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> matrix.Table:
    return matrix.Table("one process", tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("value", "policy"), list(matrix.rows("one process")))
def test_one_process(value: str, policy: str, table: matrix.Table) -> None:
    assert table.outcome(value, policy) == matrix.expected(value, policy)


def check(folder: Path, ranks: str, *engines: str, **how: object) -> None:
    done = run(SCRIPT, str(folder / "runs"), ranks, *engines, folder=folder, timeout_s=280, **how)  # type: ignore[arg-type]
    for told in done.told:
        rows = [row for row in told if row.startswith(tuple(f"{engine}, " for engine in engines))]
        number = sum(len(list(matrix.rows(engine))) for engine in engines)
        assert len(rows) == (number // 2 if ranks == "half" else number * len(ranks.split(",")))
        wanted = {}
        for row in rows:
            engine, value, policy, _ = row.split(", ")
            wanted[row] = matrix.expected(value, policy, engine)
        assert {row: told[row] for row in rows} == wanted


@pytest.mark.process
def test_two_processes_of_which_one_has_the_bad_sample(tmp_path: Path) -> None:
    check(tmp_path, "half", "ddp", "fsdp")


@pytest.mark.slow  # every row, with the sample in either process: four times the test above
@pytest.mark.process
def test_whichever_process_has_the_bad_sample(tmp_path: Path) -> None:
    check(tmp_path, "0,1", "ddp", "fsdp")


@pytest.mark.slow  # DeepSpeed is installed for slow tests only
@pytest.mark.process
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_skips_and_says_so(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="heavy; installed for the slow tests (requirements-engines.txt)")
    check(tmp_path, "0,1", f"zero-{stage}", environment={"DS_ACCELERATOR": "cpu"})
