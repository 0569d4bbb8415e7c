"""Packs from others: nothing leaves the directory, fills the memory or fails without a sentence."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from run_fixtures import make_spec
from steepen import pack, unpack
from steepen.errors import SteepenError, UsageError
from steepen.runs.store import RunStore
from steepen.studies.driver.archive import MAX_FILES
from steepen.studies.driver.journal import Journal, JournalEntry, RequestedRun
from steepen.utils.codec import to_builtins
from steepen.utils.files import scratch_directory
from steepen.utils.formatting import printable
from steepen.utils.json_io import with_checksum, write_json

JOURNAL = "studies/s/study.json"
RUN = "0123456789abcdef"


def journal_of(*runs: str, name: str = "s") -> bytes:
    """A study's journal that requested these runs."""
    asked = tuple(RequestedRun(run, "vanilla", 2, 0, 1, 1.0) for run in runs)
    return json.dumps(with_checksum(to_builtins(JournalEntry(name, {}, "runs", asked)))).encode()


STUDY = {JOURNAL: journal_of(RUN), f"runs/{RUN}/spec.json": b"{}", "report/report.html": b"page"}


def write_pack(path: Path, manifest: Any, files: dict[str, bytes]) -> Path:
    """A pack with this manifest and these files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in {"MANIFEST.json": json.dumps(manifest).encode(), **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def manifest_of(files: dict[str, bytes], study: str = "s") -> dict[str, Any]:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return {"version": 1, "study": study, "files": digests}


def left_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("manifest", [[], None, {"version": 1}, {"version": 1, "study": "s", "files": [1]}])
def test_damaged_manifest_gives_a_sentence(manifest: Any, tmp_path: Path) -> None:
    with pytest.raises(SteepenError):
        unpack(write_pack(tmp_path / "p", manifest, {}), tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/tmp/x", "studies/../../x", "studies", "runs/x", "x/y/z", "report", "runs/a/\0", ""),
        *("runs/.slurm/123/job.pkl", "studies/other/study.json", "studies/s/.hidden.json", "runs/.index"),
        *(f"runs/{RUN}/lock", f"runs/{RUN}/../other/spec.json", f"runs/{RUN}/scores/../../x.json"),
        *(f"runs/{'f' * 16}/spec.json", f"runs/{RUN}/checkpoints/latest/state.safetensors"),
        *("report/\x1b]0;title\x07.html", "report/.htaccess", "report/a\nb", "report/\u202etxt.exe"),
        *("studies/s/sub/study.json", "studies/s/setup.py", f"runs/{RUN}/spec.json/x", "report//x"),
    ],
)  # fmt: skip
def test_only_files_of_the_study_itself_are_unpacked(name: str, tmp_path: Path) -> None:
    files = {**STUDY, name: b"hello"}
    packed = write_pack(tmp_path / "p", manifest_of(files), files)
    with pytest.raises(SteepenError) as error:
        unpack(packed, tmp_path / "out" / "deep")
    assert printable(str(error.value)) == str(error.value)
    assert left_in(tmp_path) == ["p"]
    # Nor is it unpacked where the manifest does not mention it.
    with pytest.raises(SteepenError):
        unpack(write_pack(tmp_path / "p", manifest_of(STUDY), files), tmp_path / "out")
    assert left_in(tmp_path) == ["p"]


def test_a_pack_that_is_right_is_unpacked(tmp_path: Path) -> None:
    made = unpack(write_pack(tmp_path / "p", manifest_of(STUDY), STUDY), tmp_path / "out")
    assert (made.runs, made.files, made.bytes) == (1, 3, sum(map(len, STUDY.values())))
    files = [path for path in left_in(tmp_path / "out") if (tmp_path / "out" / path).is_file()]
    assert files == ["report/s/report.html", f"runs/{RUN}/spec.json", "studies/s/study.json"]


@pytest.mark.parametrize("study", ["", "..", ".hidden", "a/b", "a\0", "other"])
def test_study_has_a_name_of_one_directory_and_its_own_journal(study: str, tmp_path: Path) -> None:
    files = {f"studies/{study}/study.json": journal_of()}
    with pytest.raises(SteepenError):
        unpack(write_pack(tmp_path / "p", manifest_of(files, study), files), tmp_path / "out")
    assert left_in(tmp_path) == ["p"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_not_unpacked(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "p", "w:gz") as tar:
        text = json.dumps(manifest_of(STUDY)).encode()
        for name, data in {**STUDY, "MANIFEST.json": text}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            if name == JOURNAL:
                entry.type, entry.linkname, entry.size = kind, "/etc/hostname", 0
            tar.addfile(entry, io.BytesIO(data) if entry.size else None)
    with pytest.raises(SteepenError, match=r"it has no studies/s/study\.json"):
        unpack(tmp_path / "p", tmp_path / "out")
    assert left_in(tmp_path) == ["p"]


def test_a_name_twice_is_rejected(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "p", "w:gz") as tar:
        for name, data in (*STUDY.items(), *STUDY.items(), ("MANIFEST.json", b"{}")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    with pytest.raises(SteepenError, match="does not belong"):
        unpack(tmp_path / "p", tmp_path / "out")


def test_bomb_is_rejected_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepen.studies.driver.archive.MAX_UNPACKED", 1 << 20)
    files = {JOURNAL: bytes(8 << 20)}
    packed = write_pack(tmp_path / "p", manifest_of(files), files)
    assert packed.stat().st_size < 1 << 16
    with pytest.raises(SteepenError, match="would unpack to more than"):
        unpack(packed, tmp_path / "out")
    assert left_in(tmp_path) == ["p"]


HUGE = 600 << 20


def huge_manifest(tar: tarfile.TarFile) -> None:
    entry = tarfile.TarInfo("MANIFEST.json")
    entry.size = HUGE
    tar.addfile(entry, Zeros())


def huge_header(tar: tarfile.TarFile, kind: bytes) -> None:
    """A name, or attributes, of 600 MiB."""
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = kind, HUGE
    tar.fileobj.write(entry.tobuf(tarfile.GNU_FORMAT))  # type: ignore[union-attr]
    for _ in range(HUGE >> 20):
        tar.fileobj.write(b"0" * (1 << 20))  # type: ignore[union-attr]


def many_headers(tar: tarfile.TarFile) -> None:
    for number in range(MAX_FILES + 10):
        entry = tarfile.TarInfo(f"report/{number}")
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
        tar.members.clear()  # type: ignore[attr-defined]


def write_header(tar: tarfile.TarFile, name: str, kind: bytes, content: bytes = b"") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, len(content)
    tar.fileobj.write(entry.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512))  # type: ignore[union-attr]


def attribute(name: str, value: str) -> bytes:
    """A record of a pax header, which begins with its own length."""
    record = f" {name}={value}\n"
    size = next(size for size in range(len(record), len(record) + 9) if len(f"{size}{record}") == size)
    return f"{size}{record}".encode()


def global_attributes(tar: tarfile.TarFile) -> None:
    for number in range(4_000):
        write_header(tar, "g", tarfile.XGLTYPE, attribute(f"k{number}", "a" * 50_000))
        write_header(tar, "d", tarfile.DIRTYPE)


def sparse_file(tar: tarfile.TarFile) -> None:
    """A file whose list of parts goes on in 100,000 blocks."""
    header = bytearray(tarfile.TarInfo(JOURNAL).tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[482:495], header[148:156] = tarfile.GNUTYPE_SPARSE, b"\x0100000000001\0", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    tar.fileobj.write(header + (b"00000000001\0" * 42 + b"\1" + bytes(7)) * 100_000)  # type: ignore[union-attr]


def sparse_by_attributes(tar: tarfile.TarFile) -> None:
    version = attribute("GNU.sparse.major", "1") + attribute("GNU.sparse.minor", "0")
    write_header(tar, "x", tarfile.XHDTYPE, version)
    write_header(tar, JOURNAL, tarfile.REGTYPE)
    tar.fileobj.write(b"99999999999\n" + b"0\n" * (8 << 20))  # type: ignore[union-attr]


def chained_names(tar: tarfile.TarFile) -> None:
    for _ in range(3_000):
        write_header(tar, "L", tarfile.GNUTYPE_LONGNAME, b"a" * 511 + b"\0")


class Zeros(io.RawIOBase):
    """Endless zeros."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


