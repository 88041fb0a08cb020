"""The table in docs/layouts.md is what the code that makes it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.layout_table import table

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


@pytest.mark.slow
def test_the_page_has_the_table_as_it_is_made() -> None:
    assert table() in PAGE.read_text()
