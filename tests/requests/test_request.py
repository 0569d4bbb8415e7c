"""A request is declared once: its checks, text, JSON, Python function and command follow from its fields."""

from __future__ import annotations

import inspect
import json
import shlex
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import pytest
import typer

import steepen
from steepen.errors import UsageError
from steepen.requests.app import command_function, main, root_command
from steepen.requests.fit import Fit
from steepen.requests.power import Power
from steepen.requests.registry import VERBS, load
from steepen.requests.request import Argument, Option, Request, decode, fields_of, function
from steepen.utils.codec import Range
from steepen.utils.values import Duration, Integers, Numbers, Pairs, Tokens, Words

REQUESTS = {
    name: kind for name, verb in VERBS.items() if verb.target and isinstance(kind := load(name), type)
}


@dataclass(frozen=True)
class Brew(Request[str]):
    """Brew tea.

    With `strength` 0 it is water.
    """

    leaves: Annotated[str, Argument("What to brew.")]
    _: KW_ONLY
    strength: Annotated[int, Range(0, 9), Option("How strong.")] = 3
    kind: Annotated[Literal["green", "black"], Option("Green or black.")] = "black"
    water: Annotated[Tokens | None, Option("Drops of water; see `strength`.", "Water")] = None
    steep: Annotated[Duration | None, Option("How long.")] = None
    cups: Annotated[Integers | None, Option("Which cups.")] = None
    guests: Annotated[Words | None, Option("Who drinks.")] = None
    sizes: Annotated[Numbers | None, Option("Sizes.")] = None
    labels: Annotated[Pairs | None, Option("Labels.")] = None
    add: Annotated[tuple[str, ...], Option("What to add. Repeatable.")] = ()
    pot: Annotated[int | Literal["auto"], Option("Pot.", flag="--vessel -p")] = "auto"
    out: Annotated[Path | None, Option("File.")] = None
    warm: Annotated[bool, Option("Warm the pot.")] = True
    milk: Annotated[bool, Option("Add milk.")] = False

    def check(self) -> None:
        if self.milk and self.kind == "green":
            raise UsageError("`milk` does not go with `kind` green.")

    def run(self) -> str:
        return f"{self.leaves} {self.strength}"


def run_command(*words: str) -> dict[str, Any]:
    """The fields that a command line gives the request."""
    seen: list[Brew] = []

    @dataclass(frozen=True)
    class Seen(Brew):
        def run_in_terminal(self, as_json: bool = False) -> None:
            seen.append(self)

    app = typer.Typer(add_completion=False)
    app.command()(command_function(Seen))
    app(list(words), standalone_mode=False)
    return {field.name: getattr(seen[0], field.name) for field in fields_of(Brew)}


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"water": "100M"}, 100_000_000),
        ({"water": "2.5k"}, 2500),
        ({"water": 2e9}, 2_000_000_000),
        ({"water": "1_000"}, 1000),
        ({"water": "250,000"}, 250_000),
        ({"steep": "2h"}, 7200.0),
        ({"steep": "90s"}, 90.0),
        ({"cups": "2,3,5"}, (2, 3, 5)),
        ({"cups": "6-10:2,0-2,1"}, (0, 1, 2, 6, 8, 10)),
        ({"cups": [4, 5]}, (4, 5)),
        ({"guests": "a, b"}, ("a", "b")),
        ({"sizes": "6,12.5"}, (6, 12.5)),
        ({"labels": "a=b,c=d"}, {"a": "b", "c": "d"}),
        ({"labels": {"a": "b"}}, {"a": "b"}),
        ({"add": "lemon"}, ("lemon",)),
        ({"add": ["lemon", "mint"]}, ("lemon", "mint")),
        ({"add": {"lemon": 2, "mint": "fresh"}}, ("lemon=2", "mint=fresh")),
        ({"pot": "auto"}, "auto"),
        ({"pot": "3"}, 3),
        ({"out": "a/b"}, Path("a/b")),
    ],
)
def test_text_and_python_values_mean_the_same(given: dict[str, Any], value: Any) -> None:
    (name,) = given
    request = Brew("tea", **given)
    assert getattr(request, name) == value
    text = given[name]
    if isinstance(text, str):
        flag = next(field for field in fields_of(Brew) if field.name == name).flags[0]
        assert run_command("tea", flag, text)[name] == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strength": 12}, "`strength` = 12 is not valid: it must be a whole number from 0 to 9."),
        ({"strength": "x"}, "`strength` = 'x' is not valid: it must be a whole number."),
        ({"strength": 2.5}, "`strength` = 2.5 is not valid: it must be a whole number."),
        ({"strength": None}, "`strength` = None is not valid: it must be a whole number."),
        ({"kind": "red"}, "`kind` = 'red' is not valid: it must be one of 'green', 'black'."),
        ({"water": "6,12"}, "`water` = '6,12' is not valid: it must be a whole number."),
        ({"water": 0}, "it must be a whole number from 1 to 1,000,000,000,000,000."),
        ({"steep": "2"}, "`steep` = '2' is not valid: it must be a time like 90s, 30m, 2h or 1d."),
        ({"cups": "3-1"}, "it must be a list like 2,3,5, a range like 0-2"),
        ({"cups": "0-999999999"}, "it must be a list like 2,3,5, a range like 0-2"),
        ({"labels": "ab"}, "`labels` = 'ab' is not valid: it must be pairs with commas"),
        ({"add": [1]}, "`add`[0] = 1 is not valid: it must be text."),
        ({"pot": "big"}, "`pot` = 'big' is not valid: it must be a whole number or one of 'auto'."),
        ({"milk": True, "kind": "green"}, "`milk` does not go with `kind` green."),
    ],
)
def test_wrong_value_is_rejected_with_field_value_and_what_is_accepted(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Brew("tea", **given)
    assert message in str(caught.value)


def test_command_line_gives_flags_lists_and_short_names() -> None:
    found = run_command("tea", "--no-warm", "--milk", "--add", "lemon", "--add", "mint", "-p", "2")
    assert (found["warm"], found["milk"], found["add"], found["pot"]) == (False, True, ("lemon", "mint"), 2)
    assert found["strength"] == 3, "defaults are the request's own"


def test_errors_and_help_name_options_on_the_command_line() -> None:
    with pytest.raises(UsageError, match=r"^--milk does not go with --kind green\.$"):
        run_command("tea", "--milk", "--kind", "green")
    with pytest.raises(UsageError, match=r"^--vessel 'big' is not valid"):
        run_command("tea", "--vessel", "big")
    assert "With --strength 0 it is water." in (command_function(Brew).__doc__ or "")


def test_function_has_the_signature_and_the_help_of_the_fields() -> None:
    brew = function(Brew)
    assert brew("tea", strength="4") == "tea 4"  # pyright: ignore[reportArgumentType]
    text = str(inspect.signature(brew))
    assert text.startswith('(leaves: str, *, strength: int = 3, kind: "green" | "black" = \'black\'')
    assert all(field.option.help in " ".join((brew.__doc__ or "").split()) for field in fields_of(Brew))
    assert brew.__name__ == "brew"
    wrong: dict[str, Any] = {"strenght": 1}
    with pytest.raises(UsageError, match="brew has no setting 'strenght'; the nearest are strength"):
        brew("tea", **wrong)


def test_functions_of_the_package_can_be_pickled_by_name() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(steepen.fit)) is steepen.fit


