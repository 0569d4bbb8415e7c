"""Files written by others: their names run no code without consent and cannot control the terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_trainer import record_of
from run_fixtures import make_spec
from steepen.errors import UsageError, show
from steepen.launch.worker import Task, begin_task
from steepen.report.contents import figure_csv
from steepen.requests.app import main
from steepen.results.table import to_csv
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer, Axis, Panel, Series, Table
from steepen.studies.driver.journal import Journal
from steepen.utils.formatting import printable
from steepen.utils.imports import code_from, import_object, trust_code
from steepen.utils.json_io import parse_json, with_checksum, without_checksum, write_json
from steepen.utils.yaml_io import load_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)


@pytest.fixture
def foreign_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current directory that leaves a file when it is imported."""
    name = f"foreign_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\nARM = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_name_in_a_file_runs_no_code_without_consent(foreign_module: str, tmp_path: Path) -> None:
    with code_from(["study", "--preset", "p.yaml"]), pytest.raises(UsageError, match="--trust-code"):
        import_object(f"{foreign_module}:ARM", "arm")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("how", ["named", "in a list", "as a value", "--trust-code", "by trusted code"])
def test_names_on_the_command_line_and_consent_are_enough(
    how: str, foreign_module: str, tmp_path: Path
) -> None:
    name = f"{foreign_module}:ARM"
    words = {"named": [name], "in a list": [f"--arms=vanilla,{name}"], "as a value": [f"optimizer={name}"]}
    with code_from(words.get(how, []), trust_all=how == "--trust-code"):
        if how == "by trusted code":
            trust_code([name])
        assert import_object(name, "arm") is None
    assert (tmp_path / "imported").exists()


def test_preset_and_spec_from_elsewhere_run_no_code(
    foreign_module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(__file__).parents[1] / "src/steepen/studies/presets/tiny.yaml"
    preset = {**load_yaml(shipped.read_text(encoding="utf-8")), "arms": [f"{foreign_module}:ARM"]}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(preset))
    assert main(["study", "ladder", "--preset", "p.yaml", "--dry-run"]) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


def test_worker_does_not_import_modules_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("yaml", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\n")
    script = tmp_path / "elsewhere" / "program.py"
    script.parent.mkdir()
    run = "from steepen.requests import worker\nworker.main(lambda request: 1)\n"
    script.write_text(f"import json, yaml; yaml.safe_load('a')\n{run}")
    monkeypatch.chdir(tmp_path)
    worker = begin_task(Task({}, str(tmp_path / "run" / "log.txt"), program=(str(script),)))
    assert worker.wait().failure is None
    worker.close()
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "text", [BOMB, "a: " + "[" * 3000 + "]" * 3000, "&a [*a]", "a: 2000-99-99", "? [a]\n: b"]
)
def test_absurd_yaml_is_rejected_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
@pytest.mark.parametrize(
    "words",
    [
        ["train", "--data", ".", "--spec"],
        ["study", "ladder", "--dry-run", "--preset"],
        ["study", "ladder", "--preset", "tiny", "--dry-run", "--recipe"],
        ["fit", "paper:fineweb", "--method", "joint", "--draws", "100", "--score"],
    ],
)
def test_pipes_and_devices_are_not_read(
    words: list[str], make: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "file.yaml")
    assert main([*words, str(tmp_path / "file.yaml")]) == 2
    assert "internal" not in capsys.readouterr().err


def test_error_sentences_are_short_whatever_the_value() -> None:
    nested: list[object] = []
    for _ in range(500):
        nested = [nested, "x" * 100]
    for value in ("x" * 10**6, [0] * 10**6, {i: i for i in range(1000)}, nested, 10**4000):
        assert len(show(value)) <= 201
    with pytest.raises(UsageError) as error:
        RunSpec.from_dict({"arm": "x" * 10**6, "y" * 10**6: 1})
    assert len(str(error.value)) < 1000


