"""Signals end a run in order: the last finished step is saved, the exit code tells, and a resume is exact."""

import gc
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainwright import get_last_checkpoint

from .._support import forked

pytestmark = pytest.mark.process

VICTIM = Path(__file__).with_name("victim.py")
PHASES = {
    "train": 6,
    "data": 4,
    "evaluate": 6,
    "save": 8,
}  # phase -> the step that is finished when it ends; data are fetched a batch ahead
CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 138}


def code_of(number: signal.Signals) -> int:
    """For SIGINT that of any script with these imports: hooks of some packages (torch._inductor) change it."""
    if number in CODES:
        return CODES[number]
    script = "import transformers.optimization\nraise KeyboardInterrupt"
    return forked.run(["-c", script]).returncode


def start(folder: Path, phase: str, *, num_signals: int = 1) -> forked.Process:
    return forked.start([str(VICTIM), str(folder), phase, str(num_signals)])


def finish(process: forked.Process) -> str:
    try:
        return process.communicate(timeout=60)[1]
    finally:
        process.kill()


def wait_for(process: forked.Process, word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    pytest.fail(f"the script never said {word}: {finish(process)}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder, "none")
    finish(process)
    assert process.returncode == 0
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.process
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *((phase, signal.SIGTERM) for phase in PHASES),
        pytest.param("data", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("evaluate", signal.SIGUSR1, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_last_finished_step_is_saved_and_the_resume_is_exact(
    phase: str, number: signal.Signals, uninterrupted: bytes, tmp_path: Path
) -> None:
    process = start(tmp_path, phase)
    wait_for(process, "HERE")
    process.send_signal(number)
    said = finish(process)
    assert process.returncode == code_of(number) != 0, said
    assert number != signal.SIGINT or said.rstrip().endswith("KeyboardInterrupt")
    assert f"Interrupted by {number.name} after step {PHASES[phase]}, which is saved" in said
    assert get_last_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{PHASES[phase]}")
    again = start(tmp_path, "none")
    said = finish(again)
    assert again.returncode == 0, said
    assert (tmp_path / "model.safetensors").read_bytes() == uninterrupted


@pytest.mark.process
@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)],
    ids=lambda numbers: "+".join(number.name for number in numbers),
)
def test_a_second_signal_does_not_abort_the_save_of_the_first(
    numbers: Sequence[signal.Signals], tmp_path: Path
) -> None:
    """As of GNU timeout, which signals the process and then its group, and of schedulers."""
    process = start(tmp_path, "save", num_signals=len(numbers))
    wait_for(process, "HERE")
    for number in numbers:
        process.send_signal(number)
        wait_for(process, "ARRIVED")
    said = finish(process)
    assert process.returncode == CODES[numbers[0]], said
    assert f"Interrupted by {numbers[0].name} after step 8, which is saved" in said
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")


@pytest.mark.process
def test_ctrl_c_twice_ends_it_at_once_and_says_what_is_lost(tmp_path: Path) -> None:
    process = start(tmp_path, "save", num_signals=2)
    wait_for(process, "HERE")
    process.send_signal(signal.SIGINT)
    wait_for(process, "ARRIVED")
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert process.returncode == -signal.SIGINT
    assert "SIGINT again: the process ends at once; it is at step 8, and none is saved." in said
    assert get_last_checkpoint(tmp_path) is None


def test_handlers_are_put_back(tmp_path: Path) -> None:
    from trainwright.state.interrupts import SIGNALS, Interrupts

    gc.collect()  # a run of an earlier test that was left early ends when it is freed
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts().listening():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As SIGINT is in a process that a script starts in the background."""
    from trainwright.state.interrupts import Interrupts

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts = Interrupts()
        with interrupts.listening():
            signal.raise_signal(signal.SIGINT)
            assert interrupts.received is None
            signal.raise_signal(signal.SIGUSR1)
            assert interrupts.received == signal.SIGUSR1
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.process
def test_second_training_saves_at_a_step_that_the_first_one_saved_too(tmp_path: Path) -> None:
    """What the first one wrote at the same step is not this run's."""
    script = f"""
import os, signal, torch
from torch import nn
from trainwright import Trainer, TrainerCallback, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, x, labels):
        return {{"loss": nn.functional.cross_entropy(self.layer(x), labels)}}
class Signals(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
items = [{{"x": torch.ones(2) * i, "labels": i % 2}} for i in range(8)]
args = TrainingArguments({str(tmp_path)!r}, use_cpu=True, disable_tqdm=True, max_steps=4, save_steps=4)
trainer = Trainer(Net(), args, train_dataset=items)
trainer.train()
written = os.stat({str(tmp_path / "checkpoint-4")!r}).st_ino
trainer.add_callback(Signals)
args.max_steps, args.save_steps = 9, 9
try:
    trainer.train()
except SystemExit as end:
    assert end.code == 143
    assert os.stat({str(tmp_path / "checkpoint-4")!r}).st_ino != written
    print("SAVED")
"""
    done = forked.run(["-c", script])
    assert "SAVED" in done.stdout, done.stderr


IN_SAVE_MODEL = """
import os, signal, sys
from pathlib import Path
import safetensors.torch, torch
from torch import nn
from trainwright import Trainer, TrainingArguments
model = nn.Linear(4, 4)
trainer = Trainer(model, TrainingArguments(sys.argv[1], use_cpu=True), train_dataset=[{"x": 1}])
trainer.save_model()
def half(state, path, **kwargs):
    data = safetensors.torch.save(state)
    Path(path).write_bytes(data[: len(data) // 2])
    os.kill(os.getpid(), int(sys.argv[2]))
safetensors.torch.save_file = half
before = Path(sys.argv[1], "model.safetensors").read_bytes()
with torch.no_grad():
    model.weight.zero_()
Path(sys.argv[1], "before").write_bytes(before)
trainer.save_model()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_in_save_model_leaves_the_older_model_whole(number: signal.Signals, tmp_path: Path) -> None:
    done = forked.run(["-c", IN_SAVE_MODEL, str(tmp_path), str(int(number))])
    assert done.returncode == -number, done.stderr
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "before").read_bytes()


IN_IMPORT = """
import os, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "trainwright"]:
    del sys.modules[name]
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "trainwright.run.checkpointing":
            os.kill(os.getpid(), int(sys.argv[2]))
sys.meta_path.insert(0, Finder)
from trainwright import Trainer, TrainingArguments
TrainingArguments(sys.argv[1]).to_json_string()
os.makedirs(sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_during_the_import_ends_the_process_at_once(number: signal.Signals, tmp_path: Path) -> None:
    done = forked.run(["-c", IN_IMPORT, str(tmp_path / "run"), str(int(number))])
    assert done.returncode == (-number if number == signal.SIGTERM else code_of(number)), done.stderr
    assert number != signal.SIGINT or done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert not (tmp_path / "run").exists()
