"""The page on policies shows the figures of the record, and they keep what is promised."""

from __future__ import annotations

import json

import pytest


def test_the_pages_tables_are_those_of_the_record() -> None:
    from policy_coverage import PAGE, RECORD, others_table, promised_table

    record, page = json.loads(RECORD.read_text()), PAGE.read_text(encoding="utf-8")
    assert promised_table(record) in page and others_table(record) in page


def test_measured_rates_are_within_what_is_promised() -> None:
    from policy_coverage import RECORD

    for found in json.loads(RECORD.read_text()).values():
        assert found["splits"] == 200
        for policy in found["policies"].values():
            assert policy["new_over"]["mean"] <= found["alarm"] + 0.003  # three standard errors
            if policy["method"] == "conformal":
                assert policy["answered_and_wrong_over"]["mean"] <= policy["risk"] + 0.003
            if policy["method"] == "selective":
                over = policy["wrong_if_answered_over"]["share_of_splits_over"]
                assert over <= found["delta"] + 3 * (0.1 * 0.9 / 200) ** 0.5
            assert policy["answer"] + policy["unsure"] + policy["new"] == pytest.approx(1)
