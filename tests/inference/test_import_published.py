"""Checkpoints in the layout of the paper's authors compute what their network computes, and hold no code."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import steepen
from steepen.data.prepare import PrepareRequest, prepare
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.load import load
from steepen.inference.import_model import import_model
from steepen.model.shape import BlockAllocation
from steepen.requests.app import main
from steepen.runs.store import RunStore

from ..model.authors_network import Block, Operator
from ..model.authors_network import logits as authors_logits

REPOSITORY = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    """A script of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL = load_tool("import_authors_checkpoint")
WIDTH, HEADS, HIDDEN, ROWS, REAL = 16, 2, 256, 50_304, 50_257
ALPHA = 0.70710678


def result(**changes: Any) -> dict[str, Any]:
    """The configuration part of a result.json."""
    return {
        "n_layer": 6,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "depth_scale_mode": "loop",
        "core_repetitions": 2,
        "core_layer_count": 2,
        "resolved_core_layer_count": 2,
        "resolved_prelude_layer_count": 2,
        "resolved_coda_layer_count": 2,
        "recurrence_rmsnorm": "recurrence_only",
        "recurrence_emb_alpha": ALPHA,
        "decoder_inject": True,
        "core_repetition_schedule": "none",
        "output_multiplier": 0.5,
        "residual_branch_multiplier": 0.25,
        "effective_matrix_lr": 0.04,
        "effective_embedding_lr": 0.0128,
        "effective_unembedding_lr": 0.004,
        "matrix_weight_decay": 0.05,
        "adam_betas": [0.8, 0.95],
        "total_batch_size": 524_288,
        "completed_train_steps": 2355,
        "seed": 42,
        "val_loss": 3.2109375,
        "final_train_loss": 3.25,
        "data_dir": "/data/fineweb",
        **changes,
    }


GROWN = {
    "core_repetition_schedule": "late",
    "core_repetition_low": 2,
    "core_repetition_crossover_fraction": 0.6,
}
PLAIN = {
    "core_repetitions": 1,
    "recurrence_rmsnorm": "none",
    "recurrence_emb_alpha": 0.0,
    "decoder_inject": False,
}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {"depth_scale_mode": "none", **PLAIN},
    "operator-1": {"core_repetitions": 1},
    "loop-2": {},
    "loop-2-no-coda-injection": {"decoder_inject": False},
    "loop-2-norm-only": {"recurrence_emb_alpha": 0.0, "decoder_inject": False},
    "loop-2-inject-only": {"recurrence_rmsnorm": "none"},
    "untied-2": {"depth_scale_mode": "dep"},
    "loop-grow": {"core_repetitions": 4, **GROWN},
    "untied-grow": {"depth_scale_mode": "dep", "core_repetitions": 4, **GROWN},
}


