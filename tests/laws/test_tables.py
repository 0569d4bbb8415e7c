"""Tables of runs: formats recognized by content, columns by alias or by name, rows by condition."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from steepen.errors import UsageError
from steepen.laws.ladder import read_ladders
from steepen.requests.request import decode
from steepen.tables.read_table import read_table
from steepen.tables.table import table_from

ROWS = [("vanilla", 1e18, 3.25), ("vanilla", 1e19, 2.99), ("grow", 1e18, 3.2), ("grow", 1e19, 2.93)]
CSV = "arm,flops,loss\n" + "\n".join(f"{a},{c:g},{y}" for a, c, y in ROWS) + "\n"
GERMAN = "Arm;Compute;Loss\n" + "\n".join(f"{a};{c:g};{str(y).replace('.', ',')}" for a, c, y in ROWS)
RECORDS = [{"arm": a, "flops": c, "loss": y} for a, c, y in ROWS]
COLUMNS = {name: [record[name] for record in RECORDS] for name in ("arm", "flops", "loss")}


@pytest.mark.parametrize(
    "content",
    [
        CSV.encode(),
        CSV.encode("utf-8-sig"),
        CSV.encode("utf-16"),
        CSV.encode("utf-16-le"),
        CSV.replace(",", "\t").encode(),
        CSV.replace(",", "|").encode(),
        GERMAN.encode(),
        ("\n\n" + CSV.replace("\n", "\r\n")).encode(),
        gzip.compress(CSV.encode(), mtime=0),
        json.dumps(RECORDS).encode(),
        json.dumps(RECORDS, indent=2).encode(),
        json.dumps(COLUMNS).encode(),
        json.dumps({name: dict(enumerate(cells)) for name, cells in COLUMNS.items()}).encode(),
        "\n".join(json.dumps(record) for record in RECORDS).encode(),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_every_format_gives_the_same_ladders(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "runs.txt"
    path.write_bytes(content)
    ladders = read_ladders(read_table(path))
    assert {name: ladder.loss.tolist() for name, ladder in ladders.items()} == {
        "vanilla": [3.25, 2.99],
        "grow": [3.2, 2.93],
    }
    assert ladders["grow"].flops.tolist() == [1e18, 1e19]


def test_damaged_and_absurd_archives_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, packed = tmp_path / "runs.csv.gz", gzip.compress(CSV.encode())
    for place in range(10, len(packed), 7):
        path.write_bytes(packed[:place] + bytes([packed[place] ^ 255]) + packed[place + 1 :])
        with pytest.raises(UsageError, match="not a readable gzip file"):
            read_table(path)
    monkeypatch.setattr("steepen.tables.read_table.MAX_MEGABYTES", 2)
    path.write_bytes(gzip.compress(bytes(4 << 20)))
    with pytest.raises(UsageError, match="larger than 2 MiB"):
        read_table(path)


def test_number_of_too_many_digits_in_json_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text('[{"arm": "a", "flops": 1e18, "loss": ' + "1" * 5000 + "}]")
    with pytest.raises(UsageError, match="not JSON"):
        read_table(tmp_path / "runs.json")


def test_excel_is_read_or_openpyxl_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.xlsx"
    path.write_bytes(b"PK\x03\x04 not a workbook")
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    with pytest.raises(UsageError, match="pip install openpyxl"):
        read_table(path)
    monkeypatch.undo()
    openpyxl = pytest.importorskip("openpyxl")
    with pytest.raises(UsageError, match="not a readable Excel file"):
        read_table(path)
    book = openpyxl.Workbook()
    book.active.append(["arm", "flops", "loss"])
    for row in ROWS:
        book.active.append(list(row))
    book.save(path)
    assert read_ladders(read_table(path))["grow"].loss.tolist() == [3.2, 2.93]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("flops", "C"),
        ("flops", "compute"),
        ("flops", "Training FLOP"),
        ("parameters", "N"),
        ("parameters", "params"),
        ("parameters", "Model Size"),
        ("tokens", "D"),
        ("tokens", "n-tokens"),
        ("loss", "val_loss"),
        ("arm", "model"),
        ("arm", "model_name"),
        ("arm", "Arch"),
        ("budget", "flops"),
    ],
)
def test_usual_names_of_columns_are_recognized(ours: str, theirs: str) -> None:
    assert table_from({theirs: ["1"]}).names(ours) == ["1"]


def test_corpora_and_recipes_separate_ladders_however_the_column_is_spelled() -> None:
    for column in ("corpus", "Corpus", "RECIPE"):
        runs = {"arm": ["a", "a"], "flops": [1e18, 1e18], "loss": [3.0, 2.0], column: ["web", "books"]}
        assert len(read_ladders(table_from(runs))) == 2


def test_exact_name_comes_before_its_aliases_and_two_aliases_are_ambiguous() -> None:
    assert table_from({"loss": [1.0], "val_loss": [2.0]}).numbers("loss").tolist() == [1.0]
    with pytest.raises(UsageError, match="val_loss, eval_loss, each of which could be loss"):
        table_from({"val_loss": [1.0], "eval_loss": [2.0]}).numbers("loss")


def test_less_usual_name_does_not_make_a_usual_one_ambiguous() -> None:
    assert table_from({"arch": ["gpt"], "model": ["a"]}).names("arm") == ["a"]


def named(text: str) -> dict[str, str]:
    """What the option `columns` of a fit names."""
    request: Any = decode({"request": "fit", "table": "t.csv", "columns": text})
    return request.columns


def test_columns_option_names_columns_and_replaces_one_of_the_same_name() -> None:
    table = table_from({"loss": [9.0], "Loss_C4": [3.0], "dataset": ["c4"]})
    renamed = table.rename(named("loss=loss_c4, arm=dataset"))
    assert renamed.numbers("loss").tolist() == [3.0]
    assert renamed.names("arm") == ["c4"]
    with pytest.raises(UsageError, match="no column 'lost'"):
        table.rename({"loss": "lost"})
    with pytest.raises(UsageError, match="as loss=val_loss,arm=model"):
        named("loss")


@pytest.mark.parametrize(
    ("conditions", "rows"),
    [
        (["dataset=c4"], [1, 2]),
        (["dataset=c4,pile"], [1, 2, 3]),
        (["dataset!=c4"], [3, 4]),
        (["N>=2e8"], [2, 3, 4]),
        (["N<2e8"], [1]),
        (["dataset=c4", "N > 1e8"], [2]),
        (["N=200000000"], [2]),
        (["N >= 2e8 and dataset == 'c4'"], [2]),
        (["dataset in ('c4', 'pile') and not N < 2e8"], [2, 3]),
        (["N / 1e8 > 2"], [3, 4]),
        (["dataset"], [1, 2, 3]),
        (["dataset="], [4]),
    ],
)
def test_where_keeps_the_rows_of_every_condition(conditions: list[str], rows: list[int]) -> None:
    table = table_from({"dataset": ["c4", "c4", "pile", ""], "N": ["1e8", "2e8", "3e8", "4e8"]})
    assert list(table.where(conditions).lines) == rows


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("dataset c4", "not a condition"),
        ("N>many", "no field 'many'"),
        ("x=1", "no field 'x'"),
        ("N>1e9", "no row"),
    ],
)
def test_condition_that_cannot_hold_is_rejected(condition: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        table_from({"dataset": ["c4"], "N": ["1e8"]}).where([condition])


def test_missing_column_of_a_wide_table_lists_the_nearest_not_all() -> None:
    columns = {f"metric_{i}": [1.0] for i in range(100)} | {"loss_c4_val": [3.0], "total_flop": [1e18]}
    with pytest.raises(UsageError) as caught:
        table_from({"arm": ["a"], **columns}).require(["arm", "flops", "loss"])
    message = str(caught.value)
    assert "loss_c4_val" in message
    assert "total_flop" in message
    assert "and 95 others" in message
    assert "no columns 'flops', 'loss';" in message
    assert "`columns` flops=ITS_NAME" in message


def test_number_beyond_floating_point_is_rejected_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"loss": 1' + "0" * 400 + "}")
    with pytest.raises(UsageError, match=r"line 1: loss is too large"):
        read_table(path).numbers("loss")
