"""The changelog is read in minutes: an entry is one line that ends with a link to the page that has the rest."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
ENTRIES = [line for line in TEXT.splitlines() if line.startswith("- ")]
MOST_WORDS = 32
MOST_WORDS_IN_ALL = 4000


def anchors(page: str) -> set[str]:
    """The names of the headings of a page, as the site and the forge make them."""
    titles = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_an_entry_is_one_line_with_a_link() -> None:
    assert len(ENTRIES) > 50
    wrong = [
        line for line in ENTRIES if len(line.split()) > MOST_WORDS or not re.search(r"\(\[[^\]]+\]\([^)]+\)\)\.$", line)
    ]
    assert wrong == []
    assert [line for line in TEXT.splitlines() if line.startswith("  ")] == [], "an entry goes over several lines"
    assert len(TEXT.split()) <= MOST_WORDS_IN_ALL


def test_the_links_lead_somewhere() -> None:
    lost = []
    for page, anchor in re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", TEXT):
        if not (ROOT / page).is_file() or (anchor and anchor not in anchors(page)):
            lost.append(f"{page}#{anchor}")
    assert lost == []
