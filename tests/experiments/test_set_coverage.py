"""The page on sets shows the figures of the record, and they keep what is guaranteed."""

from __future__ import annotations

import json


def test_the_pages_tables_are_those_of_the_record() -> None:
    from set_coverage import PAGE, RECORD, coverage_table, novelty_table

    record, page = json.loads(RECORD.read_text()), PAGE.read_text(encoding="utf-8")
    assert coverage_table(record) in page and novelty_table(record) in page


def test_measured_coverage_is_what_is_guaranteed() -> None:
    from set_coverage import RECORD, within

    for found in json.loads(RECORD.read_text()).values():
        assert found["splits"] == 200
        for row in found["rows"].values():
            assert within(row, found["asked"])
