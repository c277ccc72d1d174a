"""What must hold for any set of checkpoints, and after any sequence of saves, evaluations, resumes and strangers."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore, Keep, Saved, milestones, to_remove
from trainwright.run import checkpointing, resume

Case = tuple[list[Saved], Keep, int, int | None]


@st.composite
def situations(draw: st.DrawFn) -> Case:
    """(this run's checkpoints, what stays, the newest, the best)"""
    steps = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=12)))
    times = sorted(draw(st.lists(st.floats(0, 1000), min_size=len(steps), max_size=len(steps))))
    keep = Keep(
        last=draw(st.none() | st.integers(1, 5)),
        every_steps=draw(st.none() | st.integers(1, 10)),
        every_s=draw(st.none() | st.floats(1, 500)),
    )
    saved = [Saved(step, when) for step, when in zip(steps, times, strict=True)]
    return saved, keep, draw(st.sampled_from(steps)), draw(st.none() | st.integers(1, 40))


@given(situations())
def test_the_newest_the_best_and_all_of_later_steps_stay(case: Case) -> None:
    saved, keep, newest, best = case
    gone = to_remove(saved, keep, newest=newest, best=best)
    assert gone <= {one.step for one in saved}
    assert not gone & {newest, best}
    assert all(step < newest for step in gone)


@given(situations())
@example(([Saved(1), Saved(2)], Keep(last=1), 1, None))
def test_no_more_than_the_limit_are_left_but_for_milestones(case: Case) -> None:
    """One more where the limit is one and the best is not the newest: both must stay."""
    saved, keep, newest, best = case
    left = {one.step for one in saved} - to_remove(saved, keep, newest=newest, best=best)
    behind = [one for one in saved if one.step <= newest]
    if keep.last is None:
        assert left == {one.step for one in saved}
        return
    plain = {step for step in left if step <= newest} - milestones(behind, keep)
    assert len(plain) <= max(keep.last, 2 if best in left else 1)


@given(situations())
def test_nothing_goes_while_there_are_few(case: Case) -> None:
    saved, _, newest, best = case
    assert to_remove(saved, Keep(last=len(saved)), newest=newest, best=best) == set()


@given(situations())
def test_multiples_of_a_number_of_steps_stay(case: Case) -> None:
    saved, keep, newest, best = case
    gone = to_remove(saved, keep, newest=newest, best=best)
    assert not [step for step in gone if keep.every_steps and step % keep.every_steps == 0]


@given(
    st.lists(st.floats(1, 400), min_size=1, max_size=40),
    st.integers(1, 3),
    st.floats(50, 500),
)
def test_of_each_length_of_time_one_stays(gaps: list[float], limit: int, every_s: float) -> None:
    """Rotated after each save: what was kept for good once is kept, and no gap between them is longer than need be."""
    now = 0.0
    disk = {}
    everything = {}
    for step, gap in enumerate(gaps, start=1):
        now += gap
        disk[step] = everything[step] = Saved(step, now)
        for gone in to_remove(disk.values(), Keep(last=limit, every_s=every_s), newest=step):
            del disk[gone]
    assert milestones(list(everything.values()), Keep(every_s=every_s)) <= set(disk)
    kept = sorted(milestones(list(disk.values()), Keep(every_s=every_s)))
    for one, other in itertools.pairwise(kept):
        apart = everything[other].written_at - everything[one].written_at
        assert every_s <= apart < every_s + max(gaps) + 1e-6


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30, unique=True), st.integers(1, 5))
def test_after_each_save_of_a_lone_run_the_newest_are_there(written: list[int], limit: int) -> None:
    disk: set[int] = set()
    for step in sorted(written):
        disk.add(step)
        disk -= to_remove([Saved(one) for one in disk], Keep(last=limit), newest=step)
        assert disk == set(sorted(w for w in written if w <= step)[-limit:])


# -- on a disk, with strangers ---------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 3)),
        st.tuples(st.just("evaluate"), st.floats(0, 1)),
        st.tuples(st.just("resume"), st.just(None)),
        st.tuples(st.just("go back"), st.integers(0, 4)),
        st.tuples(st.just("start afresh"), st.just(None)),
        st.tuples(st.just("stranger"), st.integers(1, 20)),
        st.tuples(st.just("damage"), st.just(None)),
    ),
    max_size=16,
)


