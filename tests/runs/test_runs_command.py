"""`steepen runs`: rows, filters, sorting, CSV and errors."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from steepen.laws.ladder import read_ladders
from steepen.requests.app import main
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.tables.read_table import read_table
from steepen.utils.json_io import write_json

Spec = Callable[..., RunSpec]


@pytest.fixture
def mixed(store: RunStore, spec: Spec, trainer: ModuleType) -> RunStore:
    """A store with a run of every status but running."""
    for seed, arm in ((1, "vanilla"), (2, "untied-grow")):
        record = trainer.record_of(spec(seed, arm=arm), loss=3.0 + seed)
        write_json(store.root / record.run / "record.json", record.to_dict())
    for seed in (3, 4, 5):
        write_json(store.run(spec(seed)).spec_file, spec(seed).to_dict())
    write_json(store.run(spec(3)).failure_file, {"kind": "Diverged", "message": "the loss is nan."})
    run = store.run(spec(4))
    run.metrics_file.write_text('{"step": 2, "loss": 5.5, "tokens_per_second": 100.0}\n{"step": 3, "lo')
    return store


def listed(capsys: pytest.CaptureFixture[str], store: RunStore, *words: str) -> list[dict[str, Any]]:
    assert main(["runs", "--runs", str(store.root), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_every_run_is_listed_with_its_status(
    mixed: RunStore, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    with mixed.run(spec(5)).lock():
        rows = {row["seed"]: row for row in listed(capsys, mixed)}
    statuses = {seed: row["status"] for seed, row in rows.items()}
    assert statuses == {1: "finished", 2: "finished", 3: "failed", 4: "interrupted", 5: "running"}
    assert rows[3]["cause"] == "Diverged: the loss is nan." and rows[1]["loss"] == 4.0
    assert (rows[4]["loss"], rows[4]["step"]) == (5.5, 2)  # the line cut off by a kill is passed over
    assert {row["seed"]: row["status"] for row in listed(capsys, mixed)}[5] == "waiting"


def test_filters_and_sorting(mixed: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["seed"] for row in listed(capsys, mixed, "--arm", "untied-grow")] == [2]
    assert [row["seed"] for row in listed(capsys, mixed, "--status", "failed")] == [3]
    assert listed(capsys, mixed, "--depth", "9") == []
    # What has no loss comes last, whichever way the others are sorted.
    assert [row["loss"] for row in listed(capsys, mixed, "--sort", "loss")] == [4.0, 5.0, 5.5, None, None]
    assert [row["loss"] for row in listed(capsys, mixed, "--sort=-loss")] == [5.5, 5.0, 4.0, None, None]


def test_options_may_be_given_before_the_subcommand(
    mixed: RunStore, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", spec(1).hash, spec(2, arm="untied-grow").hash]
    for given in (["--runs", str(mixed.root), *words], [*words, f"--runs={mixed.root}"]):
        assert main(["runs", *given]) == 0
        assert "settings that differ" in capsys.readouterr().out
    # The value of an option is no subcommand.
    assert main(["runs", "--runs", str(mixed.root), "--arm", "show"]) == 0
    assert "matches" in capsys.readouterr().out


def test_csv_holds_finished_runs_and_is_readable_by_fit(
    mixed: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    assert main(["runs", "--runs", str(mixed.root), "--csv", str(path)]) == 0
    finished = [row for row in mixed.rows() if row.status == "finished"]
    assert finished and f"{len(finished)} finished runs" in capsys.readouterr().err
    columns = read_table(path).columns
    found = zip(columns["arm"], columns["seed"], columns["flops"], columns["loss"], strict=True)
    read = {(arm, int(seed), float(flops), float(loss)) for arm, seed, flops, loss in found}
    assert read == {(row.arm, row.seed, row.flops, row.loss) for row in finished}
    assert main(["runs", "--runs", str(mixed.root), "--status", "failed", "--csv", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()


def test_csv_separates_corpora_and_recipes_for_fit(
    store: RunStore, spec: Spec, trainer: ModuleType, tmp_path: Path
) -> None:
    base = spec(1)
    other_data = replace(base, data=replace(base.data, identity="b" * 64))
    # Weight decay that scales with size is one recipe; two values at one size are two.
    decayed = replace(base, hyperparameters=replace(base.hyperparameters, weight_decay=0.7))
    deeper = replace(spec(1, depth=base.shape.depth + 1), hyperparameters=decayed.hyperparameters)
    for number, specs in enumerate(([base, deeper, other_data], [decayed])):
        for one in specs:
            record = trainer.record_of(one, loss=3.0 + number)
            write_json(store.root / record.run / "record.json", record.to_dict())
        path = tmp_path / f"{number}.csv"
        assert main(["runs", "--runs", str(store.root), "--csv", str(path)]) == 0
        columns = read_table(path).columns
        assert len(set(columns["corpus"])) == 2
        by_run = dict(zip(columns["run"], columns["recipe"], strict=True))
        assert (by_run[base.hash] == by_run[deeper.hash]) == (number == 0)
    names = sorted(read_ladders(read_table(tmp_path / "1.csv")))
    assert len(names) == 3 and all(name.startswith("vanilla (corpus ") for name in names)


def test_the_table_shows_the_cause_of_a_failure(mixed: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs", str(mixed.root)]) == 0
    text = capsys.readouterr().out
    assert "failed: Diverged: the loss is nan." in text
    assert re.search(r"^interrupted +33% ", text, re.MULTILINE) and "5 runs, " in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runs", "--runs", "{root}", "--status", "done"], "'finished', 'running'"),
        (["runs", "--runs", "{root}", "--sort", "los"], "loss"),
        (["runs", "--runs", "{root}/nowhere"], "--runs"),
        (["runs", "list"], "no command 'list'; it has show, compare, clean"),
        (["status", "ladder", "--studies", "{root}"], "no study 'ladder'"),
        (["status", "--studies", "{root}/nowhere"], "--studies"),
    ],
)
def test_wrong_options_exit_with_code_2_and_one_sentence(
    words: list[str], says: str, mixed: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(root=mixed.root) for word in words]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_damaged_record_is_listed_as_failed_with_the_wrong_field(
    mixed: RunStore, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    file = mixed.run(spec(1)).record_file
    file.write_text(json.dumps({**json.loads(file.read_text()), "mfu": "fast"}))  # not shown in a row
    rows = {row["seed"]: row for row in listed(capsys, mixed)}
    assert (rows[1]["status"], rows[1]["failure_kind"], rows[1]["loss"]) == ("failed", "DamagedRecord", None)
    assert "record.mfu = 'fast' is not valid" in rows[1]["cause"] and rows[1]["arm"] == "vanilla"


def test_conditions_columns_and_sorting_by_any_field(
    mixed: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["seed"] for row in listed(capsys, mixed, "--where", 'arm == "untied-grow"')] == [2]
    assert [row["seed"] for row in listed(capsys, mixed, "--where", "GLR > 0 and not loss")] == [3, 5]
    assert listed(capsys, mixed, "--where", "tokens / parameters > 1e9") == []
    # `finished` is a field too, the time at which a run ended.
    finished = listed(capsys, mixed, "--where", "status=finished")
    assert finished and finished == listed(capsys, mixed, "--where", 'status == "finished"')
    others = listed(capsys, mixed, "--where", "status!=finished")
    assert others and others == listed(capsys, mixed, "--where", 'status != "finished"')
    assert {row["seed"] for row in listed(capsys, mixed, "--where", "status in ('failed', 'waiting')")} == {
        3,
        5,
    }
    assert len(listed(capsys, mixed, "--sort", "lr")) == 5
    assert main(["runs", "--runs", str(mixed.root), "--columns", "seed,glr,batch_tokens"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["seed", "learning_rate", "batch_tokens"]
    assert main(["runs", "--runs", str(mixed.root), "--fields"]) == 0
    assert "optimizer.kind" in capsys.readouterr().out


def test_a_field_that_is_asked_for_is_shown(mixed: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs", str(mixed.root), "--where", "glr > 0 and depth > 0", "--sort=-wd"]) == 0
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["learning_rate", "weight_decay", "tokens/s"]
    assert re.search(r" 0\.\d+ +0\.\d+", first)


def test_a_mistyped_field_is_answered_with_the_nearest_in_any_of_their_names(
    mixed: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed, meant in (("glrr", "learning_rate"), ("wieght_decay", "weight_decay"), ("val_los", "loss")):
        assert main(["runs", "--runs", str(mixed.root), "--sort", typed]) == 2
        assert f"the nearest are {meant}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arm = 'vanilla'", "equality is =="),
        ("__import__('os')", "not allowed"),
        ("arm.__class__ == 1", "no field 'arm.__class__'"),
        ("(lambda: 1)()", "not allowed"),
        ("arm == vanilla and depth > 1", "put quotes around a word"),
        ("arm > 3", "cannot be computed"),
        ("[x for x in (1, 2)]", "not allowed"),
        ("1 <", "not a condition"),
    ],
)
def test_a_wrong_condition_is_one_sentence(
    text: str, says: str, mixed: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--runs", str(mixed.root), "--where", text]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_files_carry_what_every_law_needs(
    mixed: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "runs.csv", tmp_path / "runs.parquet"]
    assert main(["runs", "--runs", str(mixed.root), "--csv", str(files[0]), "--parquet", str(files[1])]) == 0
    for file in files:
        table = read_table(file)
        table.require(["arm", "flops", "loss", "parameters", "tokens", "seed"])
        assert {"corpus", "recipe", "learning_rate", "seconds_training", "disk_bytes"} <= set(table.columns)
        assert len(table) == 2 and table.numbers("parameters").min() > 0


def test_the_table_fits_a_terminal_of_80_columns(mixed: RunStore) -> None:
    main_end, end = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80"}
    words = [sys.executable, "-m", "steepen", "runs", "--runs", str(mixed.root)]
    subprocess.run(words, stdout=end, check=True, env=environment)
    os.close(end)
    lines = re.sub(r"\x1b\[[\d;]*m", "", os.read(main_end, 65536).decode()).splitlines()
    assert lines[0].split() == ["status", "done", "run", "arm", "depth", "seed", "FLOPs", "loss"]
    assert max(map(len, lines)) <= 80 and len(lines) > 6


def test_the_column_done_is_shown_only_where_a_run_is_unfinished(
    mixed: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    heads: list[list[str]] = []
    for words in ([], ["--status", "finished"]):
        assert main(["runs", "--runs", str(mixed.root), *words]) == 0
        heads.append(capsys.readouterr().out.splitlines()[0].split())
    assert heads[0][:3] == ["status", "done", "run"] and heads[1] == [w for w in heads[0] if w != "done"]


def test_passes_of_an_unfinished_run_need_no_code_of_its_block(
    mixed: RunStore, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    run = spec(9)
    custom = replace(run, arm=replace(run.arm, name="mine", block="nowhere_to_be_found:Block"))
    folder = mixed.root / custom.hash
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(custom.to_dict()))
    assert main(["runs", "--runs", str(mixed.root), "--arm", "mine", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["passes"] == 1 and row.get("parameters") is None


def test_show_and_compare(
    mixed: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = spec(1).hash
    (mixed.root / name / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 6, "loss": 4.0}\n')
    assert main(["runs", "show", name[:6], "--runs", str(mixed.root)]) == 0
    text = capsys.readouterr().out
    assert "learning_rate" in text and "training loss over tokens" in text and "5.000 │" in text
    figure = tmp_path / "curves.png"
    other = spec(2, arm="untied-grow").hash
    words = ["runs", "--runs", str(mixed.root), "compare", name, other, "--figure", str(figure)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert re.search(r"^seed +1 +2 *$", text, re.MULTILINE) and "beta1" not in text
    settings, results = text.split("settings that differ")[1].split("results")
    assert "\npasses " in settings and "\nloss " not in settings and "\nloss " in results
    assert figure.stat().st_size > 1000
    assert main(["runs", "show", "zzz", "--runs", str(mixed.root)]) == 2
    assert "there is no run 'zzz'" in capsys.readouterr().err
    assert main(["runs", "show", "", "--runs", str(mixed.root)]) == 2
    assert re.search(r"\d+ runs in .* begin with '': ", capsys.readouterr().err)


def test_clean_removes_only_what_is_named(
    mixed: RunStore, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["runs", "clean", "--runs", str(mixed.root)]
    for seed, arm in ((1, "vanilla"), (2, "untied-grow")):
        for step in ("00000002", "00000006"):
            folder = mixed.run(spec(seed, arm=arm)).checkpoints / step
            folder.mkdir(parents=True)
            (folder / "weights").write_bytes(b"0" * 1000)
    assert main([*base, "--checkpoints", "--keep-final", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "2 kB would be freed" in text and re.search(r" untied-grow +2 +old checkpoints ", text)
    assert main([*base, "--checkpoints", "--keep-final", "--where", "arm == 'vanilla'", "--yes"]) == 0
    saved = [path.name for path in mixed.run(spec(1)).checkpoints.iterdir()]
    assert (
        saved == ["00000006"] and len(list(mixed.run(spec(2, arm="untied-grow")).checkpoints.iterdir())) == 2
    )
    assert main([*base, "--checkpoints"]) == 2  # nobody to ask
    with mixed.run(spec(1)).lock():
        assert main([*base, "--checkpoints", "--yes"]) == 0
    assert mixed.run(spec(1)).saved_step() == 6 and mixed.run(spec(2, arm="untied-grow")).saved_step() == -1
    assert main([*base, "--failed", "--yes"]) == 0
    assert not mixed.run(spec(3)).path.exists() and mixed.run(spec(4)).path.exists()
    assert main([*base, "--orphans", "--yes", "--studies", str(tmp_path / "none")]) == 2
    assert mixed.record(spec(1)) is not None
