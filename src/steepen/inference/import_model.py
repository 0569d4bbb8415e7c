"""Import a model as a run: one that steepen exported, or a published checkpoint of the paper's authors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from steepen.data.tokenizer import Tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.inference.authors_checkpoint import find_files, read_model
from steepen.inference.export import DESCRIPTION_FILE, EXPORT_FORMAT
from steepen.inference.hf_tokenizer import TOKENIZER_FILE, from_hugging_face
from steepen.inference.run_files import network_of, write_run
from steepen.inference.weights import digest, read_folder
from steepen.inference.weights import from_hugging_face as own_weights
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class ImportedRun:
    """The run directory that was written, and what the user should know about it."""

    path: Path
    spec: RunSpec
    notes: tuple[str, ...] = ()


def import_model(path: str | Path, runs: str | Path = "runs", out: str | Path | None = None) -> ImportedRun:
    """Import a folder or file as a run directory `out`; by default a directory of `runs` named by its hash.

    Accepted are folders that `steepen export` wrote (also after `save_pretrained` of transformers), and the
    checkpoints of the paper's authors: final.pt with its result.json.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist.")
    if (path / CONFIG_FILE).is_file():
        config = _read(path / CONFIG_FILE)
        return _import_export(path, config.get("steepen_run"), Path(runs), out, hugging_face=True)
    if (path / DESCRIPTION_FILE).is_file():
        return _import_export(path, _read(path / DESCRIPTION_FILE), Path(runs), out, hugging_face=False)
    files = find_files(path)
    if files is None:
        raise UsageError(
            f"{path} cannot be imported: give a folder that `steepen export` wrote ({CONFIG_FILE} or "
            f"{DESCRIPTION_FILE}, and safetensors), or a final.pt of the paper's authors with its "
            "result.json."
        )
    return _import_published(*files, Path(runs), out)


def _import_published(checkpoint: Path, result_file: Path, runs: Path, out: str | Path | None) -> ImportedRun:
    model = read_model(checkpoint, _read(result_file), result_file)
    path = Path(out) if out is not None else runs / model.spec.hash
    write_run(
        path,
        model.spec,
        model.weights,
        step=model.spec.steps,
        stored_passes=model.stored_passes,
        tokenizer=Tokenizer.gpt2(),
        record=model.record,
    )
    return ImportedRun(path, model.spec)


def _import_export(
    folder: Path, described: Any, runs: Path, out: str | Path | None, *, hugging_face: bool
) -> ImportedRun:
    if not isinstance(described, Mapping) or described.get("format") != EXPORT_FORMAT:
        raise UsageError(
            f"{folder} was not exported by steepen: its {CONFIG_FILE} does not describe a run; to score "
            f"another model of transformers, use `steepen eval --hf`."
        )
    known = cast("Mapping[str, Any]", described)
    spec = RunSpec.from_dict(known["spec"])
    stored_passes = int(known["stored_passes"])
    weights = read_folder(folder)
    if hugging_face:
        weights = own_weights(weights, network_of(spec, stored_passes))
    notes: list[str] = []
    record = None if known["record"] is None else RunRecord.from_dict(known["record"])
    if digest(weights) != known["weights_sha256"]:
        record = None
        notes.append("the weights have changed since the export, so the run has no record.")
    path = Path(out) if out is not None else runs / spec.hash
    write_run(
        path,
        spec,
        weights,
        step=int(known["step"]),
        stored_passes=stored_passes,
        tokenizer=_tokenizer(folder, known["tokenizer"]),
        record=record,
    )
    return ImportedRun(path, spec, tuple(notes))


def _tokenizer(folder: Path, described: Mapping[str, Any] | None) -> Tokenizer | None:
    """The tokenizer: GPT-2's, which ships with the package, or the one in the folder."""
    if described is None:
        return None
    if described["name"] == "gpt2" and Tokenizer.gpt2().identity == described["sha256"]:
        return Tokenizer.gpt2()
    if not (folder / TOKENIZER_FILE).is_file():
        raise SteepenError(f"{folder} has no {TOKENIZER_FILE}: copy it from the original export.")
    return from_hugging_face(folder / TOKENIZER_FILE, described)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        assert isinstance(content, dict)
        return cast("dict[str, Any]", content)
    except (OSError, ValueError, AssertionError) as error:
        raise SteepenError(f"{file} cannot be read ({error}).") from error
