from __future__ import annotations

from families.table import PAGE, page


def test_the_page_of_families_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: PYTHONPATH=tests python -m families.table"