@pytest.mark.parametrize(
    "request_",
    [
        Fit("runs.csv", reference="vanilla", hold_out=(1e20, "grow:1e21"), columns={"loss": "val"}),
        Fit({"arm": ["a"], "flops": [1.0], "loss": [3.0]}, register=Path("f.jsonl"), budget=1e22),
        Power(0.01, span=2.0, search=False),
    ],
)
def test_request_survives_json(request_: Request[Any]) -> None:
    text = json.dumps(request_.to_dict())
    assert decode(json.loads(text)) == request_


def test_what_json_cannot_hold_is_said() -> None:
    with pytest.raises(UsageError, match="`table` is a DataFrame in memory, which JSON cannot hold; write"):
        Fit(pd.DataFrame({"arm": ["a"]})).to_dict()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"request": "fitt"}, "there is no verb 'fitt'; the nearest are fit"),
        ({}, "there is no verb ''"),
        ({"request": "fit"}, "a request to fit lacks the field 'table'"),
        ({"request": "fit", "table": "x", "refrence": "y"}, "no field 'refrence'; the nearest are reference"),
        ({"request": "fit", "table": "x", "level": 3}, "`level` = 3 is not valid: it must be a number from"),
    ],
)
def test_json_that_is_no_request_is_rejected(value: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        decode(value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_explains_its_fields_and_has_examples_that_parse(name: str) -> None:
    kind = REQUESTS[name]
    assert kind.__doc__ and kind.examples
    for field in fields_of(kind):
        assert field.option.help.endswith("."), field.name
    for example in kind.examples:
        program, *words = shlex.split(example)
        assert (program, " ".join(words)[: len(name)]) == ("steepen", name)
        root = root_command()
        _, command, rest = root.resolve_command(root.make_context("steepen", list(words)), list(words))
        given = command.make_context(name, rest).params
        required = [field.name for field in fields_of(kind) if field.required]
        assert all(given[one] is not None for one in required), example


def test_defaults_equal_those_of_the_settings_that_requests_make() -> None:
    from steepen.laws.analysis import AnalysisRequest
    from steepen.laws.power import LadderPlan

    for kind, settings in ((Fit, AnalysisRequest), (Power, LadderPlan)):
        ours = {field.name: field.default for field in fields_of(kind)}
        theirs = {field.name: field.default for field in fields(settings)}
        shared = (ours.keys() & theirs.keys()) - {"reference", "delta_gamma", "highest"}
        assert len(shared) > 8
        assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_member_of_a_group_is_found_by_both_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--help"]) == 0
    assert "prepare" in capsys.readouterr().out
    assert main(["data", "show", "--help"]) == 0
    assert "steepen data show" in capsys.readouterr().out
    assert main(["data", "sho"]) == 2
    assert "No such command 'sho'" in capsys.readouterr().err