def write_checkpoint(folder: Path, config: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """Write checkpoints/final.pt and result.json with random weights."""
    untied = config["depth_scale_mode"] == "dep"
    blocks = 4 + 2 * config["core_repetitions"] if untied else 6
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 2 * shape[-1] ** -0.5

    state = {"transformer.wte.weight": draw(ROWS, WIDTH), "lm_head.weight": draw(ROWS, WIDTH)}
    for number in range(blocks):
        prefix = f"transformer.h.{number}"
        state |= {
            f"{prefix}.attn.{name}.weight": draw(WIDTH, WIDTH) for name in ("c_q", "c_k", "c_v", "c_proj")
        }
        state |= {f"{prefix}.mlp.{name}.weight": draw(HIDDEN, WIDTH) for name in ("c_gate", "c_fc")}
        state[f"{prefix}.mlp.c_proj.weight"] = draw(WIDTH, HIDDEN)
    file = folder / "checkpoints" / "final.pt"
    file.parent.mkdir(parents=True)
    torch.save({"model": state, "args": {"n_layer": 6, "seed": 42}, "step": 2355, "head_dim": 8}, file)
    (folder / "result.json").write_text(json.dumps(config))
    return file, state


def expected_logits(state: dict[str, Tensor], config: dict[str, Any], tokens: Tensor) -> Tensor:
    """Logits by the independent description of the authors' network."""
    names = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_gate", "mlp.c_fc", "mlp.c_proj")

    def block(number: int) -> Block:
        return Block(*(state[f"transformer.h.{number}.{name}.weight"].double() for name in names))

    passes, mode = config["core_repetitions"], config["depth_scale_mode"]
    cores = [[2 + 2 * (index if mode == "dep" else 0) + place for place in (0, 1)] for index in range(passes)]
    coda = max(number for core in cores for number in core) + 1
    operator = None
    if mode != "none":
        operator = Operator(
            config["recurrence_emb_alpha"],
            norm=config["recurrence_rmsnorm"] != "none",
            inject=config["recurrence_emb_alpha"] != 0,
            inject_before_coda=config["decoder_inject"],
        )
    return authors_logits(
        tokens,
        state["transformer.wte.weight"].double(),
        [block(0), block(1)],
        [[block(number) for number in core] for core in cores],
        [block(coda), block(coda + 1)],
        state["lm_head.weight"].double(),
        heads=HEADS,
        residual=config["residual_branch_multiplier"],
        output=config["output_multiplier"],
        operator=operator,
        real_vocabulary=REAL,
    )


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_an_imported_checkpoint_computes_the_authors_logits(name: str, tmp_path: Path) -> None:
    config = result(**CASES[name])
    _, state = write_checkpoint(tmp_path / "published", config)
    run = load(
        TOOL.import_checkpoint(tmp_path / "published", tmp_path / "runs"), device="cpu", precision="fp32"
    )
    assert (run.spec.arm.name, run.passes) == (name, config["core_repetitions"])
    network = run.network.double()
    network.options = replace(network.options, rope_table="fp32")  # the description has exact angles
    network.reset_rotary()
    tokens = torch.randint(0, REAL, (2, 9), generator=torch.Generator().manual_seed(3))
    found = network(tokens, passes=run.passes)
    assert found.shape[-1] == REAL
    torch.testing.assert_close(found, expected_logits(state, config, tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("layers", "arm", "passes"), [(8, "deep-vanilla", 2), (7, "published-vanilla", 1)])
@torch.no_grad()
def test_other_plain_stacks(layers: int, arm: str, passes: int, tmp_path: Path) -> None:
    assert BlockAllocation.even(6).executed(2) == 8
    config = result(depth_scale_mode="none", **PLAIN, n_embd=768, n_head=6, n_layer=layers)
    given = {
        "transformer.wte.weight": torch.zeros(ROWS, 1),
        "transformer.h.0.mlp.c_fc.weight": torch.zeros(2048, 1),
    }
    found, shape, schedule = TOOL._network(config, given, tmp_path)
    assert (found.name, schedule.final) == (arm, passes)
    assert shape.allocation.executed(passes) == layers


def test_the_run_has_the_published_record_and_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = write_checkpoint(tmp_path / "published", result(sequence_len=64))
    assert TOOL.main([str(file), "--runs", str(tmp_path / "runs")]) == 0
    path = Path(capsys.readouterr().out.strip())
    run = load(path, device="cpu", precision="fp32")
    assert run.record is not None and run.record.validation_loss == 3.2109375
    assert run.spec.steps == 2355 and run.record.tokens == 2355 * 524_288
    hyper = run.spec.hyperparameters
    assert hyper.embedding_lr_multiplier == pytest.approx(0.32) and hyper.residual_multiplier == 0.25
    assert [row.status for row in RunStore(tmp_path / "runs").rows()] == ["finished"]
    texts = steepen.generate(run, ["The law", "of"], max_tokens=3, passes=3)
    assert len(texts) == 2
    (tmp_path / "text.txt").write_text(
        "<|endoftext|>".join(f"the {n}th law of the loss falls" for n in range(99))
    )
    data = tmp_path / "data"
    prepare(PrepareRequest((str(tmp_path / "text.txt"),), tokenizer="gpt2", val_tokens=200), data)
    words = [
        "eval",
        str(path),
        "--data",
        str(data),
        "--kl-depth",
        "--kl-depth-tokens",
        "64",
        "--passes",
        "1-3",
    ]
    assert main([*words, "--validation-tokens", "64"]) == 0
    shown = capsys.readouterr().out
    published, _ = load_tool("published_scores").compare(run.record, None, None)
    assert published["arm"] == "loop-2" and published["corpus"] == "fineweb"
    assert published["validation_loss"] == 3.2109375
    assert "KL effective depth" in shown and "loss at k passes minus loss at 2: 1:" in shown
    assert main(["export", str(path), str(tmp_path / "hf")]) == 0
    again = import_model(tmp_path / "hf", tmp_path / "again")
    assert load(again.path, device="cpu").spec == run.spec


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import pathlib; pathlib.Path('executed').touch()",))


def test_a_file_with_code_is_rejected_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"transformer.wte.weight": _Code()}}, "final.pt")
    Path("result.json").write_text(json.dumps(result()))
    with pytest.raises(SteepenError, match="contains code or objects other than tensors and was not loaded"):
        TOOL.import_checkpoint(Path("final.pt"), Path("runs"))
    assert not Path("executed").exists() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"depth_scale_mode": "spiral"}, "depth_scale_mode 'spiral'"),
        ({"recurrence_rmsnorm": "prelude_and_recurrence"}, "a norm after the prelude"),
        ({"core_repetitions": 1.5}, "1.5 core passes"),
        ({"window_pattern": "SL"}, "attention windows"),
        (
            {"resolved_core_layer_count": 1, "resolved_coda_layer_count": 3, "n_layer": 7},
            "has no transformer",
        ),
        ({"n_layer": "six"}, "is not the configuration of this model"),
        ({"n_head": 0}, "is not the configuration of this model|heads"),
        ({"core_repetitions": 1e300}, "passes"),
        ({"adam_betas": [0.8]}, "is not the configuration of this model"),
        ({"output_multiplier": [1]}, "is not the configuration of this model"),
    ],
)
def test_an_unknown_configuration_is_rejected(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    file, _ = write_checkpoint(tmp_path, result())
    (tmp_path / "result.json").write_text(json.dumps(result(**changes)))
    with pytest.raises(SteepenError, match=says):
        TOOL.import_checkpoint(file, tmp_path / "runs")


def test_damaged_and_incomplete_files_are_rejected(tmp_path: Path) -> None:
    file, _ = write_checkpoint(tmp_path / "a", result())
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SteepenError, match="cannot be read"):
        TOOL.import_checkpoint(tmp_path / "a", tmp_path / "runs")
    torch.save({"weights": torch.zeros(2)}, file)
    with pytest.raises(UsageError, match="is not a checkpoint of the paper's authors"):
        TOOL.import_checkpoint(tmp_path / "a", tmp_path / "runs")
    (tmp_path / "a" / "result.json").write_text('{"n_layer": 6}')
    with pytest.raises(UsageError, match="lacks n_head"):
        TOOL.import_checkpoint(tmp_path / "a", tmp_path / "runs")
    (tmp_path / "a" / "result.json").unlink()
    with pytest.raises(UsageError, match=r"has no result\.json"):
        TOOL.import_checkpoint(tmp_path / "a", tmp_path / "runs")
