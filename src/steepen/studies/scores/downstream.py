"""The downstream analysis: does a better scaling law of the loss carry over to tasks?

Runs with scores are grouped into series. Within each corpus every series is compared with the reference:
metrics along the ladders, multipliers at equal metrics, what the loss does not explain, and forecasts beyond
the runs. Then corpora are compared with one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steepen.errors import SteepenError, UsageError
from steepen.evaluation.forecast import MIN_RUNS, Forecast, Held, forecast_core
from steepen.evaluation.scored_runs import ScoredRun, ScoreSeries, find_runs, find_series, group_series
from steepen.laws.analysis import fit_compute
from steepen.laws.fits.compute_law import AnalysisRequest, ArmLaw
from steepen.laws.ladder import make_ladder
from steepen.runs.record import RunRecord
from steepen.studies.answer import Answer, Axis, Draft, Panel, Series
from steepen.studies.plotting import line
from steepen.studies.scores import score_forecasts, score_ladders, score_residuals
from steepen.studies.scores.score_forecasts import Scope
from steepen.studies.scores.score_ladders import ANSWER_NLL, CORE22, LOSS, METRICS, MetricKind, MultiplierRow
from steepen.utils.formatting import format_flops
from steepen.utils.rows import grouped

SECTION = "Appendix C, Corpus Transfer and Downstream Evaluation"
FORECASTS = "Forecasts beyond the ladders"
LOSS_CAPTION = "Laws by the paper's method: one irreducible loss, from the reference."
NLL_CAPTION = "Laws with an irreducible NLL for each series, dashed beyond its runs."


@dataclass(frozen=True)
class Downstream:
    """What the scores of some runs show; `forecasts` is the part of `scores` that is beyond the runs."""

    reference: str
    records: list[RunRecord]  # none for runs of a table
    scores: Draft = field(default_factory=Draft)
    forecasts: Draft = field(default_factory=Draft)
    multipliers: list[MultiplierRow] = field(default_factory=list[MultiplierRow])

    def answer(self) -> Answer:
        """The answer of the analysis; points of a table's runs carry their names as text."""
        question = f"Do gains in loss over {self.reference} carry over to downstream scores?"
        answer = self.scores.answer("downstream", question, SECTION)
        if len(self.records) == len(answer.runs):
            return answer
        panels = [
            replace(panel, series=tuple(replace(s, runs=(), texts=s.texts or s.runs) for s in panel.series))
            for panel in answer.panels
        ]
        return replace(answer, runs=(), panels=tuple(panels))


def analyse_downstream(
    runs: Sequence[ScoredRun],
    *,
    reference: str = "vanilla",
    held_out: Sequence[str] = (),
    targets: Sequence[float] = (),
    arms: Sequence[str] = (),
    corpora: Mapping[str, str] | None = None,
) -> Downstream:
    """Ladders, multipliers, residuals and forecasts of downstream scores, from runs that have them.

    `reference` is the arm that multipliers compare with, in every corpus of its own. Runs named by
    `held_out` (beginnings of names) take part in no fit. `targets` are FLOPs to forecast at.
    """
    scored = [run for run in runs if run.scored]
    if not scored:
        raise UsageError(
            f"none of the {len(runs)} runs has scores; `steepen eval RUNS --data … --core …` adds them."
        )
    everything = group_series(scored, arms, corpora)
    base = find_series(everything, reference)[0].arm
    labels = {run.run: one.label for one in everything for run in one.runs}
    scored = [run for run in scored if run.run in labels]
    out = find_runs(scored, held_out)
    held = {one.label: [run for run in out if labels[run.run] == one.label] for one in everything}
    series = [left for one in everything if (left := one.without(out)).runs]
    largest = max(run.flops for one in series for run in one.runs)
    scope = Scope(max([*targets, *(run.flops for run in out), 10 * largest]), targets, held)
    found = Downstream(base, [run.record for run in scored if run.record is not None])
    _compare_series(found, series, scope)
    draft = found.scores
    draft.panels += [*score_ladders.kl_depth_panels(series), *score_ladders.passes_panels(series)]
    draft.method += [
        f"{len(scored)} runs with scores, {len(out)} of them held out of every fit.",
        "Multipliers compare compute at an equal metric, interpolated between runs in log compute.",
        "CORE is forecast task by task: a law of the task's NLL for each series, one sigmoid from NLL to "
        "centred accuracy for all series, and one factor from the mean of the tasks to CORE.",
    ]
    draft.runs += [run.run for run in scored]
    return found


