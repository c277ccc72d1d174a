"""What counts on a GPU: a step in bf16, the waits for the device, the stall of a save, packing by attention, MFU.

    python benchmarks/gpu.py               models of known sizes, then a Llama of 124M parameters
    python benchmarks/gpu.py --minutes 8   begins no cell after so many minutes, as `make gpu` does on one H100
    python benchmarks/gpu.py --shapes      the models of known sizes alone; NAME after it: one of them, "all": a 4B too
    python benchmarks/gpu.py --tiny        tiny ones, on the CPU where there is no accelerator: to try the script

    shapes   models of known sizes with random weights in bf16, on packed rows of 4,096 tokens: tokens a second, MFU,
             peak memory and waits, by hand, with transformers and with Trainwright, without and with its levers
             (compiled blocks and a loss without logits; where activations are recomputed, also attention kept instead
             of compiled blocks); norms clipped at 1.0, a log every ten steps. MFU as below; of LoRA 4 x parameters,
             since frozen weights have no gradients. Waits a step between two logs, as
             torch.cuda.set_sync_debug_mode("warn") finds them; a mask that transformers makes from positions is one,
             in each column
    step     us a step in bf16 autocast, median of three runs, as a ratio to a loop by hand; MFU = 6 x parameters x
             tokens a second / the device's peak (data sheet, dense 16-bit), as in Chowdhery et al. 2022, appendix B
    waits    how often the host waits for the device in a step, by torch's profiler: synchronisations, and values read
    stall    seconds from the end of a step that saves to the begin of the next one, in quiet steps
    packing  real tokens a second beside padded batches, for each attention that is installed

A cell that fails (out of memory, for example) is named in the table; the others are measured all the same. Nothing is
downloaded.

One JSON line, then a table.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import torch  # noqa: E402
from harness import print_json, print_table, silence, versions  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator  # noqa: E402

from trainwright.distributed.device import (  # noqa: E402
    DeviceMemory,
    accelerator,
    empty_cache,
    name_of,
    peak_flops,
    pins_memory,
    synchronize,
)

DEVICE = torch.device(accelerator() or "cpu")
LIBRARIES = ("trainwright", "transformers")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
VOCABULARY = 1024
WARM_UP = 6
LOGGED_EVERY = 10  # steps, of the shapes
# What others have published, to read beside the shapes: other machines, lengths and settings.
ANCHORS = (
    ("Llama-3 8B with LoRA, one H100, no clipping", "NVIDIA AutoModel", 12_473),
    ("Qwen3-0.6B, 16k tokens, one H100", "accelerate's pull request for sequence parallelism", 27_500),
)
FULL = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
AfterStep = Callable[[int], None]


def finished() -> float:
    """The time when all that was begun on the device is done."""
    synchronize(DEVICE)
    return time.perf_counter()


class Cells:
    """Measures one cell after the other; one that fails, or comes too late, does not lose the others.

    Args:
        minutes: no cell begins after so many; None: all do.
    """

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self.num_measured = 0

    def measure(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns what a function found, or the reason why there is nothing, under "failed"."""
        if self._end is not None and time.monotonic() > self._end:
            return {"failed": "no time left"}
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = work()
        except torch.OutOfMemoryError:
            return {"failed": "out of memory"}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:100]}
        finally:
            gc.collect()
            empty_cache(DEVICE)
        self.num_measured += 1
        return found


class Work:
    def __init__(self, *, is_tiny: bool) -> None:
        self.sizes: dict[str, Any] = TINY if is_tiny else FULL
        self.batch, self.length, self.num_steps = (2, 16, 24) if is_tiny else (16, 512, 60)

    def model(self, attention: str = "sdpa") -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=self.length,
            pad_token_id=0,
            attn_implementation=attention,
            **self.sizes,
        )
        with DEVICE:
            return LlamaForCausalLM(config)

    def items(self, *, is_ragged: bool = False) -> list[dict[str, Any]]:
        """Sequences of one length, or of lengths of which most are short."""
        generator = torch.Generator().manual_seed(1)
        made = []
        for _ in range(self.batch * (self.num_steps + 1)):
            share = float(torch.rand(1, generator=generator)) ** 3 if is_ragged else 1.0
            row = torch.randint(1, VOCABULARY, (max(2, int(self.length * share)),), generator=generator).tolist()
            made.append({"input_ids": row, "labels": row})
        return made


