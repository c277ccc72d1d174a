"""Recipes on TRL's SFTTrainer over this package: `on_trl.py FOLDER` prints as JSON what was said before step 1."""

import json
import logging
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from trainwright.compat import install

install()

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from tests._support import chats  # noqa: E402
from tests.capabilities.what_is_trained import recipes  # noqa: E402


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "preflight" in record.name:
            self.lines.append(record.getMessage())


def sft(folder: Path, model: Any, *, template: str = chats.MARKED, peft_config: Any = None, **how: Any) -> Any:
    rows = Dataset.from_dict({"messages": [chats.conversation(number) for number in range(16)]})
    args = SFTConfig(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        **{"max_length": 32, **how},
    )
    return SFTTrainer(
        model, args=args, train_dataset=rows, processing_class=chats.tokenizer(template), peft_config=peft_config
    )


RECIPES: dict[str, Any] = {
    "all": lambda folder: sft(folder, chats.llama()),
    "all, no marks": lambda folder: sft(folder, chats.llama(), template=chats.TEMPLATE),
    "answers": lambda folder: sft(folder, chats.llama(), assistant_only_loss=True),
    "answers, padding free": lambda folder: sft(
        folder, chats.llama(), assistant_only_loss=True, padding_free=True, max_length=None
    ),
    "router": lambda folder: sft(
        folder, recipes.mixtral(), assistant_only_loss=True, peft_config=LoraConfig(r=2, target_modules="all-linear")
    ),
    "vocabulary": lambda folder: sft(folder, chats.llama(vocab_size=20), assistant_only_loss=True),
}


def main(folder: Path) -> None:
    found = {}
    for name, make in RECIPES.items():
        trainer = make(folder / name)
        heard = Lines()
        logging.getLogger("trainwright").addHandler(heard)
        shown = StringIO()
        trainer.model.register_forward_pre_hook(stop)
        try:
            with redirect_stdout(shown):
                trainer.train()
        except Reached:
            pass
        logging.getLogger("trainwright").removeHandler(heard)
        found[name] = {"warned": heard.lines, "shown": shown.getvalue().splitlines()}
    print(json.dumps(found))


class Reached(Exception):
    """The first forward pass."""


def stop(*_: Any) -> None:
    raise Reached


if __name__ == "__main__":
    main(Path(sys.argv[1]))