def ladder_scores(series: Sequence[ScoreSeries], reference: str) -> Draft:
    """What the scores of a study's own ladders show; nothing where no run was evaluated."""
    base = next(one for one in series if one.label == reference)
    draft = Draft()
    if any(one.runs.having("nll") or one.runs.having("core22") for one in series):
        rows = _add_multipliers(draft, series, base)
        _add_residuals(draft, series, base, tables=False)
        draft.findings = [
            f"{row.arm}: at equal answer NLL the multiplier over {reference} goes from {row.multiplier:.2f}× "
            f"to {row.multiplier_there:.2f}×."
            for row in rows
            if row.equal == ANSWER_NLL.name
        ]
    tops = [(one.label, deep[-1].kl_depth) for one in series if (deep := one.runs.having("kl_depth"))]
    if tops:
        words = ", ".join(f"{label} {depth:g}" for label, depth in tops)
        draft.findings.append(f"KL effective depth at each ladder's top rung: {words}.")
    draft.panels += [*score_ladders.kl_depth_panels(series), *score_ladders.passes_panels(series)]
    return draft


def _compare_series(found: Downstream, series: Sequence[ScoreSeries], scope: Scope) -> None:
    """Compare the series of each corpus with its reference, and corpora with one another."""
    corpora = grouped(series, lambda one: one.corpus)
    for corpus, own in corpora.items():
        suffix = "" if len(corpora) == 1 else f", {corpus}"
        reference = next((one for one in own if one.arm == found.reference), None)
        if reference is not None:
            _one_corpus(found, own, reference, scope, suffix)
        else:
            missing = f"there is no scored run of {found.reference}{suffix}: nothing to compare with there"
            found.scores.warnings.append(missing)
    if len(corpora) > 1:
        _corpora(found.scores, series, found.reference, scope)


def _one_corpus(
    found: Downstream, series: Sequence[ScoreSeries], reference: ScoreSeries, scope: Scope, suffix: str
) -> None:
    draft = Draft()
    rows = _add_multipliers(draft, series, reference, suffix)
    found.multipliers.extend(rows)
    for one in series:
        own = [row for row in rows if row.arm == one.label]
        words = [f"{row.equal} {row.multiplier:.2f}× → {row.multiplier_there:.2f}×" for row in own]
        draft.findings += [f"{one.label}: compute multiplier at equal {'; '.join(words)}."] if own else []
    _add_residuals(draft, series, reference, suffix)
    forecasts = _forecasts(series, reference, scope, suffix)
    draft.add(forecasts)
    draft.findings += [
        f"At {format_flops(one['flops'])} FLOPs the fitted laws give {one['arm']} a multiplier of "
        f"{one['multiplier']:.2f}× over {reference.label}."
        for one in forecasts.values.get("loss_forecast", {}).get("multipliers", ())
    ]
    found.forecasts.add(forecasts)
    found.scores.add(draft, part=suffix.removeprefix(", ") or "scores")


def _add_multipliers(
    draft: Draft, series: Sequence[ScoreSeries], reference: ScoreSeries, suffix: str = ""
) -> list[MultiplierRow]:
    """Add metrics along the series and multipliers where they are equal; returns the ends of these."""
    found = score_ladders.score_multipliers(series, reference)
    rows = score_ladders.multiplier_rows(found)
    draft.panels += score_ladders.metric_panels(series, suffix)
    draft.panels += score_ladders.multiplier_panels(series, reference, found, suffix)
    draft.tables.append(score_ladders.multiplier_table(rows, reference.label, suffix))
    draft.values["multipliers"] = {
        name: {label: [[m.flops, m.value] for m in own] for label, own in by_series.items()}
        for name, by_series in found.items()
    }
    return rows


def _add_residuals(
    draft: Draft, series: Sequence[ScoreSeries], reference: ScoreSeries, suffix: str = "", tables: bool = True
) -> None:
    """Add what the loss does not explain: answer NLL about one line for all, tasks about the reference's."""
    pooled = score_residuals.pool_answer_nll(series)
    bars = score_residuals.task_bars(series, reference)
    if pooled is not None:
        fit, means = pooled
        draft.panels += score_residuals.pooled_panels(series, fit, suffix)
        lowest = min(means, key=lambda label: means[label])
        draft.findings.append(
            f"Answer NLL follows the loss{suffix}: one line explains {fit.r_squared:.2%} of its "
            f"variance (residual SD {fit.sd:.4f}); {lowest} lies lowest, {means[lowest]:+.4f} on average."
        )
        numbers = {"intercept": fit.intercept, "slope": fit.slope, "sd": fit.sd, "means": means}
        draft.values["pooled"] = numbers
    if bars:
        draft.panels += score_residuals.bar_panels(series, reference, bars, suffix)
        draft.tables += [score_residuals.residual_table(one, suffix) for one in bars if tables]
        draft.values["task_residuals"] = {one.runs: one.means for one in bars}


