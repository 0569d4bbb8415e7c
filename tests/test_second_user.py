"""What another user of the machine sees of a project, and cannot do to it. Needs root to become that user."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_trainer import record_of
from run_fixtures import InstantLauncher, make_spec
from steepen.runs.store import RunStore
from steepen.studies.answer import Answer
from steepen.studies.driver.drive import drive
from steepen.studies.driver.journal import Journal
from steepen.utils.files import file_lock
from steepen.utils.json_io import write_json

OTHER = 65534  # nobody
SOURCE = Path(__file__).resolve().parents[1] / "src"


@functools.cache
def python_of_others() -> str:
    """A Python of this version that other users may run; empty if there is none."""
    candidates = (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")
    code = f"import sys, numpy, typer, yaml; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"
    for path in candidates if os.geteuid() == 0 else ():
        try:
            done = subprocess.run([path, "-c", code], check=False, capture_output=True, **as_other())
        except OSError:
            continue
        if done.returncode == 0:
            return path
    return ""


def as_other() -> dict[str, Any]:
    paths = [str(SOURCE), *(path for path in sys.path if path.endswith("site-packages"))]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "HOME": "/nonexistent"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    return {"user": OTHER, "group": OTHER, "extra_groups": [], "env": environment}


pytestmark = pytest.mark.skipif(
    not python_of_others(), reason="needs root, and a Python that other users may run"
)


@pytest.fixture
def project() -> Iterator[Path]:
    """A finished study, and one that runs, of root."""
    before = os.umask(0o022)
    folder = Path(tempfile.mkdtemp(prefix="steepen-user-"))
    folder.chmod(0o755)
    store = RunStore(folder / "runs")
    drive_study(store, folder / "studies", "done", range(1, 5))
    journal = Journal.open(folder / "studies", "begun", {}, store.root)
    run = store.run(make_spec(9))
    write_json(run.spec_file, make_spec(9).to_dict())
    with journal.driving(), run.lock():
        journal.add_batch([make_spec(9)])
        yield folder
    os.umask(before)
    shutil.rmtree(folder)


def drive_study(store: RunStore, studies: Path, name: str, seeds: Any) -> None:
    def study() -> Any:
        yield [make_spec(seed) for seed in seeds]
        return Answer(name, "?", "", (), {})

    drive(
        study(), store, InstantLauncher(store, record_of), journal=Journal.open(studies, name, {}, store.root)
    )


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the other user, in the project."""
    return subprocess.run(
        [python_of_others(), "-m", "steepen", *words], cwd=project, capture_output=True, text=True,
        check=False, timeout=120, stdin=subprocess.DEVNULL, **as_other(),
    )  # fmt: skip


def content(project: Path) -> dict[str, Any]:
    return {
        str(path): (path.stat().st_mode, path.stat().st_uid, path.is_file() and path.read_bytes())
        for path in sorted(project.rglob("*"))
    }


def test_running_is_running_and_finished_is_finished(project: Path) -> None:
    rows = json.loads(run(project, "runs", "--json").stdout)["runs"]
    assert {row["seed"]: row["status"] for row in rows} == {
        **dict.fromkeys(range(1, 5), "finished"),
        9: "running",
    }
    states = {
        one["name"]: one["state"] for one in json.loads(run(project, "status", "--json").stdout)["studies"]
    }
    assert states == {"begun": "running", "done": "finished"}


def test_what_may_not_be_read_is_unknown_and_not_damaged(project: Path) -> None:
    store = RunStore(project / "runs")
    store.run(make_spec(1)).path.chmod(0o700)
    store.run(make_spec(2)).record_file.chmod(0o600)
    store.run(make_spec(9)).lock_file.chmod(0o600)
    (project / "studies" / "begun").chmod(0o700)
    done = run(project, "runs", "--json")
    statuses = {row["run"]: row["status"] for row in json.loads(done.stdout)["runs"]}
    for seed, status in ((1, "unknown"), (2, "unknown"), (3, "finished"), (9, "unknown")):
        assert statuses[make_spec(seed).hash] == status, seed
    text = run(project, "runs").stdout
    assert "you may not read runs/" in text and "move it aside" not in text
    shown = run(project, "status").stdout
    assert "begun: the journal" in shown and "Permission denied" in shown
    assert "done: finished, batch 1; 4 runs requested (2 finished, 2 unknown)" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "clean", "--orphans", "--yes", "--studies", "{others}"),
        ("runs", "--csv", "runs.csv"),
        ("pack", "done"),
        ("pack", "done", "--out", "studies/done/pack.tar.gz"),
        ("unpack", "{others}/pack.tar.gz"),
        ("report", "done"),
        ("data", "prepare", "builtin", "--tokenizer", "bpe:512", "--out", "data"),
    ],
)
def test_nothing_can_be_written_and_one_sentence_says_so(words: tuple[str, ...], project: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="steepen-other-") as name:
        others = Path(name)
        drive_study(RunStore(others / "runs"), others / "studies", "else", [77])
        from steepen import pack

        pack("else", others / "pack.tar.gz", studies=others / "studies")
        for path in (others, *others.rglob("*")):
            os.chown(path, OTHER, OTHER)
        before = content(project)
        filled = [word.format(others=others / "studies" if "clean" in words else others) for word in words]
        done = run(project, *filled)
        assert content(project) == before
    lines = [line for line in done.stderr.splitlines() if line.startswith("steepen: ")]
    assert done.returncode == 1 and len(lines) == 1 and "internal error" not in done.stderr, done.stderr


def test_a_folder_of_pickles_that_belongs_to_another_is_refused(tmp_path: Path) -> None:
    """submitit hands jobs over as pickles: root must not run those of somebody else."""
    from steepen.errors import SteepenError
    from steepen.launch.slurm import _make_private

    folder = tmp_path / ".slurm"
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(SteepenError, match="belongs to another user"):
        _make_private(folder)


def test_a_lock_that_only_its_owner_may_read_is_not_taken_for_free(project: Path) -> None:
    lock = project / "studies" / "begun" / "lock"
    lock.chmod(0o600)
    with file_lock(lock, shared=True):
        shown = json.loads(run(project, "status", "begun", "--json").stdout)
    assert shown["state"] == "unknown"
