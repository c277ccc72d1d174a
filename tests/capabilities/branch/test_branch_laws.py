"""The laws of branches: they continue the trunk to the bit, only the rate differs, and the trunk stays as it is."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.capabilities.branch.origins import checkpoint_at, origins_in
from trainwright.capabilities.quarantine.file import QUARANTINE_NAME, add_to_quarantine
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.errors import ArgumentError, CheckpointError, CheckpointNotFoundError
from trainwright.journal.record import read
from trainwright.optim import schedules
from trainwright.report.comparison import comparison, read_runs
from trainwright.report.run_page import write_report
from trainwright.report.run_table import find_runs

from ..._support import forked
from ..._support.engines import needs
from ..._support.small import sign_again
from ..._support.two_processes import finish_forks, start_forks
from ..._support.two_processes import run as run_ranks
from ...contract import doubles
from ...optim.test_schedule_resume import BASE, BY_STEPS, COURSES, WARMUPS, advance, after, builder, loaded
from ..averages.average_runs import ON_CPU
from .branch_runs import AT, END, STEPS, branch, made, run

FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done, dtype=torch.float64)).item()),
    "1-sqrt": lambda done: 1 - done**0.5,
}


def content(folder: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of change of each file below a directory, and its directories."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


def states(folder: Path, step: int) -> dict[str, Any]:
    """Everything of a checkpoint that a resume continues, but for its arguments and times."""
    path = folder / f"checkpoint-{step}"
    found: dict[str, Any] = {"cursor": Checkpoint(path).cursor}
    random_states = [file.name for file in path.glob("rng_state*.pth")]  # one for each process
    assert random_states
    for name in ("optimizer.pt", "scheduler.pt", *random_states):
        found[name] = torch.load(path / name, weights_only=False)
    found["weights"] = (path / "model.safetensors").read_bytes()
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    try:
        return bool(one == other)
    except ValueError:  # arrays of numpy
        return bool((one == other).all())


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a constant rate that saved each second step."""
    folder = tmp_path_factory.mktemp("runs") / "trunk"
    run(folder)
    return folder


@pytest.mark.parametrize("schedule", ["constant_with_warmup", "linear", "cosine", "warmup_stable_decay"])
@pytest.mark.parametrize("at", [2, AT, 8])
def test_a_branch_without_changes_is_the_trunk_to_the_bit(schedule: str, at: int, tmp_path: Path) -> None:
    options = {"lr_scheduler_kwargs": {"num_decay_steps": 4}} if schedule == "warmup_stable_decay" else {}
    _, whole = run(tmp_path / "trunk", lr_scheduler_type=schedule, **options)
    before = content(tmp_path / "trunk")
    _, rates = branch(tmp_path / "branch", tmp_path / f"trunk/checkpoint-{at}", lr_scheduler_type=schedule, **options)
    assert rates.of == {step: rate for step, rate in whole.of.items() if step > at}
    assert equal(states(tmp_path / "trunk", STEPS), states(tmp_path / "branch", STEPS))
    assert content(tmp_path / "trunk") == before
    ids = {read(tmp_path / name).run_id for name in ("trunk", "branch")}
    assert len(ids) == 2


@pytest.mark.parametrize("shape", FALLS)
def test_a_cooldown_of_a_constant_rate_is_a_run_with_that_decay(shape: str, trunk: Path, tmp_path: Path) -> None:
    settings = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": END - AT, "decay_type": shape},
    }
    _, whole = run(tmp_path / "whole", max_steps=END, **settings)
    before = content(trunk)
    _, rates = branch(tmp_path / "branch", trunk / f"checkpoint-{AT}", max_steps=END, cooldown=shape)
    assert rates.of == {step: rate for step, rate in whole.of.items() if step > AT}
    one = states(tmp_path / "whole", END)
    other = states(tmp_path / "branch", END)
    del one["scheduler.pt"], other["scheduler.pt"]
    assert equal(one, other)
    assert content(trunk) == before


