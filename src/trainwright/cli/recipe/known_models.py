"""Recipes of chat models that people look for, with their memory. `tools/plan_recipes.py` plans it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from string import Template

from trainwright.errors import RecipeError, did_you_mean
from trainwright.support.door import parse_json

FOLDER = "trainwright.cli.recipe"
# GB of the cards that the file compares with, and what the context of the device may take of them.
CARDS_GB = (24, 80)
CONTEXT_GB = 2
# Rows of an update, whatever fits into a step.
ROWS_PER_UPDATE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model by its name on the Hub, and the planned memory of its recipe."""

    path: str
    # whether the Hub gives it only to people who have accepted its licence
    is_gated: bool
    # 10^9 bytes of a step by its rows
    memory_gb: Mapping[str, float]
    saved_by_4bit_gb: float
    speed: Mapping[str, str | int] | None

    def num_rows(self, card_gb: int) -> int:
        """Returns the most planned rows of a step that fit into a card; 0 if none do."""
        return max((int(rows) for rows, gb in self.memory_gb.items() if gb + CONTEXT_GB <= card_gb), default=0)

    def memory_lines(self) -> Iterator[str]:
        """Yields the planned memory as lines of a comment."""
        yield "#     rows in a step" + "".join(f"{rows:>8}" for rows in self.memory_gb)
        yield "#     GB            " + "".join(f"{gb:>8}" for gb in self.memory_gb.values())
        for card_gb in CARDS_GB:
            rows = self.num_rows(card_gb)
            fits = f"{rows} row{'s' * (rows != 1)}" if rows else "none; take 4-bit weights, or shorter rows"
            yield f"#     {card_gb} GB hold     {fits}"

    def speed_line(self) -> str:
        """Returns the measured speed, or a sentence that there is none."""
        if self.speed is None:
            return "Its speed with an adapter was not measured."
        rate = f"{self.speed['tokens_per_second']:,} tokens a second"
        return f"Measured on {self.speed['device']}, {self.speed['rows']}, random weights: {rate}."


def read_known_models() -> dict[str, KnownModel]:
    """Returns the models that `init chat --like` knows, by name."""
    text = resources.files(FOLDER).joinpath("templates/like.json").read_text(encoding="utf-8")
    return {name: KnownModel(**values) for name, values in parse_json(text).items()}


def find_known_model(name: str) -> str | None:
    """Returns the name here of a model by that name or by its name on the Hub, whatever their case; None if unknown."""
    models = read_known_models()
    names = {known: known for known in models} | {model.path.lower(): known for known, model in models.items()}
    return names.get(name.lower())


def check_known_model(task: str, name: str) -> None:
    """Refuses a name that is not known, and a task that has no recipe for it."""
    models = read_known_models()
    known = find_known_model(name)
    if known is None:
        listed = "\n".join(f"    {known:<16}{model.path}" for known, model in models.items())
        # Of a name on the Hub, the part after the organization is like the names here.
        hint = did_you_mean(name.rpartition("/")[2].lower(), models)
        raise RecipeError(
            f"--like {name}: there is no recipe for this model.{hint} Take the nearest of these and change "
            f"model.path:\n{listed}"
        )
    if task != "chat":
        raise RecipeError(f"--like is for the task chat, not for {task}: trainwright init chat --like {known}")


def fill_recipe(name: str) -> str:
    """Returns the recipe of a known model as text."""
    known = find_known_model(name)
    assert known is not None, "the command has checked it"
    name = known
    model = read_known_models()[name]
    rows = max(1, model.num_rows(CARDS_GB[0]))
    text = resources.files(FOLDER).joinpath("templates/chat-like.yaml").read_text(encoding="utf-8")
    return Template(text).substitute(
        name=name,
        title=model.path.partition("/")[2],
        path=model.path,
        note="a name on the Hub, where its licence must be accepted" if model.is_gated else "a name on the Hub",
        memory="\n".join(model.memory_lines()),
        speed=model.speed_line(),
        saved=model.saved_by_4bit_gb,
        rows=rows,
        accumulation=ROWS_PER_UPDATE // rows,
    )
