"""Download the CORE bundle: resumable, and verified by the content of its tasks."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from steepen.errors import SteepenError
from steepen.evaluation.core.bundle import CORE_IDENTITY, Bundle
from steepen.utils.files import open_without_links

# nanochat's copy of DCLM's tasks; the address has no version, so the content is checked.
ADDRESS = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
CHUNK = 1 << 20
TIMEOUT = 60  # seconds without any data


def fetch_core(
    out: Path,
    address: str = ADDRESS,
    *,
    identity: str | None = CORE_IDENTITY,
    progress: Callable[[int, int | None], None] | None = None,
) -> Bundle:
    """Download and unpack the bundle into a new directory `out`; returns it opened.

    An interrupted download continues where it stopped when called again. `identity` is what the tasks must
    have; None accepts any bundle. `progress(done, total)` is called with bytes.
    """
    if out.exists():
        return _open(out, identity, out)
    archive, folder = (out.with_name(f"{out.name}{ending}") for ending in (".zip.partial", ".partial"))
    archive.parent.mkdir(parents=True, exist_ok=True)
    _download(address, archive, progress)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as members:
            for name in members.namelist():
                if not (folder / name).resolve().is_relative_to(folder.resolve()):
                    raise SteepenError(f"it has a file outside its folder: {name}")
            members.extractall(folder)
        _open(folder, identity, archive).directory.rename(out)
    except (zipfile.BadZipFile, SteepenError) as error:
        archive.unlink()
        raise SteepenError(f"what {address} gave is not the CORE bundle ({error}).") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    archive.unlink()
    return Bundle.open(out)


def _open(folder: Path, identity: str | None, where: Path) -> Bundle:
    bundle = Bundle.open(folder)
    if identity is not None and bundle.identity != identity:
        raise SteepenError(
            f"{where} has other tasks or examples than the published CORE bundle (its identity is "
            f"{bundle.identity[:12]}…, not {identity[:12]}…)."
        )
    return bundle


def _download(address: str, file: Path, progress: Callable[[int, int | None], None] | None) -> None:
    """Download to a file, continuing after what it already has."""
    have = file.stat().st_size if file.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            continued = answer.status == 206
            have = have if continued else 0
            length = answer.headers.get("Content-Length")
            total = None if length is None else have + int(length)
            with open(file, "ab" if continued else "wb", opener=open_without_links) as out:
                while data := answer.read(CHUNK):
                    out.write(data)
                    have += len(data)
                    if progress:
                        progress(have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to download
            return
        raise _unreachable(address, f"{error.code} {error.reason}") from error
    except OSError as error:
        raise _unreachable(address, str(getattr(error, "reason", error))) from error
    if total is not None and have < total:
        raise SteepenError(
            f"the download of {address} stopped at {have:,} of {total:,} bytes; run the command again to "
            "continue."
        )


def _unreachable(address: str, reason: str) -> SteepenError:
    return SteepenError(
        f"{address} cannot be downloaded ({reason}); without a connection, download it elsewhere, unpack it "
        "and give the folder to `steepen eval --core`."
    )
