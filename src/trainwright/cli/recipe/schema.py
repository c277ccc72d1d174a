"""Schema of a configuration file besides TrainingArguments: task, model and data, with help and defaults."""

# ruff: noqa: RUF009 -- entry() makes a dataclass field
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright._types import JSONObject
from trainwright.cli.recipe.early_stopping import EarlyStopping

# Metrics that a file may name, besides functions -> the tasks that have them.
METRICS = {"rouge": ("seq2seq",)}
METRICS_HELP = (
    "Metrics in addition to those of the task: rouge (seq2seq), module:function of an installed module, or "
    "file.py:function beside the file; the function takes an EvalPrediction and returns name -> number."
)
JOINT = " + "  # between the names of columns that are read as one
FORMATS = ("csv", "tsv", "json", "jsonl", "parquet", "text", "conll", "images")
PAIR_FORMS = ("text", "messages")
DTYPES = ("float32", "bfloat16", "float16")
# Our chat templates (cli/tasks/chat_templates), and the tokens that they use.
CHAT_TEMPLATES = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": (),
    "plain": (),
}


def entry(default: Any, help: str, *, choices: Sequence[str] | None = None, low: float | None = None) -> Any:
    """Declares a field with its help, choices and minimum; typed like dataclasses.field()."""
    metadata = {"help": help, "choices": choices, "low": low}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class LearnPart:
    """A tokenizer learned from the training text."""

    kind: str = entry("bpe", "bpe: pairs of bytes; words: one token for each.", choices=("bpe", "words"))
    vocab_size: int = entry(2048, "Tokens at most.", low=16)
    pattern: str | None = entry(None, "words: regular expression of a token (null: split at spaces).")


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Model to train, its weights and its tokenizer."""

    path: str | None = entry(None, "A directory, package:NAME/DIRECTORY, or a name on the Hub.")
    from_scratch: bool = entry(False, "Take the model's configuration only, and draw the weights at random.")
    config: JSONObject = entry({}, "Settings of its config.json; with model_type, a model from scratch.")
    tokenizer: str | None = entry(None, "Where the tokenizer or image processor is (null: with the model).")
    learn_tokenizer: LearnPart | None = entry(None, "Learn a tokenizer from the training text.")
    dtype: str | None = entry(None, "Type of the weights (null: float32).", choices=DTYPES)
    revision: str | None = entry(None, "Branch, tag or commit on the Hub.")
    quantization: str | None = entry(None, "Bits per weight when loaded; needs lora.", choices=("4bit", "8bit"))


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    """A low-rank adapter that is trained in place of the model's weights, by the package peft."""

    r: int = entry(16, "Rank of the adapter's matrices.", low=1)
    alpha: int = entry(32, "Scale of the adapter, divided by r.", low=1)
    dropout: float = entry(0.0, "Share of the adapter's inputs that is dropped.", low=0)
    target_modules: str | list[str] = entry("all-linear", "Names of the layers, or a regular expression of them.")
    modules_to_save: list[str] | None = entry(None, "Layers that are trained whole (a new head is by itself).")
    use_dora: bool = entry(False, "Split weights into size and direction (DoRA).")
    use_rslora: bool = entry(False, "Divide alpha by the root of r (rsLoRA).")


# Losses of TRL's DPOTrainer that are a mean over pairs.
PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down")
# Those that expect some pairs the wrong way round.
SMOOTHED = ("robust", "exo_pair")


@dataclass(frozen=True, kw_only=True)
class PreferencePart:
    """Settings of the task preference, which are those of TRL's DPOConfig."""

    beta: float = entry(0.1, "How much the model keeps to the reference; higher: more.", low=0)
    loss_type: str = entry("sigmoid", "Loss of a pair; sigmoid is DPO's.", choices=PAIR_LOSSES)
    label_smoothing: float = entry(0.0, "robust, exo_pair: share of pairs expected to be the wrong way round.", low=0)
    reference: str | None = entry(None, "Model that the answers are compared with (null: the model before training).")


@dataclass(frozen=True, kw_only=True)
class LaunchPart:
    """Processes of a run, started by torchrun if no launcher did."""

    processes: int = entry(1, "Number of processes on this machine: one per device.", low=1)


