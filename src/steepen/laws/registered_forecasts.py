"""Forecasts that are written down before the runs exist, scored when they do, and their calibration.

A ledger of forecasts, of one project or of many, has one JSON object a line; lines are only ever added. A
forecast holds the law, the rungs it was fitted to, the date and the interval, so that a later reader can tell
what was known when, and which table's runs it is about. An observation holds the loss that was measured.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from steepen.errors import UsageError, require
from steepen.laws.analysis import LadderAnalysis
from steepen.laws.distributions import Interval
from steepen.laws.ladder import Ladder
from steepen.laws.verdict.holdout import forecast_loss
from steepen.utils.codec import from_builtins
from steepen.utils.files import file_lock, read_file, read_text, write_atomically
from steepen.utils.formatting import format_flops, percent
from steepen.utils.json_io import parse_json

RANGES = {  # of a forecast's numbers: wide enough for any law, and narrow enough for its powers
    "flops": (1e-9, 1e60),
    "c0": (1e-9, 1e60),
    "forecast": (-1e9, 1e9),
    "standard_error": (0.0, 1e9),
    "confidence": (0.0, 1.0),
    "e": (-1e9, 1e9),
    "log_a": (-500.0, 500.0),
    "gamma": (-4.0, 4.0),
}
SAME_LOSS = 0.005  # rungs whose losses differ by less are the same, perhaps with more seeds
SAME_COMPUTE = 0.05  # a run within this fraction of the registered FLOPs is the one that was forecast


@dataclass(frozen=True)
class RegisteredForecast:
    """The loss forecast for a run of `arm` at `flops`, with what it was forecast from.

    `interval` has confidence `confidence` for one run: the law's error and the noise of a run.
    """

    arm: str
    flops: float
    forecast: float
    interval: Interval
    standard_error: float
    confidence: float
    e: float
    log_a: float
    gamma: float
    c0: float
    method: str
    reference: str
    runs: int
    data_sha256: str  # of every arm, compute and loss, in order of arm and compute
    registered: str  # date and time in UTC
    fitted: tuple[Interval, ...] = ()  # compute and loss of the arm's rungs, which tell whose it is

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            require(low <= value <= high, "forecast", name, value, f"from {low:g} to {high:g}")
        low, high = self.interval
        ordered = -1e9 <= low <= high <= 1e9
        require(ordered, "forecast", "interval", self.interval, "two numbers, the smaller first")

    @property
    def key(self) -> str:
        """The hash by which observations refer to it."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def is_about(self, ladder: Ladder) -> bool:
        """Whether it was fitted to rungs of this ladder: a ledger may have arms of the same name."""
        places = [(nearest_rung(ladder, flops), loss) for flops, loss in self.fitted]
        apart = [abs(ladder.loss[rung] / loss - 1) for rung, loss in places if rung is not None]
        return not self.fitted or (bool(apart) and float(np.median(apart)) < SAME_LOSS)

    def law(self, flops: float) -> float:
        """The registered law's loss at any compute."""
        return self.e + math.exp(self.log_a) * (flops / self.c0) ** -self.gamma


@dataclass(frozen=True)
class Observation:
    """The loss of a run that was forecast: `of` is the key of the forecast."""

    of: str
    flops: float
    observed: float
    scored: str  # date and time in UTC

    def __post_init__(self) -> None:
        for name, (low, high) in (("flops", (1e-9, 1e60)), ("observed", (-1e9, 1e9))):
            value = getattr(self, name)
            require(low <= value <= high, "observation", name, value, f"from {low:g} to {high:g}")


