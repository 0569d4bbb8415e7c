"""What `steepen eval` assembles: a checkpoint's network, and what is measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.errors import SteepenError, UsageError
from steepen.utils.progress import stage_progress

if TYPE_CHECKING:
    import torch

    from steepen.data import Dataset
    from steepen.evaluation.core.bundle import Bundle
    from steepen.evaluation.core.evaluate import CoreOptions
    from steepen.model.network import Network
    from steepen.runs.spec import RunSpec
    from steepen.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure; the validation loss always is."""

    core: Bundle | None = None
    core_options: CoreOptions | None = None
    depth_used: bool = False
    threshold: float = 2.0
    direction: str = "final-to-block"
    depth_tokens: int = 16_384
    passes: tuple[int, ...] = ()
    validation_tokens: int | None = None  # None: as many as the run was validated on


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint of a run."""

    run: Path
    spec: RunSpec
    checkpoint: Checkpoint

    @staticmethod
    def find(path: Path) -> LoadedCheckpoint:
        """The subject of a run directory (its newest checkpoint) or of a checkpoint directory."""
        from steepen.runs.spec import read_spec
        from steepen.training.checkpoint import META_FILE, Checkpoint, list_checkpoints

        path = path.resolve()
        run = path if (path / "spec.json").is_file() else path.parent.parent
        if not (run / "spec.json").is_file() or (run != path and not path.is_dir()):
            raise UsageError(
                f"{path} is neither a run directory (with spec.json) nor one of its checkpoints/NNNNNNNN; "
                "`steepen train` prints the run's directory when it ends."
            )
        if run == path:
            saved = list_checkpoints(run / "checkpoints")
            if not saved:
                raise SteepenError(f"{run} has no checkpoint yet.")
            checkpoint = saved[-1]
        else:
            if not (path / META_FILE).is_file() or not path.name.isdigit():
                raise UsageError(f"{path} is no checkpoint (it has no {META_FILE}).")
            checkpoint = Checkpoint(path)
        return LoadedCheckpoint(run, read_spec(run / "spec.json"), checkpoint)

    @property
    def passes(self) -> int:
        """Core passes a network of this moment is evaluated at."""
        from steepen.training.step_schedule import build_schedule

        return int(build_schedule(self.spec).eval_passes[max(0, self.checkpoint.step - 1)])

    @property
    def final(self) -> bool:
        """Whether this is what the run ended with."""
        return self.checkpoint.step == self.spec.steps

    @property
    def results(self) -> Path:
        """Where this checkpoint's results are kept."""
        return self.run / "evaluation" / self.checkpoint.path.name

    def network(self, device: torch.device, precision: str) -> Network:
        """The network with its weights, in the precision it is to compute in."""
        import torch

        from steepen.model.init import on_meta
        from steepen.model.load_weights import allocate, copy_weights, read_weights
        from steepen.training.checkpoint import SEPARATOR, STATE_FILE
        from steepen.utils.files import sha256_of_file

        position, spec = self.checkpoint.training_state(), self.spec
        if position.run != spec.hash:
            raise SteepenError(f"{self.checkpoint.path} belongs to another run ({position.run}).")
        file = self.checkpoint.path / STATE_FILE
        if sha256_of_file(file) != self.weights_identity:
            raise SteepenError(f"{file} is corrupt: it does not have its checksum; use another checkpoint.")
        multipliers = spec.hyperparameters.multipliers
        bare = on_meta(spec.shape, spec.arm, multipliers, spec.options, passes=position.passes)
        network = allocate(bare, device)
        copy_weights(network, read_weights(file, f"model{SEPARATOR}", device))
        # Weights cast once compute the same as weights cast at every use, and faster.
        return network.to(torch.bfloat16) if precision == "bf16" else network

    @property
    def weights_identity(self) -> str:
        """SHA-256 of the checkpoint's tensors, as saved beside them."""
        import json

        from steepen.training.checkpoint import META_FILE

        try:
            return str(json.loads((self.checkpoint.path / META_FILE).read_text())["sha256"])
        except (OSError, ValueError, KeyError) as error:
            raise SteepenError(f"{self.checkpoint.path} has no readable {META_FILE}.") from error


