"""The pictures of the pages show runs that went well, and nothing of the machine that drew them."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

PICTURES = sorted((Path(__file__).parents[2] / "docs" / "pictures").glob("*.svg"))
OF_THIS_MACHINE = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|usr|opt)/")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_shows_no_traceback_and_no_path_of_a_machine(picture: Path) -> None:
    shown = html.unescape(re.sub(r"<[^>]+>", "\n", picture.read_text(encoding="utf-8"))).replace("\xa0", " ")
    assert "Traceback" not in shown
    assert OF_THIS_MACHINE.search(shown) is None