def by_hand(work: Work, after_step: AfterStep) -> None:
    from torch.utils.data import DataLoader

    model = work.model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / work.num_steps))
    loader = DataLoader(
        work.items(),
        batch_size=work.batch,
        shuffle=True,
        collate_fn=default_data_collator,  # type: ignore[arg-type]
        pin_memory=pins_memory(DEVICE),
    )
    for step, batch in enumerate(loader, start=1):
        on_device = {name: value.to(DEVICE, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(**on_device).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        after_step(step)
        if step == work.num_steps:
            return


def by_trainer(
    work: Work,
    after_step: AfterStep,
    *,
    library: str,
    before_step: AfterStep | None = None,
    saves_at: int = 0,
    model: Any = None,
    items: Any = None,
    collate: Any = default_data_collator,
    **settings: Any,
) -> None:
    package = importlib.import_module(library)

    class Tells(package.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if before_step is not None:
                before_step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            after_step(state.global_step)
            control.should_save = state.global_step == saves_at

    chosen = {
        "per_device_train_batch_size": work.batch,
        "max_steps": work.num_steps,
        "logging_strategy": "no",
        "bf16": True,
    } | settings
    with tempfile.TemporaryDirectory() as folder, silence():
        args = package.TrainingArguments(
            output_dir=folder,
            learning_rate=1e-4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            use_cpu=DEVICE.type == "cpu",
            **chosen,
        )
        package.Trainer(
            model=model or work.model(),
            args=args,
            train_dataset=items or work.items(),
            data_collator=collate,
            callbacks=[Tells()],
        ).train()


def seconds_a_step(work: Work, run: Callable[..., None]) -> float:
    marks: dict[int, float] = {}

    def after_step(step: int) -> None:
        if step in (WARM_UP, work.num_steps):
            marks[step] = finished()

    run(work, after_step)
    return (marks[work.num_steps] - marks[WARM_UP]) / (work.num_steps - WARM_UP)


def subject_steps(work: Work, turns: int, name: str, by_hand_s: list[float]) -> dict[str, Any]:
    """Measures a subject in some turns; `by_hand_s` has the seconds of those of the loop by hand, or gets them."""
    run = by_hand if name == "hand" else partial(by_trainer, library=name)
    times = [seconds_a_step(work, run) for _ in range(turns)]
    if name == "hand":
        by_hand_s[:] = times
    seconds = statistics.median(times)
    num_parameters = sum(p.numel() for p in work.model().parameters())
    peak = peak_flops(DEVICE)
    flops = 6 * num_parameters * work.batch * work.length / seconds
    return {
        "us": round(seconds * 1e6),
        "ratio": round(seconds / statistics.median(by_hand_s), 3) if by_hand_s else None,
        "mfu": round(flops / peak, 3) if peak else None,
        "waits": waits_a_step(work, run),
    }


def waits_a_step(work: Work, run: Callable[..., None]) -> dict[str, float]:
    """From the end of one step to that of the last; one step of them is not counted, for its own wait."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=kinds)

    def after_step(step: int) -> None:
        if step == WARM_UP:
            profiler.start()
        elif step == work.num_steps - 1:
            profiler.stop()

    run(work, after_step)
    counts = {event.key: event.count for event in profiler.key_averages() if event.key in WAITS}
    return {name: round(count / (work.num_steps - 1 - WARM_UP), 2) for name, count in counts.items()}


def stall(work: Work, library: str) -> dict[str, float]:
    """In quiet steps."""
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    middle = work.num_steps // 2

    def after_step(step: int) -> None:
        ended[step] = finished()

    def before_step(step: int) -> None:
        begun[step] = time.perf_counter()

    by_trainer(work, after_step, library=library, saves_at=middle, before_step=before_step)
    quiet = statistics.median(ended[i + 1] - ended[i] for i in range(WARM_UP, middle - 1))
    return {"stall": round((begun[middle] - ended[middle]) / quiet, 2)}


def tokens_a_second(work: Work, attention: str, **settings: Any) -> dict[str, float]:
    """Real tokens a second of rows of unequal length, padded or packed."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, "[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    items = work.items(is_ragged=True)
    started = [0.0, 0.0]

    def after_step(step: int) -> None:
        started[0 if step == 1 else 1] = finished()

    by_trainer(
        work,
        after_step,
        library="trainwright",
        model=work.model(attention),
        items=items,
        collate=DataCollatorForTokenClassification(tokenizer),
        max_steps=-1,
        num_train_epochs=1,
        **settings,
    )
    return {"tokens_per_second": round(sum(len(item["input_ids"]) for item in items) / (started[1] - started[0]), 1)}


def packings(work: Work) -> dict[str, Callable[[], dict[str, float]]]:
    """Returns the measurement of padded batches, and of packed rows for each attention that is installed."""
    kinds = ["sdpa"]
    if DEVICE.type == "cuda":
        kinds += ["flex_attention"] + (["flash_attention_2"] if find_spec("flash_attn") else [])
    packed: dict[str, Any] = {"packing": "best_fit", "packing_length": work.length}
    return {"padded": partial(tokens_a_second, work, "sdpa")} | {
        kind: partial(tokens_a_second, work, kind, **packed) for kind in kinds
    }


# -- shapes ------------------------------------------------------------------------------------------------------------

# name -> class of its configuration, sizes, whether it trains adapters only, whether activations are checkpointed
SHAPES: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "Qwen3-0.6B": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        False,
        False,
    ),
    "Llama-3.2-1B": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        False,
        False,
    ),
    "4B class (Qwen3-4B)": (
        "Qwen3Config",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        False,
        True,
    ),
    "Llama-3.1-8B LoRA": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
        },
        True,
        True,
    ),
}
THREE = ["Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B LoRA"]
TINY_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
}