def measure(
    subject: LoadedCheckpoint,
    dataset: Dataset,
    wanted: EvaluationRequest,
    *,
    device: str = "auto",
    precision: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """Everything asked of a checkpoint, as plain values; CORE's outcomes are saved beside it on the way."""
    from steepen.data import ValidationSet
    from steepen.evaluation.kl_depth import depth_used
    from steepen.evaluation.test_time_passes import passes_curve
    from steepen.evaluation.validation_loss import validate
    from steepen.training.device import find_device

    spec = subject.spec
    if dataset.padded_vocabulary > spec.shape.vocabulary:
        raise UsageError(
            f"the run has a vocabulary of {spec.shape.vocabulary:,}, but {dataset.directory} has a tokenizer "
            f"with {dataset.vocabulary:,} ids; give data prepared with the run's own tokenizer."
        )
    place = find_device(device)
    if precision == "auto":
        # Eight bits are for training: what they train is a network in bf16.
        precision = "bf16" if spec.precision == "fp8" else spec.precision
    if precision not in ("fp32", "bf16"):
        raise UsageError(f"--precision {precision!r} is not known: use auto, fp32 or bf16.")
    network = subject.network(place, precision)
    passes, context = subject.passes, spec.shape.context
    most = _available(dataset, context)
    tokens = max(context, wanted.validation_tokens or min(spec.validation_tokens, most))
    validation = ValidationSet(dataset, context, tokens)
    found: dict[str, Any] = {
        "run": spec.hash,
        "step": subject.checkpoint.step,
        "passes": passes,
        "precision": precision,
        "data": dataset.identity,
    }
    if dataset.identity == spec.data.identity:
        found["tokenizer"] = dataset.manifest.tokenizer.sha256
    with stage_progress(quiet) as show:
        found["validation"] = validate(
            network, validation, passes, report=lambda done, total: show("validation", done, total)
        ).to_dict()
        if wanted.depth_used:
            fixed = ValidationSet(dataset, context, max(context, min(wanted.depth_tokens, most)))
            found["depth_used"] = depth_used(
                network,
                fixed,
                passes,
                threshold=wanted.threshold,
                direction=wanted.direction,  # pyright: ignore[reportArgumentType]  (checked there)
                report=lambda done, total: show("depth used", done, total),
            ).to_dict()
        if wanted.passes:
            found["passes_curve"] = passes_curve(
                network,
                validation,
                wanted.passes,
                passes,
                report=lambda done, total: show("passes at test time", done, total),
            ).to_dict()
    if wanted.core is not None:
        with stage_progress(quiet) as show:
            found["core"] = _core(subject, network, dataset, wanted, passes, precision, show)
    return found


def _available(dataset: Dataset, context: int) -> int:
    """Validation tokens a data set has to predict at a context."""
    return max(context, len(dataset.tokens("val")) // (context + 1) * context)


def _core(
    subject: LoadedCheckpoint,
    network: Network,
    dataset: Dataset,
    wanted: EvaluationRequest,
    passes: int,
    precision: str,
    show: Any,
) -> dict[str, Any]:
    from steepen.evaluation.core.evaluate import CoreOptions, evaluate_core, settings_key
    from steepen.utils.json_io import write_json

    bundle, options = wanted.core, wanted.core_options or CoreOptions()
    assert bundle is not None
    tokenizer = dataset.tokenizer()
    settings = {
        "bundle": bundle.identity,
        "tokenizer": tokenizer.identity,
        "weights": subject.weights_identity,
        "passes": passes,
        "precision": precision,
        "examples": options.examples,
    }
    folder = subject.results / "core" / settings_key(settings)
    write_json(folder / "settings.json", settings)
    scores = evaluate_core(
        network,
        tokenizer,
        bundle,
        options,
        passes=passes,
        folder=folder,
        report=lambda now: show("CORE", now.done, now.total, detail=now.what),
    ).to_dict()
    # Equal keys mean equal settings; the seeds and tasks asked may differ, and are in the scores.
    found = {**scores, "bundle": bundle.identity, "examples": options.examples, "outcomes": str(folder)}
    write_json(folder / "scores.json", found)
    return found
