"""What counts on a GPU: a step in bf16, the waits for the device, the stall of a save, packing by attention, MFU.

    python benchmarks/gpu.py            a Llama of 124M parameters on the GPU; about five minutes; then the shapes
    python benchmarks/gpu.py --shapes   the shapes alone; NAME after it: one of them
    python benchmarks/gpu.py --tiny     tiny ones, on the CPU where there is no GPU: to try the script

    step     us a step in bf16 autocast, as a ratio to a loop by hand, runs in turns; MFU = 6 x parameters x tokens a
             second / the device's peak (data sheet, dense 16-bit), as in Chowdhery et al. 2022, appendix B
    waits    how often the host waits for the device in a step, by torch's profiler: synchronisations, and values read
    stall    seconds from the end of a step that saves to the begin of the next one, in quiet steps
    packing  real tokens a second beside padded batches, for each attention that is installed
    shapes   models of known sizes with random weights in bf16, on packed rows of 4,096 tokens: tokens a second, MFU and
             peak memory, by hand, with transformers and with Trainwright, each without and with its levers; norms
             clipped at 1.0, a log every ten steps. MFU as
             above; of LoRA 4 x parameters, since frozen weights have no gradients. A step of Trainwright between two
             logs must not wait for the device: torch.cuda.set_sync_debug_mode("error") ends the benchmark if it does

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
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import torch  # noqa: E402
from harness import print_json, print_table, silence, versions  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator  # noqa: E402

from trainwright.distributed.device import peak_flops  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Work:
    def __init__(self, *, is_tiny: bool) -> None:
        self.sizes: dict[str, Any] = TINY if is_tiny else FULL
        self.batch, self.length, self.num_steps = (2, 16, 24) if is_tiny else (16, 512, 60)

    def model(self, attention: str = "sdpa") -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                max_position_embeddings=self.length,
                pad_token_id=0,
                attn_implementation=attention,
                **self.sizes,
            )
        )

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
        pin_memory=DEVICE.type == "cuda",
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
    } | settings
    with tempfile.TemporaryDirectory() as folder, silence():
        args = package.TrainingArguments(
            output_dir=folder,
            bf16=True,
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


def steps(work: Work, turns: int) -> dict[str, dict[str, Any]]:
    runs = {"hand": by_hand} | {library: partial(by_trainer, library=library) for library in LIBRARIES}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            found[name].append(seconds_a_step(work, run))
    num_parameters = sum(p.numel() for p in work.model().parameters())
    peak = peak_flops(DEVICE)
    result: dict[str, dict[str, Any]] = {}
    for name, times in found.items():
        seconds = statistics.median(times)
        ratio = statistics.median(mine / its for mine, its in zip(times, found["hand"], strict=True))
        flops = 6 * num_parameters * work.batch * work.length / seconds
        mfu = round(flops / peak, 3) if peak else None
        waits = waits_a_step(work, runs[name])
        result[name] = {"us": round(seconds * 1e6), "ratio": round(ratio, 3), "mfu": mfu, "waits": waits}
    return result


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


def stalls(work: Work) -> dict[str, float]:
    """In quiet steps."""
    found = {}
    for library in LIBRARIES:
        begun: dict[int, float] = {}
        ended: dict[int, float] = {}
        middle = work.num_steps // 2
        by_trainer(
            work,
            lambda step, ended=ended: ended.update({step: finished()}),
            library=library,
            saves_at=middle,
            before_step=lambda step, begun=begun: begun.update({step: time.perf_counter()}),
        )
        quiet = statistics.median(ended[i + 1] - ended[i] for i in range(WARM_UP, middle - 1))
        found[library] = round((begun[middle] - ended[middle]) / quiet, 2)
    return found


def packing(work: Work) -> dict[str, float]:
    """Real tokens a second of packed rows over those of padded batches."""
    from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerFast

    def collator() -> Any:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, "[UNK]"))
        return DataCollatorForTokenClassification(PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]"))

    def tokens_a_second(attention: str, **settings: Any) -> float:
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
            collate=collator(),
            max_steps=-1,
            num_train_epochs=1,
            **settings,
        )
        return sum(len(item["input_ids"]) for item in items) / (started[1] - started[0])

    kinds = ["sdpa"]
    if DEVICE.type == "cuda":
        kinds += ["flex_attention"] + (["flash_attention_2"] if find_spec("flash_attn") else [])
    padded = tokens_a_second("sdpa")
    return {
        kind: round(tokens_a_second(kind, packing="best_fit", packing_length=work.length) / padded, 2) for kind in kinds
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
        kind, sizes, self.is_lora, self.checkpoints = SHAPES[name]
        self.kind = kind
        self.sizes = sizes | (TINY_SIZES if is_tiny else {})
        self.batch, self.length, self.num_steps = (1, 64, 10) if is_tiny else (1, 4096, 30)
        # Tiny models only try the script, for which a compiler of C++ need not be there.
        self.backend = "eager" if is_tiny else "inductor"

    def model(self, attention: str = "sdpa") -> Any:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.kind)(
            max_position_embeddings=self.length, pad_token_id=0, bos_token_id=1, eos_token_id=2, **self.sizes
        )
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


def shape_by_hand(work: ShapeWork, after_step: AfterStep, *, compiles: bool) -> None:
    from torch.utils.data import DataLoader

    model = work.model().to(DEVICE)
    if work.checkpoints:
        model.gradient_checkpointing_enable()
    if compiles:
        for module in model.modules():
            for layer in module if isinstance(module, torch.nn.ModuleList) else ():
                layer.compile(backend=work.backend)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    loader = DataLoader(
        work.items(),
        batch_size=work.batch,
        shuffle=True,
        collate_fn=default_data_collator,  # type: ignore[arg-type]
        pin_memory=DEVICE.type == "cuda",
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
    """Each trains `work` and tells of its steps; the same rows for all."""
    common: dict[str, Any] = {
        "gradient_checkpointing": work.checkpoints,
        "accelerator_config": {"non_blocking": True},
        "optim": "adamw_torch_fused",
        "logging_strategy": "steps",
        "logging_steps": LOGGED_EVERY,
    }
    compiled = {"torch_compile_backend": work.backend}
    ours = partial(by_trainer, library="trainwright", **common)
    original = partial(by_trainer, library="transformers", **common)
    return {
        "hand": partial(shape_by_hand, compiles=False),
        "hand, blocks compiled": partial(shape_by_hand, compiles=True),
        "transformers": original,
        "transformers, compiled": partial(original, torch_compile=True, **compiled),
        "trainwright": ours,
        "trainwright, levers": partial(ours, torch_compile="regional", loss_kernel="auto", **compiled),
    }


def check_no_waits(work: ShapeWork, run: Callable[..., None]) -> bool | None:
    """Whether steps between two logs never wait for the device (an error ends the benchmark); None without a GPU."""
    if DEVICE.type != "cuda":
        return None

    def after_step(step: int) -> None:
        if step in (WARM_UP, work.num_steps - 1):
            torch.cuda.set_sync_debug_mode("error" if step == WARM_UP else "default")

    try:
        run(work, after_step, logging_strategy="no")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def shapes(names: list[str], *, is_tiny: bool) -> list[dict[str, Any]]:
    found = []
    for name in names:
        work = ShapeWork(name, is_tiny=is_tiny)
        num_parameters = sum(p.numel() for p in work.model().parameters())
        by_hand_s = 0.0
        for subject, run in shape_subjects(work).items():
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            torch._dynamo.reset()
            try:
                seconds = seconds_a_step(work, run)
            except torch.OutOfMemoryError:
                found.append({"shape": name, "subject": subject, "out_of_memory": True})
                continue
            by_hand_s = by_hand_s or seconds
            peak = peak_flops(DEVICE)
            tokens = work.batch * work.length
            flops = (4 if work.is_lora else 6) * num_parameters * tokens / seconds
            memory = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None
            waits = check_no_waits(work, run) if subject.startswith("trainwright") else None
            found.append(
                {
                    "shape": name,
                    "subject": subject,
                    "tokens_per_second": round(tokens / seconds),
                    "ratio": round(seconds / by_hand_s, 3),
                    "mfu": round(flops / peak, 3) if peak else None,
                    "peak_gib": None if memory is None else round(memory, 2),
                    "never_waits": waits,
                }
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument(
        "--shapes", nargs="?", const="all", choices=["all", *SHAPES], help="models of known sizes alone"
    )
    chosen = parser.parse_args()
    is_tiny = chosen.tiny
    if DEVICE.type == "cpu" and not is_tiny:
        print("There is no GPU here, so nothing was measured; --tiny tries the script.")
        return 0
    names = [*SHAPES] if chosen.shapes in (None, "all") else [chosen.shapes]
    found: dict[str, Any] = {"shapes": shapes(names, is_tiny=is_tiny)}
    work = Work(is_tiny=is_tiny)
    if chosen.shapes is None:
        found |= {"steps": steps(work, 1 if is_tiny else 5), "stall": stalls(work), "packing": packing(work)}
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "cpu"
    print_json({"benchmark": "gpu", "device": name, **found, **versions("torch", "transformers", "trainwright")})
    columns = ["shape", "subject", "tokens_per_second", "ratio", "mfu", "peak_gib", "never_waits"]
    print_table([columns, *([str(one.get(c, "out of memory")) for c in columns] for one in found["shapes"])])
    print_table([["published by others", "by", "tokens_per_second"], *([a, b, str(c)] for a, b, c in ANCHORS)])
    if chosen.shapes is not None:
        return 0
    rows = [["subject", "ratio", "us/step", "MFU", "waits a step", "stall in steps"]]
    for subject, one in found["steps"].items():
        waits = ", ".join(f"{count} {kind}" for kind, count in one["waits"].items()) or "none"
        stall = found["stall"].get(subject, "")
        rows.append([subject, str(one["ratio"]), str(one["us"]), str(one["mfu"]), waits, str(stall)])
    print_table(rows)
    print_table([["packed with", "tokens a second to padded"], *([k, str(v)] for k, v in found["packing"].items())])
    return 0


if __name__ == "__main__":
    sys.exit(main())
