"""Stored form of step records: bytes that every released version reads and writes."""

from __future__ import annotations

import pytest
from perdure.worker.durable.journal.step_record import StepRecord

GOLDEN = [
    (StepRecord(b"7"), b"{}\n7"),
    (StepRecord(b'[{"number":1}]'), b'{}\n[{"number":1}]'),
    (StepRecord(b"null"), b"{}\nnull"),
    (StepRecord(b'"a\\nb"', "00ff", '"\xfc",[1]'), b'{"h":"00ff","a":"\\"\xc3\xbc\\",[1]"}\n"a\\nb"'),
    (StepRecord(b"{}", "9a", ""), b'{"h":"9a","a":""}\n{}'),
]


@pytest.mark.parametrize(("record", "stored"), GOLDEN)
def test_record_keeps_its_stored_form(record: StepRecord, stored: bytes) -> None:
    assert record.encode() == stored
    assert StepRecord.decode(stored) == record


def test_fields_of_a_later_version_are_ignored() -> None:
    assert StepRecord.decode(b'{"h":"9a","a":"1","t":4}\n2') == StepRecord(b"2", "9a", "1")


def test_the_result_is_found_by_the_digest() -> None:
    stored = StepRecord(b'"a\\nb"', "00ff", '"1"\n').encode()
    assert StepRecord.result_of(stored, "00ff") == b'"a\\nb"'
    assert StepRecord.result_of(stored, "00fe") is None
    assert StepRecord.result_of(stored, "00f") is None
    assert StepRecord.result_of(StepRecord(b"7").encode(), "00ff") is None


@pytest.mark.parametrize("damaged", [b"", b"7", b"x\n7", b"[]\n7"])
def test_data_without_a_header_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match=r"empty document|unexpected|must begin"):
        StepRecord.decode(damaged)
