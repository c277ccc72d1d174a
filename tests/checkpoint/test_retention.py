"""What must hold for any set of checkpoints: whoever's they are, however many may stay."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.checkpoint.retention import to_remove

STEPS = st.sets(st.integers(1, 30), max_size=10)


@st.composite
def situations(draw: st.DrawFn) -> tuple[set[int], set[int], int | None, int | None]:
    """(steps on disk, those of this run, best, limit)"""
    steps = draw(STEPS)
    owned = draw(st.sets(st.sampled_from(sorted(steps)))) if steps else set()
    best = draw(st.none() | st.integers(1, 30))
    return steps, owned, best, draw(st.none() | st.integers(1, 5))


@given(situations())
def test_only_what_this_run_wrote_is_deleted(case: tuple[set[int], set[int], int | None, int | None]) -> None:
    steps, owned, best, limit = case
    assert to_remove(sorted(steps), keep_last=limit, best=best, owned=owned) <= owned


@given(situations())
def test_the_newest_and_the_best_stay(case: tuple[set[int], set[int], int | None, int | None]) -> None:
    steps, owned, best, limit = case
    gone = to_remove(sorted(steps), keep_last=limit, best=best, owned=owned)
    assert best not in gone
    if steps:
        assert max(steps) not in gone


@given(situations())
@example(({1, 2}, {1}, None, 1))
def test_the_newest_of_this_run_stays_whatever_lies_beside_it(
    case: tuple[set[int], set[int], int | None, int | None],
) -> None:
    """In a directory with the checkpoints of an earlier, longer run."""
    steps, owned, best, limit = case
    gone = to_remove(sorted(steps), keep_last=limit, best=best, owned=owned)
    if owned:
        assert max(owned) not in gone


@given(situations())
def test_no_more_than_the_limit_are_left_of_this_run(
    case: tuple[set[int], set[int], int | None, int | None],
) -> None:
    """One more where the limit is one and the best is not the newest: both must stay."""
    steps, owned, best, limit = case
    left = owned - to_remove(sorted(steps), keep_last=limit, best=best, owned=owned)
    if limit is None:
        assert left == owned
    else:
        assert len(left) <= max(limit, 2 if best in owned else 1)


@given(situations())
def test_nothing_goes_while_there_are_few(case: tuple[set[int], set[int], int | None, int | None]) -> None:
    steps, owned, best, _ = case
    assert to_remove(sorted(steps), keep_last=len(steps) or 1, best=best, owned=owned) == set()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30, unique=True), st.integers(1, 5))
def test_after_each_save_of_a_lone_run_the_newest_are_there(written: list[int], limit: int) -> None:
    disk: set[int] = set()
    for step in sorted(written):
        disk.add(step)
        disk -= to_remove(sorted(disk), keep_last=limit, best=None, owned=disk)
        assert disk == set(sorted(w for w in written if w <= step)[-limit:])