@dataclass(frozen=True)
class Calibration:
    """How the forecasts of a ledger have done: `inside` of `scored`, where `expected` would be nominal.

    `rms_error` and `mean_error` are in standard errors of the forecasts: 1 and 0 if those are right.
    """

    forecasts: int
    scored: int
    inside: int
    expected: float
    rms_error: float
    mean_error: float

    def sentence(self) -> str:
        """The counts, and what they should be."""
        if not self.scored:
            return f"{self.forecasts} forecasts; none is scored yet."
        return (
            f"{self.scored} of {self.forecasts} forecasts are scored: {self.inside} are inside their"
            f" intervals ({self.expected:.1f} expected), RMS error {self.rms_error:.2f} standard errors (1"
            f" expected), mean error {self.mean_error:+.2f} (0). Forecasts of one registration share the"
            " error of its laws."
        )


@dataclass(frozen=True)
class ScoredForecast:
    """A registered forecast, and the run that was later measured (None: not yet).

    The run's compute may differ a little from the registered one, so forecast and interval are those of the
    registered law at the run's own compute. `error` is observed minus forecast.
    """

    registered: RegisteredForecast
    flops: float | None = None
    observed: float | None = None
    forecast: float | None = None
    interval: Interval | None = None
    error: float | None = None
    error_in_standard_errors: float | None = None
    inside: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists and numbers, for JSON."""
        return asdict(self)

    def sentence(self) -> str:
        """The score in a sentence."""
        r = self.registered
        what = f"registered {r.registered[:10]}: {r.arm} at {format_flops(r.flops)} FLOPs"
        if self.observed is None or self.interval is None:
            low, high = r.interval
            return f"{what}, forecast {r.forecast:.4f} ({low:.4f} to {high:.4f}); not measured yet"
        low, high = self.interval
        return (
            f"{what}, forecast {self.forecast:.4f} ({low:.4f} to {high:.4f}); observed {self.observed:.4f},"
            f" error {self.error:+.4f} ({self.error_in_standard_errors:+.1f} standard errors):"
            f" {'inside' if self.inside else 'outside'} the {percent(r.confidence)} interval"
        )


def register_forecasts(
    file: Path,
    analysis: LadderAnalysis,
    ladders: dict[str, Ladder],
    flops: float,
    measured: dict[str, Ladder] | None = None,
) -> list[RegisteredForecast]:
    """Add a forecast for every arm at `flops` to the file, and return them. `ladders` are those fitted.

    Arms that already have a run there, in `measured` (all runs, held out or not), are left out; raises
    UsageError if that is every arm.
    """
    measured = measured or ladders
    read_registered(file)  # rejects to add to something else
    fit = analysis.primary_fit
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [
        [name, float(rung), sorted(float(loss) for loss in runs)]
        for name, ladder in sorted(ladders.items())
        for rung, runs in zip(ladder.flops, ladder.runs, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    count = sum(len(runs) for ladder in ladders.values() for runs in ladder.runs)
    found: list[RegisteredForecast] = []
    for arm in fit.arms:
        if nearest_rung(measured[arm], flops) is not None:
            continue
        law, variance = fit.arms[arm], analysis.judge.run_variance(flops)
        forecast, error = forecast_loss(fit, analysis.judge, arm, flops, variance)
        reach = fit.quantile * error
        found.append(
            RegisteredForecast(
                arm=arm, flops=flops, forecast=forecast, interval=(forecast - reach, forecast + reach),
                standard_error=error, confidence=fit.settings.confidence, e=law.e.value,
                log_a=law.log_a.value, gamma=law.gamma.value, c0=fit.c0,
                method="own E, A and γ" if analysis.one_e_rejected else fit.settings.method,
                reference=fit.settings.reference, runs=count, data_sha256=digest, registered=now,
                fitted=tuple(zip(ladders[arm].flops.tolist(), ladders[arm].loss.tolist(), strict=True)),
            )
        )  # fmt: skip
    if not found:
        raise UsageError(
            f"every arm already has a run at {format_flops(flops)} FLOPs, so there is nothing left to"
            " forecast; choose another compute with `budget`."
        )
    _append(file, found)
    return found


def _append(file: Path, entries: Sequence[RegisteredForecast | Observation]) -> None:
    """Add lines to a ledger, to which another process may add, too."""
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in entries)
    lock = file.with_name(f".{file.name}.lock")
    with file_lock(lock, wait=True, poll_seconds=0.05):
        # As a whole: a full disk must not leave half a line, which nobody could read or add to.
        write_atomically(file, (read_file(file) if file.exists() else b"") + lines.encode())
        lock.unlink(missing_ok=True)


def _read(file: Path) -> list[RegisteredForecast | Observation]:
    """The lines of a ledger; none if it does not exist yet."""
    if not file.exists():
        return []
    found: list[RegisteredForecast | Observation] = []
    try:
        lines = read_text(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read ({error}).") from None
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line)
            observed = isinstance(value, dict) and "of" in value
            kind = Observation if observed else RegisteredForecast
            found.append(from_builtins(kind, value, "observation" if observed else "forecast"))
        except (ValueError, UsageError) as error:
            raise UsageError(f"{file}, line {number}: not a registered forecast ({error}).") from None
    return found


def read_registered(file: Path) -> list[RegisteredForecast]:
    """The forecasts of a ledger; [] if it does not exist yet."""
    return [one for one in _read(file) if isinstance(one, RegisteredForecast)]


def read_ledger(file: Path) -> list[ScoredForecast]:
    """The forecasts of a ledger, each with its latest observation."""
    entries = _read(file)
    observed = {one.of: one for one in entries if isinstance(one, Observation)}
    return [
        _scored(one, seen.flops, seen.observed) if (seen := observed.get(one.key)) else ScoredForecast(one)
        for one in entries
        if isinstance(one, RegisteredForecast)
    ]


def record_scores(file: Path, scored: Sequence[ScoredForecast]) -> None:
    """Add the observations of scored forecasts that the ledger does not have yet."""
    known = {(one.registered.key, one.observed) for one in read_ledger(file)}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    new = [
        Observation(one.registered.key, one.flops, one.observed, now)
        for one in scored
        if one.flops is not None and one.observed is not None
        if (one.registered.key, one.observed) not in known
    ]
    if new:
        _append(file, new)


def calibration(ledger: Sequence[ScoredForecast]) -> Calibration:
    """How the scored forecasts have done, over all."""
    scored = [one for one in ledger if one.inside is not None]
    errors = np.array([one.error_in_standard_errors or 0.0 for one in scored] or [math.nan])
    return Calibration(
        len(ledger), len(scored), sum(bool(one.inside) for one in scored),
        sum(one.registered.confidence for one in scored), float(np.sqrt((errors**2).mean())),
        float(errors.mean()),
    )  # fmt: skip


def score_registered(
    forecasts: Sequence[RegisteredForecast], ladders: dict[str, Ladder]
) -> list[ScoredForecast]:
    """Compare each forecast with its arm's rung of that compute, if it has been measured."""
    scored: list[ScoredForecast] = []
    for one in forecasts:
        ladder = ladders.get(one.arm)
        rung = None if ladder is None or not one.is_about(ladder) else nearest_rung(ladder, one.flops)
        if ladder is None or rung is None:
            scored.append(ScoredForecast(one))
        else:
            scored.append(_scored(one, float(ladder.flops[rung]), float(ladder.loss[rung])))
    return scored


def _scored(one: RegisteredForecast, flops: float, observed: float) -> ScoredForecast:
    """A forecast beside the loss that a run of its compute has."""
    shift = one.law(flops) - one.forecast
    low, high = one.interval[0] + shift, one.interval[1] + shift
    error = observed - one.law(flops)
    return ScoredForecast(
        one, flops, observed, one.law(flops), (low, high), error, error / max(one.standard_error, 1e-300),
        low <= observed <= high,
    )  # fmt: skip


def nearest_rung(ladder: Ladder, flops: float) -> int | None:
    """The rung whose compute is within 5% of `flops`."""
    distance = np.abs(np.log(ladder.flops / flops))
    best = int(np.argmin(distance)) if len(distance) else 0
    return best if len(distance) and distance[best] <= math.log1p(SAME_COMPUTE) else None