def _forecasts(series: Sequence[ScoreSeries], reference: ScoreSeries, scope: Scope, suffix: str) -> Draft:
    """Loss, answer NLL and CORE beyond the ladders, of the series whose CORE can be forecast."""
    draft, group = Draft(), FORECASTS + suffix
    core = forecast_core(series, scope.targets)
    chosen = series if core is None else core.series
    if laws := _laws(chosen, LOSS, reference.label):
        ratios = _law_multipliers(laws, reference.label, scope.held)
        misses = _misses(draft, LOSS, scope.held, {label: law.predict for label, law in laws.items()})
        draft.values["loss_forecast"] = {"held_out": misses, "multipliers": ratios}
        draft.panels.append(_loss_panel(chosen, laws, ratios, reference.label, scope, group))
    if laws := _own_laws(chosen, ANSWER_NLL):
        draft.panels.append(_nll_panel(chosen, laws, scope, group))
        predict = {label: law.predict for label, law in laws.items()}
        draft.values["nll_forecast"] = _misses(draft, ANSWER_NLL, scope.held, predict)
    if core is not None:
        _add_core_forecast(draft, core, reference, scope, suffix)
    return draft


def _add_core_forecast(
    draft: Draft, core: Forecast, reference: ScoreSeries, scope: Scope, suffix: str
) -> None:
    draft.panels.append(score_forecasts.core_panel(core, scope, FORECASTS + suffix))
    draft.panels += score_forecasts.sigmoid_panels(core, suffix)
    if reference in core.series:
        draft.tables.append(score_forecasts.crossing_table(core, reference.label, suffix))
        draft.findings += _ratio_sentences(core, reference.label)
    targets, fit = core.at_targets(), core.fit
    predict: dict[str, Callable[[float], Any]] = {
        one.label: lambda x, name=one.label: fit.predict(name, x)[0] for one in core.series
    }
    draft.values["core_forecast"] = {
        "r": fit.r,
        "crossings": core.crossings,
        "held_out": _misses(draft, replace(CORE22, name="CORE"), scope.held, predict),
        "targets": [{"arm": label, "flops": flops, "core": score} for label, flops, score in targets],
    }
    draft.findings += [
        f"{label} at {format_flops(flops)} FLOPs: CORE {score:.4f} forecast."
        for label, flops, score in targets
    ]


def _laws(series: Sequence[ScoreSeries], kind: MetricKind, base: str) -> dict[str, ArmLaw]:
    """Laws by the paper's method, with the irreducible value of `base`; {} if they cannot be fitted."""
    columns = {one.label: one.metric(kind.field) for one in series}
    ladders = {label: make_ladder(label, *own) for label, own in columns.items() if len(own[0]) >= MIN_RUNS}
    if base not in ladders:
        return {}
    try:
        return fit_compute(ladders, AnalysisRequest(base, method="paper", reference_law="free-fit")).arms
    except SteepenError:  # too few or flat: no law, the points stay
        return {}


def _own_laws(series: Sequence[ScoreSeries], kind: MetricKind) -> dict[str, ArmLaw]:
    """Laws each with an irreducible value of its own."""
    return {label: law for one in series for label, law in _laws([one], kind, one.label).items()}


def _law_multipliers(laws: Mapping[str, ArmLaw], base: str, held: Held) -> list[dict[str, Any]]:
    """The fitted multiplier of every series at the compute of its held-out runs."""
    rows = [(label, law, run.flops) for label, law in laws.items() for run in held.get(label, ())]
    return [
        {"arm": label, "flops": x, "multiplier": float(laws[base].compute_for(law.predict(x))) / x}
        for label, law, x in rows
        if label != base
    ]


def _loss_panel(
    series: Sequence[ScoreSeries], laws: Mapping[str, ArmLaw], ratios: Sequence[Mapping[str, Any]], base: str,
    scope: Scope, group: str,
) -> Panel:  # fmt: skip
    """The loss with its laws, and horizontal lines from held-out runs to the compute the reference needs."""
    ends = [1.2 * one["multiplier"] * one["flops"] for one in ratios]
    wide = replace(scope, farthest=max([scope.farthest, *ends]))
    fields = {"group": group, "caption": LOSS_CAPTION}
    panel = score_forecasts.metric_forecast_panel(series, LOSS, laws, wide, **fields)
    saved = [
        line(
            f"{one['multiplier']:.2f}× the compute for {base}",
            (one["flops"], one["multiplier"] * one["flops"]),
            [float(laws[one["arm"]].predict(one["flops"]))] * 2,
            role="control",
        )
        for one in ratios
    ]
    return replace(panel, series=(*panel.series, *saved))