BOMBS: dict[str, Callable[[tarfile.TarFile], None]] = {
    "manifest": huge_manifest,
    "attributes": lambda tar: huge_header(tar, tarfile.XHDTYPE),
    "name": lambda tar: huge_header(tar, tarfile.GNUTYPE_LONGNAME),
    "headers": many_headers,
    "global attributes": global_attributes,
    "sparse file": sparse_file,
    "sparse by attributes": sparse_by_attributes,
    "chained names": chained_names,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_pack_cannot_fill_the_memory(kind: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "p", "w:gz", compresslevel=1) as tar:
        BOMBS[kind](tar)
    code = (
        "import resource, sys\nfrom steepen import unpack\nfrom steepen.errors import SteepenError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: unpack('p', 'out')\nexcept SteepenError as error: print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    sentence, megabytes = done.stdout.splitlines()
    assert "pack" in sentence and int(megabytes) < 64, done.stdout
    assert left_in(tmp_path) == ["p"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    files = {**STUDY, f"report/{'x' * 300}": b"hello"}
    with pytest.raises(OSError, match="too long"):
        unpack(write_pack(tmp_path / "p", manifest_of(files), files), tmp_path / "out")
    assert left_in(tmp_path) == ["p"]


def test_an_error_while_files_are_moved_undoes_what_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "out" / "report" / "s" / "report.html"
    old.parent.mkdir(parents=True)
    old.write_text("before")
    packed = write_pack(tmp_path / "p", manifest_of(STUDY), STUDY)
    before, move = left_in(tmp_path), shutil.move

    def fail_at_the_journal(source: Any, target: Any) -> Any:
        if Path(target).name == "study.json":
            assert old.read_text() == "page"
            raise OSError(28, "No space left on device")
        return move(source, target)

    monkeypatch.setattr(shutil, "move", fail_at_the_journal)
    with pytest.raises(OSError, match="No space"):
        unpack(packed, tmp_path / "out")
    assert left_in(tmp_path) == before and old.read_text() == "before"


@given(place=st.integers(0, 700), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_damaged_archive_is_rejected_or_has_the_right_content(
    place: int, byte: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    data = bytearray(write_pack(folder / "p", manifest_of(STUDY), STUDY).read_bytes())
    place %= len(data)
    data[place] = byte
    (folder / "p").write_bytes(data[:place] if cut else data)
    try:
        unpack(folder / "p", folder / "out")
    except SteepenError as error:
        assert len(str(error)) < 2000 and left_in(folder) == ["p"]
    else:
        assert (folder / "out" / JOURNAL).read_bytes() == STUDY[JOURNAL]


def test_packing_needs_little_memory_and_reads_each_file_once(tmp_path: Path) -> None:
    store, spec = RunStore(tmp_path / "runs"), make_spec()
    journal = Journal.open(tmp_path / "studies", "s", {}, store.root)
    with journal.driving():
        journal.add_batch([spec])
    run = store.run(spec)
    weights = run.checkpoints / "00000006" / "state.safetensors"
    weights.parent.mkdir(parents=True)
    with weights.open("wb") as file:
        file.truncate(100 << 20)
    code = (
        "import resource, sys\nfrom steepen import pack\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "pack('s', 'p', weights=True)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 32
    assert unpack(tmp_path / "p", tmp_path / "out").bytes > 100 << 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_packing_that_is_stopped_leaves_nothing(number: int, tmp_path: Path) -> None:
    """After SIGKILL the next pack removes what was left."""
    code = (
        "import os, sys, time\nfrom steepen.utils.files import scratch_directory\nfrom pathlib import Path\n"
        "with scratch_directory('packing', Path('out')) as scratch:\n"
        "    (scratch / 'report').mkdir()\n    print('ready', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert len(list((tmp_path / "out").iterdir())) == 1
        with scratch_directory("packing", tmp_path / "out"):
            assert len(list((tmp_path / "out").iterdir())) == 2  # that of a living process is left alone
        process.send_signal(number)
        code = process.wait()
    if number == signal.SIGKILL:
        assert len(list((tmp_path / "out").iterdir())) == 1
        with scratch_directory("packing", tmp_path / "out"):
            assert len(list((tmp_path / "out").iterdir())) == 1
        assert not list((tmp_path / "out").iterdir())
    else:
        assert code == 128 + number and not (tmp_path / "out").exists()


def test_packing_follows_no_link_out_of_a_run(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("private")
    store, spec = RunStore(tmp_path / "runs"), make_spec()
    journal = Journal.open(tmp_path / "studies", "s", {}, store.root)
    with journal.driving():
        journal.add_batch([spec])
    store.run(spec).path.mkdir(parents=True)
    store.run(spec).metrics_file.symlink_to(secret)
    with pytest.raises(UsageError, match="a link that leads out of"):
        pack("s", tmp_path / "p", studies=tmp_path / "studies")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("change", [{"name": "../../x"}, {"name": "/tmp/x"}, {"run": "../../home"}])
def test_journal_names_nothing_outside_its_directory(change: dict[str, str], tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, "s", {}, tmp_path / "runs")
    with journal.driving():
        journal.add_batch([make_spec()])
    value = json.loads(journal.file.read_text())
    value |= {name: text for name, text in change.items() if name == "name"}
    value["runs"][0] |= {name: text for name, text in change.items() if name == "run"}
    write_json(journal.file, with_checksum(value))
    with pytest.raises(SteepenError, match="can't be read"):
        Journal.read(journal.folder)