class Story:
    """Runs that share a directory, as the trainer's parts see it."""

    def __init__(self, root: Path, args: Any) -> None:
        self.store = CheckpointStore(root)
        self.args = args
        self.step = 0
        self.run_id = resume.new_run_id()
        self.clock = time.time() + 1e6  # later than strangers' files
        self.best: tuple[float, int] | None = None
        self.pending: float | None = None
        self.foreign: set[str] = set()

    def save(self, steps: int) -> None:
        self.step += steps
        self.clock += 100
        if self.pending is not None and (self.best is None or self.pending < self.best[0]):
            self.best = self.pending, self.step
        self.pending = None
        self.write(self.step, self.run_id)
        best = None if self.best is None else self.best[1]
        checkpointing.rotate(self.store, self.args, run_id=self.run_id, newest=self.step, best=best)
        latest = self.store.latest()
        assert latest is not None, "nothing is left to resume from"
        assert latest.path == self.store.path(self.step), "the newest is gone"
        if best is not None and best != self.step and self.store.path(best).is_dir():
            assert Manifest.read(self.store.path(best)) is not None

    def write(self, step: int, run_id: str) -> None:
        self.foreign.discard(self.store.path(step).name)  # a save of the same step takes its place
        staging = self.store.stage(step)
        (staging / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        self.store.commit(staging, Manifest(step=step, run_id=run_id, written_at=self.clock))

    def evaluate(self, loss: float) -> None:
        self.pending = loss

    def resume(self, _: None) -> None:
        latest = self.store.latest()
        if latest is None:
            return
        self.go_from(latest.path)

    def go_back(self, index: int) -> None:
        steps = [step for step in self.store.steps() if Manifest.read(self.store.path(step)) is not None]
        if index < len(steps):
            self.go_from(self.store.path(steps[index]))

    def go_from(self, checkpoint: Path) -> None:
        manifest = Manifest.read(checkpoint)
        if manifest is None or manifest.run_id == "a stranger":
            return
        before = self.run_id
        self.step = manifest.step
        self.run_id = resume.run_id_after(Checkpoint(checkpoint), str(self.store.root))
        self.best = self.best if self.run_id == before and self.best and self.best[1] <= self.step else None
        if self.run_id != before:
            self.foreign = {path.name for path in self.store.root.glob("checkpoint-*")} - self.own()

    def own(self) -> set[str]:
        return {self.store.path(step).name for step in self.store.owned_by(self.run_id)}

    def start_afresh(self, _: None) -> None:
        self.step = 0
        self.run_id = resume.new_run_id()
        self.best = None
        self.foreign |= {path.name for path in self.store.root.glob("checkpoint-*")}

    def stranger(self, step: int) -> None:
        if step == self.step or self.store.path(step).exists():
            return
        folder = self.store.root / (f"checkpoint-{step}" if step % 2 else f"checkpoint-keep-{step}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "precious").write_text("x")
        self.foreign.add(folder.name)

    def damage(self, _: None) -> None:
        latest = self.store.latest()
        if latest is not None and latest.manifest is not None and len(self.store.steps()) > 1:
            (latest.path / "trainer_state.json").write_text("?")
            self.resume(None)


@pytest.fixture(scope="module")
def fast_disk() -> Iterator[None]:
    """What is on the disk after a loss of power is not the question here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.mark.more
@pytest.mark.costly
@pytest.mark.usefixtures("fast_disk")
@settings(max_examples=500)
@given(actions=ACTIONS, limit=st.integers(1, 3), every=st.none() | st.integers(2, 5), every_s=st.none() | st.just(250))
def test_whatever_happens_what_this_run_wrote_is_deleted_and_newest_is_there(
    actions: list[tuple[str, Any]], limit: int, every: int | None, every_s: float | None, tmp_path_factory: Any
) -> None:
    logging.getLogger("trainwright").setLevel(logging.ERROR)
    args = SimpleNamespace(
        save_total_limit=limit,
        save_keep_every_steps=every,
        save_keep_every=every_s,
        save_strategy="steps",
        enable_jit_checkpoint=False,
    )
    story = Story(tmp_path_factory.mktemp("story"), args)
    for name, value in actions:
        getattr(story, name.replace(" ", "_"))(value)
        missing = [one for one in story.foreign if not (story.store.root / one).is_dir()]
        assert missing == [], f"{name} deleted what another run or a person made"