def _nll_panel(series: Sequence[ScoreSeries], laws: Mapping[str, ArmLaw], scope: Scope, group: str) -> Panel:
    fields = {"group": group, "caption": NLL_CAPTION}
    return score_forecasts.metric_forecast_panel(series, ANSWER_NLL, laws, scope, **fields)


def _misses(
    draft: Draft, kind: MetricKind, held: Held, predict: Mapping[str, Callable[[float], Any]]
) -> list[dict[str, Any]]:
    """Held-out runs against the forecast of fits without them."""
    rows: list[dict[str, Any]] = [
        {"arm": label, "run": run.run, "flops": run.flops, "observed": run[kind.field],
         "forecast": float(predict[label](run.flops))}
        for label, runs in held.items()
        for run in runs
        if run[kind.field] is not None and label in predict
    ]  # fmt: skip
    draft.findings += [
        f"{row['arm']}, held out at {format_flops(row['flops'])} FLOPs: {kind.name} {row['observed']:.4f} "
        f"against {row['forecast']:.4f} forecast ({row['observed'] - row['forecast']:+.4f})."
        for row in rows
    ]
    return rows


def _ratio_sentences(core: Forecast, base: str) -> list[str]:
    sentences: list[str] = []
    for label in (one.label for one in core.series if one.label != base):
        ratios = [(score_forecasts.crossing_ratio(core, name, base, label), name) for name in core.crossings]
        words = [f"{ratio:.2f}× for {name}" for ratio, name in ratios if ratio is not None]
        if words:
            span = f"{words[0]} to {words[-1]}"
            sentences.append(f"{base} is forecast to need {span} the compute of {label} to match their CORE.")
    return sentences


def _corpora(draft: Draft, series: Sequence[ScoreSeries], base: str, scope: Scope) -> None:
    """Add gains within each corpus, and arms that several corpora have, corpus against corpus."""
    by_arm = grouped(series, lambda one: one.arm)
    shared = {arm: own for arm, own in by_arm.items() if len({one.corpus for one in own}) > 1}
    draft.panels += _gain_panels(series, base, shared)
    scope = Scope(scope.farthest)
    for arm, own in shared.items():
        group = f"Corpora compared: {arm}"
        if laws := _own_laws(own, LOSS):
            fitted = [one for one in own if one.label in laws]
            panel = score_forecasts.metric_forecast_panel(fitted, LOSS, laws, scope, group=group)
            draft.panels.append(replace(panel, title="validation loss, each on its own corpus"))
        if laws := _own_laws(own, ANSWER_NLL):
            draft.panels.append(_nll_panel(own, laws, scope, group))
        core = forecast_core(own)
        if core is not None and len(core.series) > 1:
            first = core.series[0].label
            draft.panels.append(score_forecasts.core_panel(core, scope, group))
            draft.tables.append(score_forecasts.crossing_table(core, first, f", {arm} by corpus"))
            draft.findings += _ratio_sentences(core, first)
            draft.values[f"corpora of {arm}"] = {"r": core.fit.r, "crossings": core.crossings}


def _gain_panels(
    series: Sequence[ScoreSeries], base: str, shared: Mapping[str, Sequence[ScoreSeries]]
) -> list[Panel]:
    """Multipliers over the reference on the same corpus, of the arms that several corpora have."""
    drawn: dict[str, list[Series]] = {kind.name: [] for kind in METRICS}
    for reference in (one for one in series if one.arm == base):
        own = {one.label: one for one in series if one.corpus == reference.corpus}
        for name, by_series in score_ladders.score_multipliers(list(own.values()), reference).items():
            for label, rows in by_series.items():
                curve = score_ladders.multiplier_curve(label, rows, own[label].curve)
                drawn[name] += curve if own[label].arm in shared else []
    axes = Axis(f"compute of {base} (FLOPs)", "log"), Axis("compute multiplier", "log")
    group, caption = "Multipliers within each corpus", "Both on the same corpus."
    return [
        Panel(f"at equal {name}", *axes, tuple(curves), (("y", 1.0, base),), caption, group=group)
        for name, curves in drawn.items()
        if curves
    ]
