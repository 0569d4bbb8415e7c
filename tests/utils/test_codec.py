"""Dataclasses to JSON values and back: errors name the path; records survive a round trip."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from steepen.errors import UsageError
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec

Spec = Callable[..., RunSpec]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda r: r.update(validation_scores=[{"step": "1"}]),
            "record.validation_scores[0].step = '1' is not valid",
        ),
        (
            lambda r: r["validation_scores"][0].pop("loss"),
            "record.validation_scores[0] lacks the field 'loss'",
        ),
        (lambda r: r["spec"]["shape"].update(width=1.5), "record.spec.shape.width = 1.5 is not valid"),
        (lambda r: r["spec"]["arm"].update(tyed=1), "record.spec.arm has no field 'tyed'"),
        (lambda r: r.update(mfu="fast"), "record.mfu = 'fast' is not valid: it must be a number"),
        (lambda r: r.update(parameters=3), "record.parameters = 3 is not valid: it must be an object"),
    ],
)
def test_the_error_for_a_wrong_value_names_its_path(
    spoil: Callable[[Any], Any], says: str, spec: Spec, trainer: ModuleType
) -> None:
    value = trainer.record_of(spec()).to_dict()
    spoil(value)
    with pytest.raises(UsageError) as error:
        RunRecord.from_dict(value)
    assert says in str(error.value)


def test_a_record_survives_a_round_trip(spec: Spec, trainer: ModuleType) -> None:
    record = replace(
        trainer.record_of(spec(arm="untied-grow")), evaluation={"core": {"score": 0.1, "tasks": {}}}
    )
    assert RunRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
