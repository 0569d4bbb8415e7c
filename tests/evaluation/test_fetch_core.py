"""`steepen eval fetch-core`: a download that continues, and content that is checked."""

from __future__ import annotations

import http.server
import threading
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from steepen.errors import SteepenError
from steepen.evaluation.core.bundle import CORE_IDENTITY, Bundle
from steepen.evaluation.core.fetch import fetch_core
from steepen.requests.app import main


class Server(http.server.BaseHTTPRequestHandler):
    """Serves one archive, with ranges; `limit` breaks the first answers off."""

    content = b""
    limits: list[int] = []  # noqa: RUF012
    ranges: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        type(self).ranges.append(wanted)
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if first >= len(self.content):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        part = self.content[first:]
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: self.limits.pop(0)] if self.limits else part)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address(bundle_folder: Path, tmp_path: Path) -> Generator[str]:
    """The address of a bundle on this machine."""
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(bundle_folder.rglob("*")):
            archive.write(file, Path("eval_bundle") / file.relative_to(bundle_folder))
    Server.content, Server.limits, Server.ranges = (tmp_path / "bundle.zip").read_bytes(), [], []
    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/eval_bundle.zip"
    server.shutdown()
    server.server_close()


def test_an_interrupted_download_continues(address: str, bundle: Bundle, tmp_path: Path) -> None:
    Server.limits = [500]
    out = tmp_path / "core"
    with pytest.raises(SteepenError, match=r"run the command again to continue|cannot be downloaded"):
        fetch_core(out, address, identity=bundle.identity)
    assert not out.exists()
    found = fetch_core(out, address, identity=bundle.identity)
    assert Server.ranges == [None, "bytes=500-"]
    assert found.identity == bundle.identity and found.directory == out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "bundle.zip", "core"]
    fetch_core(out, address, identity=bundle.identity)  # nothing to do
    assert len(Server.ranges) == 2


def test_other_content_is_rejected(address: str, tmp_path: Path) -> None:
    with pytest.raises(SteepenError, match=r"is not the CORE bundle .* other tasks or examples"):
        fetch_core(tmp_path / "core", address)
    Server.content = b"not an archive" * 99
    with pytest.raises(SteepenError, match="is not the CORE bundle"):
        fetch_core(tmp_path / "core", address)
    assert not (tmp_path / "core").exists() and not list(tmp_path.glob("*.partial"))


def test_without_a_connection_the_message_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "fetch-core", "--out", str(tmp_path / "core"), "--address", "http://127.0.0.1:9/x.zip"]
    assert main(words) == 1
    assert "download it elsewhere, unpack it and give the folder to `steepen eval --core`" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_identity_is_that_of_the_real_bundle(core_bundle: Bundle) -> None:
    assert core_bundle.identity == CORE_IDENTITY and not core_bundle.altered_core