@dataclass(frozen=True, kw_only=True)
class ImagePart:
    """Conversion of pixels to numbers, for models without an image processor."""

    height: int | None = entry(None, "Rows of pixels (null: the model's image_size).", low=1)
    width: int | None = entry(None, "Columns of pixels (null: as height).", low=1)
    channels: int = entry(3, "1: grey, 3: colour.", low=1)
    max_value: float = entry(255.0, "The value of a white pixel.", low=1)


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """Rows to train and to evaluate on, and their columns."""

    train: str | list[str] | None = entry(None, "Files, also as patterns (*.csv); with dataset: a split.")
    sources: list[Any] | None = entry(
        None, "In place of train: [{path: FILE, name: NAME, share: 0.3}]; share also all, or 2 epochs."
    )
    eval: str | list[str] | None = entry(None, "As train, for evaluation (null: eval_share is held out).")
    dataset: str | None = entry(None, "Name or directory of a dataset of the package datasets.")
    subset: str | None = entry(None, "Configuration of the dataset, if it has several.")
    format: str | None = entry(None, "Format of the files (null: by their suffix).", choices=FORMATS)
    header: bool = entry(True, "csv, tsv: the first line names the columns; false: they are 0, 1, 2, ...")
    delimiter: str | None = entry(None, "csv, tsv: delimiter of columns (null: detected in the first line).")
    encoding: str | None = entry(None, "Encoding of text files, as latin-1 (null: UTF-8, or detected).")
    sample_by: str = entry("line", "text: unit of a sample.", choices=("line", "paragraph", "document"))
    pattern: str | None = entry(None, "text: regular expression; its named groups are columns.")
    map: str | None = entry(
        None, "Function of a row (a dict) that returns the row to use, or None to leave it out: file.py:function."
    )
    columns: JSONObject = entry({}, "Role in the task -> name of the column.")
    where: JSONObject = entry({}, "Use only rows with these values in their columns.")
    labels: list[Any] | dict[Any, Any] | None = entry(None, "Labels in order, or value -> label (null: found ones).")
    class_weights: str | dict[Any, Any] | None = entry(
        None, "Classes in the training loss: balanced (by their rows), or label -> weight (others 1)."
    )
    eval_share: float = entry(0.1, "Share of the training rows that is held out.", low=0)
    split_by: str | None = entry(
        None, "Column; rows with the same value are all held out, or all trained on (equal rows always are)."
    )
    stratify: str | None = entry(None, "Column; each of its values has its share among the rows held out.")
    max_train_rows: int | None = entry(None, "Maximum number of training rows.", low=1)
    max_eval_rows: int | None = entry(None, "Maximum number of evaluation rows.", low=1)
    split_seed: int = entry(0, "Seed of the shuffle before rows are held out or cut.", low=0)
    max_length: int | None = entry(None, "Tokens per text; longer texts are cut off (null: the model's limit).", low=2)
    max_target_length: int | None = entry(None, "seq2seq: the same for targets (null: as max_length).", low=2)
    mask_share: float = entry(0.15, "masked-lm: share of the tokens that are hidden.", low=0)
    chat_template: str | None = entry(
        None, "chat and pairs: chatml, llama3, gemma, mistral, plain, or a .jinja file (null: the tokenizer's)."
    )
    pairs: str | None = entry(
        None, "preference, reward: form of the answers (null: by the rows; a run writes it down).", choices=PAIR_FORMS
    )
    loss_on: str = entry("answers", "chat: messages that carry loss.", choices=("answers", "all"))
    system: str | None = entry(None, "chat: first message of conversations that have no system message.")
    image: ImagePart = field(default_factory=ImagePart, metadata={"help": "How pixels become numbers."})


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Requirements of a task. The function of the same name in cli/tasks/task_builders.py makes its objects."""

    title: str
    model_class: str  # class of transformers that loads the model
    needs: tuple[str, ...]  # roles that must have a column
    takes: tuple[str, ...] = ()  # roles that may have a column
    takes_lists: bool = False  # whether a row may have several labels
    is_paired: bool = False  # whether a sample is a pair of answers, trained by TRL's trainers
    generates: bool = False  # whether evaluation writes text, so that generation settings apply
    adapter: str | None = None  # peft's name for the task
    only: tuple[str, ...] = ()  # entries of `data` that have an effect in this task but not in all tasks
    training: Mapping[str, object] = field(default_factory=dict)  # arguments of its runs, unless the file sets them


TASKS: dict[str, TaskSpec] = {
    "text-classification": TaskSpec(
        title="one label for a text",
        model_class="AutoModelForSequenceClassification",
        adapter="SEQ_CLS",
        needs=("text", "label"),
        takes=("text_pair",),
        only=("class_weights", "labels", "max_length"),
        takes_lists=True,
    ),
    "token-classification": TaskSpec(
        title="a tag for each word",
        model_class="AutoModelForTokenClassification",
        adapter="TOKEN_CLS",
        needs=("words", "tags"),
        only=("labels", "max_length"),
    ),
    "causal-lm": TaskSpec(
        title="continue a text",
        model_class="AutoModelForCausalLM",
        adapter="CAUSAL_LM",
        needs=("text",),
        only=("max_length",),
        training={"loss_kernel": "auto"},
    ),
    "masked-lm": TaskSpec(
        title="fill in hidden words",
        model_class="AutoModelForMaskedLM",
        needs=("text",),
        only=("max_length", "mask_share"),
    ),
    "seq2seq": TaskSpec(
        title="a text from a text",
        model_class="AutoModelForSeq2SeqLM",
        needs=("source", "target"),
        generates=True,
        only=("max_length", "max_target_length"),
        adapter="SEQ_2_SEQ_LM",
    ),
    "chat": TaskSpec(
        title="answer in a conversation",
        model_class="AutoModelForCausalLM",
        adapter="CAUSAL_LM",
        needs=(),
        takes=("messages", "instruction", "input", "output", "system"),
        only=("max_length", "chat_template", "loss_on", "system"),
        training={"loss_kernel": "auto"},
    ),
    "preference": TaskSpec(
        title="prefer one answer to another (DPO)",
        model_class="AutoModelForCausalLM",
        adapter="CAUSAL_LM",
        needs=("chosen", "rejected"),
        takes=("prompt",),
        only=("max_length", "chat_template", "pairs"),
        is_paired=True,
    ),
    "reward": TaskSpec(
        title="score an answer, learned from pairs",
        model_class="AutoModelForSequenceClassification",
        adapter="SEQ_CLS",
        needs=("chosen", "rejected"),
        takes=("prompt", "text"),
        only=("max_length", "chat_template", "pairs"),
        is_paired=True,
    ),
    "image-classification": TaskSpec(
        title="one label for an image",
        model_class="AutoModelForImageClassification",
        needs=("image", "label"),
        only=("class_weights", "labels", "image"),
        takes_lists=True,
    ),
    "regression": TaskSpec(
        title="a number for a text",
        model_class="AutoModelForSequenceClassification",
        adapter="SEQ_CLS",
        needs=("text", "label"),
        takes=("text_pair",),
        only=("max_length",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A file that was read and checked: paths are absolute, and every entry has its type."""

    task: str
    model: ModelPart
    data: DataPart
    lora: LoraPart | None = None
    preference: PreferencePart | None = None
    launch: LaunchPart | None = None
    training: JSONObject  # arguments of TrainingArguments, as given
    metrics: tuple[str, ...] = ()  # names of METRICS, and of functions
    early_stopping: EarlyStopping | None = None  # entries of `training` that are no arguments

    @property
    def spec(self) -> TaskSpec:
        """Returns the row of the task in `TASKS`."""
        return TASKS[self.task]

    def column(self, role: str) -> str:
        """Returns the column for a role of the task; by default the column with that name."""
        name = self.data.columns.get(role, role)
        return JOINT.join(map(str, name)) if isinstance(name, list) else str(name)


def list_names(kind: type) -> list[str]:
    """Returns the names of the fields of a dataclass."""
    return [one.name for one in dataclasses.fields(kind)]