class ShapeWork(Work):
    """Packed rows for a model of a known shape."""

    def __init__(self, name: str, *, is_tiny: bool) -> None:
        self.name = name
        kind, sizes, self.is_lora, self.checkpoints = SHAPES[name]
        self.kind = kind
        self.sizes = sizes | (TINY_SIZES if is_tiny else {})
        self.batch = 1
        self.length = 64 if is_tiny else 4096
        # Timed from the end of one step to the end of another; waits are counted in the steps after it but the last.
        self.first_timed = 2 if is_tiny else 5
        self.last_timed = 5 if is_tiny else 25
        self.num_steps = 8 if is_tiny else 30
        # Tiny models only try the script, for which a compiler of C++ need not be there.
        self.backend = "eager" if is_tiny else "inductor"

    def model(self, attention: str = "sdpa") -> Any:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.kind)(
            max_position_embeddings=self.length, pad_token_id=0, bos_token_id=1, eos_token_id=2, **self.sizes
        )
        with DEVICE:
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.bfloat16
            )
        model.config.use_cache = False
        if not self.is_lora:
            return model
        from peft import LoraConfig, get_peft_model

        if self.checkpoints:
            model.enable_input_require_grads()
        return get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        )

    def items(self, *, is_ragged: bool = False) -> list[dict[str, Any]]:
        """Rows of several samples, whose positions begin anew."""
        draw = torch.Generator().manual_seed(1)
        rows = []
        for _ in range(self.batch * (self.num_steps + 1)):
            starts = torch.rand(self.length, generator=draw) < 8 / self.length
            starts[0] = True
            index = torch.arange(self.length)
            positions = index - torch.where(starts, index, 0).cummax(0).values
            ids = torch.randint(3, self.sizes["vocab_size"], (self.length,), generator=draw)
            rows.append({"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(starts, -100)})
        return rows


def shape_by_hand(work: ShapeWork, after_step: AfterStep) -> None:
    from torch.utils.data import DataLoader

    model = work.model().to(DEVICE)
    if work.checkpoints:
        model.activation_checkpointing_enable()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    loader = DataLoader(
        work.items(),
        batch_size=work.batch,
        shuffle=True,
        collate_fn=default_data_collator,  # type: ignore[arg-type]
        pin_memory=pins_memory(DEVICE),
    )
    model.train()
    for step, batch in enumerate(loader, start=1):
        outputs = model(**{name: value.to(DEVICE, non_blocking=True) for name, value in batch.items()})
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOGGED_EVERY == 0:
            outputs.loss.item()
        after_step(step)
        if step == work.num_steps:
            return


def shape_subjects(work: ShapeWork) -> dict[str, Callable[..., None]]:
    """Each trains `work` and tells of its steps; the same rows for all, and weights in bf16 without autocast."""
    common: dict[str, Any] = {
        "bf16": False,
        "accelerator_config": {"non_blocking": True},
        "optim": "adamw_torch_fused",
        "logging_strategy": "steps",
        "logging_steps": LOGGED_EVERY,
    }
    recomputed = common | {"activation_checkpointing": work.checkpoints}
    levers: dict[str, Any] = {"torch_compile": "regional", "torch_compile_backend": work.backend, "loss_kernel": "auto"}
    kept: dict[str, Any] = {"activation_checkpointing_kwargs": {"save": "attention"}, "loss_kernel": "auto"}
    ours = partial(by_trainer, library="trainwright", **recomputed)
    subjects: dict[str, Callable[..., None]] = {
        "hand": shape_by_hand,
        "transformers": partial(by_trainer, library="transformers", **recomputed),
        "trainwright": ours,
        "trainwright, levers": partial(ours, **levers),
    }
    if work.checkpoints:
        subjects["trainwright, attention kept"] = partial(ours, **kept)
    return subjects


@contextmanager
def counted_waits() -> Iterator[list[warnings.WarningMessage]]:
    """Within it, each operation that makes the host wait for the device appends a warning to the list."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measured_shape(
    work: ShapeWork, run: Callable[..., None], by_hand_s: list[float], *, is_hand: bool
) -> dict[str, Any]:
    """Trains once; `by_hand_s` has the seconds of a step of the loop by hand, or gets them."""
    torch._dynamo.reset()
    memory = DeviceMemory()
    memory.reset_peak()
    marks: dict[int, float] = {}
    num_waits: float | None = None
    counting = ExitStack()
    found: list[warnings.WarningMessage] = []

    def after_step(step: int) -> None:
        nonlocal found, num_waits
        if step in (work.first_timed, work.last_timed):
            marks[step] = finished()
        if DEVICE.type != "cuda":
            return
        if step == work.last_timed:
            found = counting.enter_context(counted_waits())
        elif step == work.num_steps - 1:
            synchronizing = [one for one in found if "synchronizing" in str(one.message)]
            num_waits = len(synchronizing) / (work.num_steps - 1 - work.last_timed)
            counting.close()

    with counting:
        run(work, after_step)
    peak_bytes = memory.peak_bytes() if memory.is_known else None
    num_parameters = sum(p.numel() for p in work.model().parameters())
    seconds = (marks[work.last_timed] - marks[work.first_timed]) / (work.last_timed - work.first_timed)
    if is_hand:
        by_hand_s.append(seconds)
    peak = peak_flops(DEVICE)
    tokens = work.batch * work.length
    flops = (4 if work.is_lora else 6) * num_parameters * tokens / seconds
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "ratio": round(seconds / by_hand_s[0], 3) if by_hand_s else None,
        "mfu": round(flops / peak, 3) if peak else None,
        "peak_gib": None if peak_bytes is None else round(peak_bytes / 2**30, 2),
        "waits": num_waits,
    }


def shapes(names: list[str], cells: Cells, *, is_tiny: bool) -> list[dict[str, Any]]:
    found = []
    for name in names:
        work = ShapeWork(name, is_tiny=is_tiny)
        by_hand_s: list[float] = []
        for subject, run in shape_subjects(work).items():
            measure = partial(measured_shape, work, run, by_hand_s, is_hand=subject == "hand")
            found.append({"shape": name, "subject": subject, **cells.measure(f"{name}, {subject}", measure)})
    return found


def cells_of(row: dict[str, Any], columns: list[str]) -> list[str]:
    """Returns the texts of a row: its values, or where it has none the reason."""
    if "failed" not in row:
        return [str(row[name]) for name in columns]
    return [row["failed"], *("" for _ in columns[1:])]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--minutes", type=float, help="begin no cell after so many minutes")
    parser.add_argument(
        "--shapes", nargs="?", const="three", choices=["three", "all", *SHAPES], help="models of known sizes alone"
    )
    chosen = parser.parse_args(arguments)
    is_tiny = chosen.tiny
    if DEVICE.type == "cpu" and not is_tiny:
        print("There is no GPU here, so nothing was measured; --tiny tries the script.")
        return 0
    cells = Cells(chosen.minutes)
    several = {None: THREE, "three": THREE, "all": [*SHAPES]}
    found: dict[str, Any] = {
        "shapes": shapes(several.get(chosen.shapes, [chosen.shapes]), cells, is_tiny=is_tiny),
        "steps": {},
        "packing": {},
    }
    if chosen.shapes is None:
        found |= of_small_llama(Work(is_tiny=is_tiny), cells, turns=1 if is_tiny else 3)
    print_json(
        {
            "benchmark": "gpu",
            "device": name_of(DEVICE) or DEVICE.type,
            **found,
            **versions("torch", "transformers", "trainwright"),
        }
    )
    columns = ["tokens_per_second", "ratio", "mfu", "peak_gib", "waits"]
    rows = [[one["shape"], one["subject"], *cells_of(one, columns)] for one in found["shapes"]]
    print_table([["shape", "subject", *columns], *rows])
    print_table([["published by others", "by", "tokens_per_second"], *([a, b, str(c)] for a, b, c in ANCHORS)])
    if found["steps"]:
        columns = ["ratio", "us", "mfu", "waits", "stall"]
        rows = [[subject, *cells_of(one, columns)] for subject, one in found["steps"].items()]
        print_table([["subject", "ratio", "us/step", "MFU", "waits a step", "stall in steps"], *rows])
        columns = ["tokens_per_second"]
        rows = [[kind, *cells_of(one, columns)] for kind, one in found["packing"].items()]
        print_table([["batches", "real tokens a second"], *rows])
    return 0 if cells.num_measured else 1


def of_small_llama(work: Work, cells: Cells, turns: int) -> dict[str, Any]:
    """Returns the figures of steps, stalls and packing."""
    by_hand_s: list[float] = []
    found: dict[str, dict[str, Any]] = {}
    for name in ("hand", *LIBRARIES):
        found[name] = cells.measure(f"step, {name}", partial(subject_steps, work, turns, name, by_hand_s))
        found[name]["stall"] = ""
    for library in LIBRARIES:
        stalled = cells.measure(f"stall, {library}", partial(stall, work, library))
        found[library]["stall"] = stalled.get("stall", stalled.get("failed"))
    packing = {name: cells.measure(f"packing, {name}", measure) for name, measure in packings(work).items()}
    return {"steps": found, "packing": packing}


if __name__ == "__main__":
    sys.exit(main())