def test_a_cooldown_equals_a_loop_by_hand_from_the_same_checkpoint(tmp_path: Path) -> None:
    settings = {"train_sampling_strategy": "sequential", "max_grad_norm": 1.0, "lr_scheduler_type": "cosine"}
    _, whole = run(tmp_path / "trunk", **settings)
    origin = tmp_path / f"trunk/checkpoint-{AT}"
    trainer, _ = branch(tmp_path / "branch", origin, max_steps=END, cooldown="linear", **settings)

    from safetensors.torch import load_file

    model = doubles.model()
    model.load_state_dict(load_file(origin / "model.safetensors"))
    saved = torch.load(origin / "optimizer.pt", weights_only=True)
    groups = [{"params": []} for _ in saved["param_groups"]]
    decayed = {name for name, one in model.named_parameters() if one.dim() > 1}
    for name, parameter in model.named_parameters():
        groups[0 if name in decayed else 1]["params"].append(parameter)
    by_hand = torch.optim.AdamW(groups)
    by_hand.load_state_dict(saved)
    rows = doubles.samples()
    for step in range(AT, END):
        part = [rows[(step * 4 + i) % len(rows)] for i in range(4)]
        loss = model(x=torch.stack([row["x"] for row in part]), labels=torch.tensor([row["labels"] for row in part]))[
            "loss"
        ]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in by_hand.param_groups:
            group["lr"] = whole.of[AT + 1] * (1 - (step - AT) / (END - AT))
        by_hand.step()
        by_hand.zero_grad()
    for name, value in doubles.weights(trainer).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=1e-7)


@pytest.mark.costly
@pytest.mark.parametrize("shape", FALLS)
@pytest.mark.parametrize("name", BY_STEPS)
def test_cooldown_begins_at_the_rate_of_the_trunk_and_ends_at_0(name: str, shape: str) -> None:
    for warmup, course in itertools.product(WARMUPS.values(), COURSES):
        check_cooldown(builder(name, warmup), shape, *course)


