"""Packs from others: nothing leaves the directory, fills the memory or fails without a sentence."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from run_fixtures import make_spec
from steepen.api.pack import pack, unpack
from steepen.errors import SteepenError, UsageError
from steepen.runs.store import RunStore
from steepen.studies.driver.journal import Journal
from steepen.utils.json_io import with_checksum, write_json

JOURNAL = "studies/s/study.json"


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


@pytest.mark.parametrize("manifest", [[], None, {"version": 1}, {"version": 1, "study": "s", "files": [1]}])
def test_damaged_manifest_gives_a_sentence(manifest: Any, tmp_path: Path) -> None:
    with pytest.raises(SteepenError):
        unpack(write_pack(tmp_path / "p", manifest, {}), tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "studies/../../x", "studies", "runs/x", "x/y/z", "report", "runs/a/\0", ""]
)
def test_no_file_leaves_the_directory(name: str, tmp_path: Path) -> None:
    files = {JOURNAL: b"{}", name: b"hello"}
    with pytest.raises(SteepenError):
        unpack(write_pack(tmp_path / "p", manifest_of(files), files), tmp_path / "out" / "deep")
    assert [path.name for path in tmp_path.rglob("*")] == ["p"]


@pytest.mark.parametrize("study", ["", "..", ".hidden", "a/b", "a\0"])
def test_study_has_a_name_of_one_directory(study: str, tmp_path: Path) -> None:
    files = {f"studies/{study}/study.json": b"{}"}
    with pytest.raises(SteepenError):
        unpack(write_pack(tmp_path / "p", manifest_of(files, study), files), tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["p"]


def test_links_and_files_beyond_the_manifest_are_not_unpacked(tmp_path: Path) -> None:
    files = {JOURNAL: b"{}", "runs/a/more": b"hello"}
    packed = write_pack(tmp_path / "p", manifest_of({JOURNAL: b"{}"}), files)
    assert unpack(packed, tmp_path / "out").files == 1
    assert not (tmp_path / "out" / "runs").exists()
    with tarfile.open(packed, "w:gz") as tar:
        text = json.dumps(manifest_of({JOURNAL: b"{}"})).encode()
        entry = tarfile.TarInfo("MANIFEST.json")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
        link = tarfile.TarInfo(JOURNAL)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    with pytest.raises(SteepenError, match=r"it has no studies/s/study\.json"):
        unpack(packed, tmp_path / "other")


def test_bomb_is_rejected_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepen.api.pack.MAX_UNPACKED", 1 << 20)
    files = {JOURNAL: bytes(8 << 20)}
    packed = write_pack(tmp_path / "p", manifest_of(files), files)
    assert packed.stat().st_size < 1 << 16
    with pytest.raises(SteepenError, match="would unpack to more than"):
        unpack(packed, tmp_path / "out")


@given(place=st.integers(0, 400), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_damaged_archive_is_rejected_or_has_the_right_content(
    place: int, byte: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    files = {JOURNAL: b'{"a": 1}'}
    data = bytearray(write_pack(folder / "p", manifest_of(files), files).read_bytes())
    place %= len(data)
    data[place] = byte
    (folder / "p").write_bytes(data[:place] if cut else data)
    try:
        unpack(folder / "p", folder / "out")
    except SteepenError as error:
        assert len(str(error)) < 2000
    else:
        assert (folder / "out" / JOURNAL).read_bytes() == files[JOURNAL]


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
