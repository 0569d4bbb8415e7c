"""Import a model that steepen exported as a run: read its weights and write a run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from steepen.data.tokenizer import Tokenizer, write_run_tokenizer
from steepen.errors import SteepenError, UsageError, require
from steepen.inference.export import DESCRIPTION_FILE, EXPORT_FORMAT
from steepen.inference.hf_tokenizer import TOKENIZER_FILE, from_hugging_face
from steepen.inference.weights import digest, read_folder
from steepen.inference.weights import from_hugging_face as own_weights
from steepen.model.init import copy_weights
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory
from steepen.training.checkpoint import TrainingProgress, tensor_key, write_checkpoint
from steepen.training.run_state import build_network
from steepen.utils.codec import from_builtins
from steepen.utils.files import new_directory
from steepen.utils.json_io import read_json, write_json


def write_run(
    directory: Path,
    spec: RunSpec,
    weights: Mapping[str, Tensor],
    *,
    step: int,
    stored_passes: int,
    tokenizer: Tokenizer,
    record: RunRecord | None,
) -> Path:
    """Write spec, tokenizer, one checkpoint and the record into a new directory.

    The checkpoint has no optimizer state: the run can be evaluated, exported and used, not resumed.
    """
    if directory.exists():
        raise UsageError(f"{directory} exists; give another directory with `out`.")
    network = build_network(spec, spec.network_after(step), stored_passes)
    copy_weights(network, weights)  # on the meta device: checks names and shapes
    with new_directory(directory) as folder:
        files = RunDirectory(folder)
        write_json(files.spec_file, spec.to_dict())
        write_run_tokenizer(tokenizer, files.tokenizer_file)
        state = TrainingProgress(run=spec.hash, step=step, passes=stored_passes, kind="final")
        tensors = {tensor_key("model", name): value.float().contiguous() for name, value in weights.items()}
        write_checkpoint(files.checkpoints, state, tensors)
        if record is not None:
            write_json(files.record_file, record.to_dict())
    return directory


CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Description:
    """What `describe` of `export` writes: all that makes the run again."""

    format: str
    run: str
    step: int
    passes: int
    stored_passes: int
    weights_sha256: str
    tokenizer: dict[str, str]
    spec: RunSpec
    record: dict[str, Any] | None
    network: dict[str, Any] = field(default_factory=dict[str, Any])  # for readers without steepen

    def __post_init__(self) -> None:
        most = self.spec.schedule.max_passes
        require(0 <= self.step <= self.spec.steps, "run", "step", self.step, f"from 0 to {self.spec.steps:,}")
        good = 1 <= self.stored_passes <= most
        require(good, "run", "stored_passes", self.stored_passes, f"from 1 to {most:,}")


@dataclass(frozen=True)
class ImportedRun:
    """The run directory that was written, and what the user should know about it."""

    path: Path
    spec: RunSpec
    notes: tuple[str, ...] = ()


def import_model(path: str | Path, runs: str | Path = "runs", out: str | Path | None = None) -> ImportedRun:
    """Import a folder or file as a run directory `out`; by default a directory of `runs` named by its hash.

    Accepted are folders that `steepen export` wrote (also after `save_pretrained` of transformers);
    tools/import_authors_checkpoint.py reads the checkpoints of the paper's authors.
    """
    path = Path(path)
    known = _read_description(path)
    spec, weights = known.spec, read_folder(path)
    if (path / CONFIG_FILE).is_file():  # with the names of transformers
        network = build_network(spec, spec.network_after(known.step), known.stored_passes)
        weights = own_weights(weights, network)
    notes: list[str] = []
    record = None if known.record is None else RunRecord.from_dict(known.record)
    if record is not None and record.run != spec.hash:
        raise SteepenError(f"{path} has the record of another run, {record.run}, not of {spec.hash}.")
    if digest(weights) != known.weights_sha256:
        record = None
        notes.append("the weights have changed since the export, so the run has no record.")
    directory = Path(runs) / spec.hash if out is None else Path(out)
    tokenizer = _tokenizer(path, known.tokenizer)
    write_run(
        directory, spec, weights, step=known.step, stored_passes=known.stored_passes, tokenizer=tokenizer,
        record=record,
    )  # fmt: skip
    return ImportedRun(directory, spec, tuple(notes))


def _read_description(path: Path) -> Description:
    """The description in an exported folder; raises for what steepen did not export."""
    if not path.exists():
        raise UsageError(f"{path} does not exist.")
    if (path / CONFIG_FILE).is_file():
        described: Any = read_object(path / CONFIG_FILE).get("steepen_run")
    elif (path / DESCRIPTION_FILE).is_file():
        described = read_object(path / DESCRIPTION_FILE)
    else:
        raise UsageError(
            f"{path} cannot be imported: give a folder that `steepen export` wrote ({CONFIG_FILE} or "
            f"{DESCRIPTION_FILE}, and safetensors); tools/import_authors_checkpoint.py reads a final.pt of "
            "the paper's authors."
        )
    if not isinstance(described, Mapping) or cast("Any", described).get("format") != EXPORT_FORMAT:
        raise UsageError(
            f"{path} was not exported by steepen: its {CONFIG_FILE} does not describe a run; to score "
            f"another model of transformers, use `steepen eval --hf`."
        )
    return from_builtins(Description, dict(cast("Mapping[str, Any]", described)), f"{path}: run")


def _tokenizer(folder: Path, described: Mapping[str, str]) -> Tokenizer:
    """The tokenizer: GPT-2's, which ships with the package, or the one in the folder."""
    if not {"name", "pattern", "sha256"} <= described.keys():
        raise SteepenError(f"{folder} does not describe its tokenizer: export the run again.")
    if described["name"] == "gpt2" and Tokenizer.gpt2().identity == described["sha256"]:
        return Tokenizer.gpt2()
    if not (folder / TOKENIZER_FILE).is_file():
        raise SteepenError(f"{folder} has no {TOKENIZER_FILE}: copy it from the original export.")
    return from_hugging_face(folder / TOKENIZER_FILE, described)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = read_json(file)
        assert isinstance(content, dict)
        return cast("dict[str, Any]", content)
    except (OSError, ValueError, AssertionError) as error:
        raise SteepenError(f"{file} cannot be read ({error}).") from error