def check_cooldown(build: Any, shape: str, before: int, here: int, now: int) -> None:
    """A run of `before` steps cools down from step `here` to `now`, and is resumed half-way and made longer."""
    schedule, so_far = after(build, here, before)
    would_be = schedule.optimizer.param_groups[0]["lr"] if here < before else so_far[-1]
    again = loaded(build, schedule, now)
    assert schedules.continue_towards(again, build, before=before, now=now, cooldown=shape)
    half = advance(again, (now - here) // 2)
    resumed = loaded(build, again, now)
    schedules.continue_towards(resumed, build, before=now, now=now, cooldown=shape)
    rates = half + advance(again, now - here - len(half))
    assert half + advance(resumed, now - here - len(half)) == rates, "a resume within the cooldown"
    by_formula = [would_be * FALLS[shape](step / (now - here)) for step in range(now - here)]
    assert rates == pytest.approx(by_formula, abs=1e-15)
    assert all(one >= other for one, other in itertools.pairwise(rates))
    assert again.optimizer.param_groups[0]["lr"] == 0
    longer = loaded(build, again, now + 5)
    schedules.continue_towards(longer, build, before=now, now=now + 5, cooldown=shape)
    assert advance(longer, 1)[0] == rates[-1], "a run that is extended after its cooldown"


def test_a_shape_is_of_all_parameter_groups() -> None:
    build = builder("constant", WARMUPS["none"])
    two = torch.optim.AdamW(
        [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (BASE, 2 * BASE)], lr=BASE
    )
    schedule = build(two, 20)
    advance(schedule, 10)
    schedules.continue_towards(schedule, build, before=20, now=14, cooldown="linear")
    advance(schedule, 1)
    assert schedule.get_last_lr() == pytest.approx([0.75 * BASE, 1.5 * BASE])


def test_several_branches_of_one_checkpoint_leave_it_alone(trunk: Path, tmp_path: Path) -> None:
    before = content(trunk)
    ends = {}
    for length in (2, 4):
        _, rates = branch(tmp_path / str(length), trunk / f"checkpoint-{AT}", max_steps=AT + length, cooldown="linear")
        ends[length] = list(rates.of.values())
        (record,) = (one for one in find_runs(tmp_path) if one.name == str(length))
        assert [(one["step"], one["checkpoint"]) for one in record.origins] == [(AT, str(trunk / f"checkpoint-{AT}"))]
    assert ends == {2: [0.01, 0.005], 4: pytest.approx([0.01, 0.0075, 0.005, 0.0025])}
    assert content(trunk) == before


def test_a_branch_of_a_branch_knows_both_and_so_does_its_resume(trunk: Path, tmp_path: Path) -> None:
    first = trunk / f"checkpoint-{AT}"
    branch(tmp_path / "one", first, max_steps=END, cooldown="linear")
    second = tmp_path / "one" / "checkpoint-8"
    branch(tmp_path / "two", second, max_steps=14, cooldown="1-sqrt")
    wanted = [(read(trunk).run_id, AT, str(first)), (read(tmp_path / "one").run_id, 8, str(second))]

    def origins(found: list[Any]) -> list[tuple[Any, ...]]:
        return [(one["run"], one["step"], one["checkpoint"]) for one in found]

    assert origins(origins_in(Checkpoint(tmp_path / "two" / "checkpoint-14"))) == wanted
    assert origins(read(tmp_path / "two").of("start")[0]["branch"]["origins"]) == wanted
    assert read(tmp_path / "two").of("resume") == []
    run(tmp_path / "two", resume=True, max_steps=16, cooldown="1-sqrt")  # without branch_from
    assert origins(origins_in(Checkpoint(tmp_path / "two" / "checkpoint-16"))) == wanted
    assert origins(read(tmp_path / "two").of("resume")[0]["branch"]["origins"]) == wanted
    assert len({entry["run"] for entry in read(tmp_path / "two").entries}) == 1
    page = write_report(tmp_path / "two").read_text(encoding="utf-8")
    assert "itself of trunk, step 6" in page
    assert str(second) in page
    assert str(first) in page
    records = read_runs([trunk, tmp_path / "two"])
    assert "one, step 8" in comparison(records)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dies_at", [7, 11], ids=["before its first checkpoint", "after"])
def test_a_branch_that_is_killed_continues_with_the_same_command(dies_at: int, trunk: Path, tmp_path: Path) -> None:
    origin = trunk / f"checkpoint-{AT}"
    settings = {"max_steps": 14, "cooldown": "1-sqrt"}
    _, whole = branch(tmp_path / "whole", origin, **settings)
    script = Path(__file__).with_name("branch_victim.py")
    words = [str(script), str(tmp_path / "cut"), str(origin), str(dies_at)]
    victim = forked.start(words, cwd=tmp_path, merge_output=True)
    said, _ = victim.communicate(90)
    assert victim.returncode == -signal.SIGKILL, said
    _, rest = branch(tmp_path / "cut", origin, **settings)
    saved = AT if dies_at == 7 else 10
    assert rest.of == {step: rate for step, rate in whole.of.items() if step > saved}
    assert equal(states(tmp_path / "whole", 14), states(tmp_path / "cut", 14))
    assert [one["step"] for one in origins_in(Checkpoint(tmp_path / "cut" / "checkpoint-14"))] == [AT]
    again, none = branch(tmp_path / "cut", origin, **settings)
    assert (again.state.global_step, none.of) == (14, {}), "a branch that has ended"


@pytest.mark.parametrize("origins", [5, None, float("nan"), "text", [7], [{}], [{"run": 1}]], ids=str)
def test_origins_that_no_run_writes_are_refused(origins: object, tmp_path: Path) -> None:
    """In the checkpoint of any run, whether it is a branch or not."""
    run(tmp_path)
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    torch.save({"branch": {"origins": origins}}, checkpoint / "extension_states.pt")
    sign_again(checkpoint)
    with pytest.raises(CheckpointError, match="does not say where its run comes from"):
        run(tmp_path, resume=True, max_steps=16)


def test_a_run_that_is_extended_twice_has_no_jump(tmp_path: Path) -> None:
    _, first = run(tmp_path, lr_scheduler_type="cosine")
    _, second = run(tmp_path, lr_scheduler_type="cosine", resume=True, max_steps=16, cooldown="linear")
    assert second.of[STEPS + 1] == pytest.approx(first.of[STEPS], rel=1e-12)
    _, third = run(tmp_path, lr_scheduler_type="cosine", resume=True, max_steps=20, cooldown="linear")
    assert third.of[17] == pytest.approx(second.of[16], rel=1e-12)
    assert list(third.of) == [17, 18, 19, 20]
    state = torch.load(tmp_path / "checkpoint-20" / "scheduler.pt", weights_only=True)
    assert state["horizons"] == [[0, 12], [12, 16, "linear"], [16, 20, "linear"]]
    _, plain = run(tmp_path, lr_scheduler_type="cosine", resume=True, max_steps=22)
    assert plain.of[21] == pytest.approx(third.of[20], rel=1e-12), "the schedule's own course after a cooldown"


def test_cooldown_that_is_left_out_on_a_resume_ends_without_a_jump(trunk: Path, tmp_path: Path) -> None:
    origin = trunk / f"checkpoint-{AT}"
    branch(tmp_path, origin, max_steps=14, cooldown="linear")
    for step in (10, 12, 14):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    _, rates = branch(tmp_path, origin, max_steps=14)
    assert rates.of[9] == pytest.approx(0.0075)
    assert set(rates.of.values()) == {rates.of[9]}, "from there on constant, as the schedule"


def test_samples_in_quarantine_stay_there(tmp_path: Path) -> None:
    add_to_quarantine(tmp_path / "trunk", [3, 5])
    run(tmp_path / "trunk")
    before = content(tmp_path / "trunk")
    branch(tmp_path / "branch", tmp_path / "trunk" / f"checkpoint-{AT}")
    assert (tmp_path / "branch" / QUARANTINE_NAME).read_bytes() == (tmp_path / "trunk" / QUARANTINE_NAME).read_bytes()
    assert equal(states(tmp_path / "trunk", STEPS), states(tmp_path / "branch", STEPS))
    assert content(tmp_path / "trunk") == before


def test_a_branch_may_have_another_mixture(tmp_path: Path) -> None:
    data = {"web": doubles.samples(32), "code": doubles.samples(24)}
    run(tmp_path / "trunk", train_dataset=data, mixture={"web": 0.75, "code": 0.25})
    origin = tmp_path / "trunk" / f"checkpoint-{AT}"
    settings = {"train_dataset": data, "cooldown": "linear", "max_steps": END}
    trainer, rates = branch(tmp_path / "branch", origin, mixture={"web": 0.25, "code": 0.75}, **settings)
    plain, _ = branch(tmp_path / "plain", origin, mixture={"web": 0.75, "code": 0.25}, **settings)
    assert list(rates.of.values()) == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert not doubles.same(doubles.weights(trainer), doubles.weights(plain))


def test_the_best_of_the_trunk_counts_until_a_branch_is_better(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }
    trainer, _ = run(tmp_path / "trunk", **settings)
    before = content(tmp_path / "trunk")
    other, _ = branch(tmp_path / "branch", tmp_path / f"trunk/checkpoint-{AT}", **settings)
    assert other.state.best_metric == trainer.state.best_metric
    assert [one for one in other.state.log_history if "loss" in one] == [
        one for one in trainer.state.log_history if "loss" in one
    ]
    assert doubles.same(doubles.weights(trainer), doubles.weights(other))
    assert content(tmp_path / "trunk") == before


REFUSED = {
    "a cooldown of a fresh run": ({"cooldown": "linear"}, "begins at the rate of a checkpoint"),
    "another schedule too": (
        {"branch": "checkpoint-6", "cooldown": "linear", "lr_scheduler_type": "cosine"},
        "lr_scheduler_type 'constant_with_warmup' -> 'cosine'",
    ),
    "no such checkpoint": ({"branch": "checkpoint-7"}, "checkpoint-12"),
    "a run in place of a checkpoint": ({"branch": ""}, "Name one of its checkpoints"),
    "a URL": ({"branch_from": "s3://bucket/run/checkpoint-6"}, "is a URL"),
    "its own directory": ({"branch": "checkpoint-6", "output_dir": ""}, "Give it another output_dir"),
    "a plateau": (
        {"branch": "checkpoint-6", "cooldown": "linear", "lr_scheduler_type": "reduce_lr_on_plateau"},
        "moves it after evaluations",
    ),
    "a shape that is none": ({"branch": "checkpoint-6", "cooldown": "sqrt"}, "cooldown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_anything_is_written(name: str, trunk: Path, tmp_path: Path) -> None:
    asked, message = REFUSED[name]
    settings: dict[str, Any] = dict(asked)
    if "branch" in settings:
        settings["branch_from"] = str(trunk / settings.pop("branch"))
    folder = trunk / settings.pop("output_dir") if "output_dir" in settings else tmp_path / "branch"
    before = content(trunk)
    with pytest.raises((ArgumentError, CheckpointNotFoundError), match=message):
        run(folder, **settings)
    assert content(trunk) == before
    assert not list(tmp_path.rglob("checkpoint-*"))
    assert not list(tmp_path.rglob("journal.jsonl"))


def test_a_directory_of_another_run_is_refused_and_may_be_overwritten(trunk: Path, tmp_path: Path) -> None:
    origin = trunk / f"checkpoint-{AT}"
    run(tmp_path, max_steps=2)
    with pytest.raises(ArgumentError, match="holds another run"):
        branch(tmp_path, origin)
    branch(tmp_path, origin, max_steps=8, overwrite_output_dir=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-8"]
    with pytest.raises(ArgumentError, match="holds a branch of"):
        branch(tmp_path, trunk / "checkpoint-8")


def test_a_schedule_of_the_users_is_left_to_the_user(trunk: Path, tmp_path: Path) -> None:
    trainer, _ = made(tmp_path, branch_from=str(trunk / f"checkpoint-{AT}"), cooldown="linear")
    own = torch.optim.AdamW(trainer.model.parameters())
    trainer.optimizer = own
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1.0)
    with pytest.raises(ArgumentError, match="its own scheduler"):
        trainer.train()


def test_a_damaged_checkpoint_is_no_origin(tmp_path: Path) -> None:
    run(tmp_path / "trunk", max_steps=4)
    with (tmp_path / "trunk/checkpoint-2/model.safetensors").open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(CheckpointError, match="branch_from"):
        branch(tmp_path / "branch", tmp_path / "trunk" / "checkpoint-2")


@pytest.mark.process
def test_the_mirror_of_the_trunk_is_not_written_to(tmp_path: Path) -> None:
    mirror = f"file://{tmp_path}/copies"
    run(tmp_path / "trunk", max_steps=4, checkpoint_mirror=mirror)
    before = content(tmp_path / "copies")
    with pytest.raises(ArgumentError, match="its own URL"):
        branch(tmp_path / "branch", tmp_path / "trunk" / "checkpoint-2", checkpoint_mirror=mirror)
    assert {name: found for name, found in content(tmp_path / "copies").items() if "lease" not in name} == {
        name: found for name, found in before.items() if "lease" not in name
    }


def test_steps_that_a_run_has_are_named(trunk: Path) -> None:
    assert checkpoint_at(trunk, AT) == trunk / f"checkpoint-{AT}"
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 7; it has step 2, 4, 6, 8"):
        checkpoint_at(trunk, 7)


ZERO = ["zero 1", "zero 2", "zero 3", "zero 1 in bf16", "zero 3 in bf16"]


@pytest.mark.slow  # three launches of two processes
@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", *(pytest.param(zero, marks=needs("deepspeed")) for zero in ZERO)])
def test_two_processes_branch_and_resume_to_the_bit(kind: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("branch_of_two.py")
    how: dict[str, Any] = {"folder": tmp_path, "environment": ON_CPU}
    run_ranks(script, str(tmp_path), kind, "trunk", timeout_s=120, **how)
    before = content(tmp_path / "trunk")
    victims = start_forks(script, str(tmp_path), kind, "killed", **how)
    killed = finish_forks(victims, tmp_path, timeout_s=120)
    assert victims[1].returncode == -signal.SIGKILL, killed.out
    assert sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*")) == ["checkpoint-8"]
    told = run_ranks(script, str(tmp_path), kind, "branches", timeout_s=150, **how).told
    assert told[0] == told[1]
    rates = told[0]["rates"]
    assert rates["same"] == [0.01] * 6
    assert rates["cooled"] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert rates["cut"] + rates["resumed"] == rates["cooled"]
    assert rates["killed"] == rates["resumed"]
    weights = told[0]["weights"]
    assert weights["same"] == weights["trunk"]
    assert weights["resumed"] == weights["cooled"]
    assert weights["killed"] == weights["cooled"]
    if kind != "fsdp":  # which writes its states in parts
        assert equal(states(tmp_path / "same", STEPS), states(tmp_path / "trunk", STEPS))
        assert equal(states(tmp_path / "killed", END), states(tmp_path / "cooled", END))
    assert told[0]["origins"] == {"cooled": [AT], "cut": [AT], "killed": [AT]}
    assert content(tmp_path / "trunk") == before
    assert json.loads((tmp_path / "cooled" / "journal.jsonl").read_text().splitlines()[0])["kind"] == "start"