EVIL_NAMES = ["[/red]", "[link=http://x]y[/link]", "\x1b[2J\x1b]0;owned\x07", "a\rb", "\u202eevil", "[bold]"]


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_name_of_an_arm_cannot_hide_runs_or_control_the_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RunStore(tmp_path / "runs")
    for seed in (1, 2):
        spec = make_spec(seed)
        value = record_of(spec, 3.5).to_dict()
        if seed == 1:
            value["spec"]["arm"]["name"] = name
        write_json(store.run(spec).record_file, with_checksum(value))
    assert main(["runs", "--runs", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert make_spec(1).hash in out and make_spec(2).hash in out
    assert printable(out) == out and "\r" not in out


def test_texts_of_an_answer_and_a_record_cannot_break_a_report(tmp_path: Path) -> None:
    evil = "\x1b[2J\ud800$x^"
    store, spec = RunStore(tmp_path / "runs"), make_spec(1)
    record = {**record_of(spec, 3.5).to_dict(), "git": {evil: evil}, "hardware": {"name": evil, evil: evil}}
    record["spec"]["arm"]["title"] = evil
    write_json(store.run(spec).record_file, with_checksum(record))
    write_json(store.run(spec).samples_file, {"step": 1, "prompt": evil, "text": evil})
    journal = Journal.open(tmp_path / "studies", "s", {"arms": [evil]}, store.root)
    with journal.driving():
        series = Series(evil, "points", (1.0, 2.0), (3.0, 2.0), arm=evil, runs=(spec.hash,), texts=(evil,))
        panel = Panel(evil, Axis(evil, "log"), Axis(evil), (series,), (("x", 1.5, evil),), evil)
        table = Table(evil, (evil, "loss"), ((evil, 3.0),))
        answer = Answer(evil, evil, evil, (evil,), {evil: evil}, panels=(panel,), tables=(table,))
        journal.set_answer(replace(answer, runs=(spec.hash,)))
    words = ["report", "s", "--studies", str(tmp_path / "studies"), "--out", str(tmp_path / "page")]
    assert main([*words, "--format", "svg"]) == 0
    written = [path.read_text(encoding="utf-8") for path in (tmp_path / "page").rglob("*") if path.is_file()]
    assert len(written) > 3 and all(printable(text) == text for text in written)


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_names_in_every_table_are_printable(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, spec = RunStore(tmp_path / "runs"), make_spec(1)
    value = record_of(spec, 3.5).to_dict()
    value["spec"]["arm"]["name"] = value["spec"]["arm"]["title"] = name
    write_json(store.run(spec).record_file, with_checksum(value))
    write_json(store.run(spec).failure_file, {"kind": name, "message": name})
    write_json(tmp_path / "studies/s/study.json", {"name": name, "message": name})
    rows = [[arm, f"1e{n}", f"{3.5 - n / 20}"] for arm in ("vanilla", name) for n in range(16, 22)]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["arm", "flops", "loss"], *rows])
    (tmp_path / "preset.yaml").write_text(yaml.safe_dump({"name": name, name: name}))
    for words in (
        ["runs"],
        ["runs", "--columns", "arm,depth"],
        ["runs", "show", spec.hash],
        ["status"],
        ["fit", "t.csv", "--reference", "vanilla", "--draws", "0"],
        ["study", "ladder", "--preset", "preset.yaml", "--dry-run"],
        ["data", "show", name],
        ["plan", "--arm", name, "--depth", "8"],
    ):
        assert main(words) in (0, 1, 2), words
        said = capsys.readouterr()
        assert printable(said.out) == said.out and printable(said.err) == said.err, words


def test_cells_of_a_csv_file_are_no_formulas() -> None:
    rows = (("=cmd()", -1.5), ("+1", 2), ("@x", 3), ("vanilla", 4))
    found = list(csv.reader(io.StringIO(to_csv(Table("runs", ("arm", "=loss"), rows)))))
    assert found == [["arm", "'=loss"], ["'=cmd()", "-1.5"], ["'+1", "2"], ["'@x", "3"], ["vanilla", "4"]]


def test_cells_of_a_figures_csv_file_are_no_formulas() -> None:
    series = Series("=cmd()", "points", (1.0,), (-2.0,), runs=("=run",), texts=("@x",))
    panel = Panel("+title", Axis("=x"), Axis("@y"), (series,))
    (_, *rows) = csv.reader(io.StringIO(figure_csv([panel], {})))
    assert rows and all(cell[:1] not in ("=", "+", "@") for row in rows for cell in row)
    assert rows[0][6:8] == ["1.0", "-2.0"] and rows[0][1] == "'=cmd()"


@pytest.mark.parametrize(
    "settings_",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
@pytest.mark.parametrize("words", [["arms"], ["--help"]])
def test_output_degrades_where_the_encoding_lacks_characters(
    words: list[str], settings_: dict[str, str], tmp_path: Path
) -> None:
    command, environment = [sys.executable, "-m", "steepen", *words], {**os.environ, **settings_}
    done = subprocess.run(command, env=environment, capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_file_whose_name_is_not_utf8_is_named_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / os.fsdecode(b"text-\xff.txt")
    file.write_text("some words")
    assert (
        main(["data", "prepare", str(file), "--out", str(tmp_path / "data"), "--tokenizer", "bpe:300"]) == 1
    )
    assert "is not UTF-8; rename it" in capsys.readouterr().err


def test_closed_output_and_removed_directory_give_no_traceback(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    closed = f"{sys.executable} -m steepen runs --runs {tmp_path} >&-"
    done = subprocess.run(closed, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
    command = f"mkdir {gone}; cd {gone}; rmdir {gone}; {sys.executable} -m steepen arms"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "steepen: the current directory was removed; change to another one.\n"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=st.dictionaries(st.text(), json_values, max_size=6))
@settings(max_examples=50)
def test_checksum_survives_json_and_notices_a_change(value: dict[str, object]) -> None:
    value.pop("checksum", None)
    stored = parse_json(json.dumps(with_checksum(value)))
    assert without_checksum(stored) == value
    with pytest.raises(ValueError, match="checksum"):
        without_checksum({**stored, "added": 1, "more": len(value)})


@given(text=st.text(alphabet="[]{}:&*!-?'\"\n ,#|>%@ab1.e", max_size=60))
@settings(max_examples=200)
def test_any_text_is_read_as_yaml_or_rejected(text: str) -> None:
    try:
        load_yaml(text)
    except yaml.YAMLError:
        return


@given(value=json_values)
@settings(max_examples=100)
def test_any_value_is_read_as_a_spec_or_rejected(value: object) -> None:
    with pytest.raises(UsageError):
        RunSpec.from_dict(value)


@given(text=st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    found = printable(text)
    assert "\x1b" not in found and len(found) == len(text) and printable(found) == found
