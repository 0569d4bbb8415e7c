"""Exported models give steepen's logits and tokens in a process that cannot import steepen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from steepen.data import Tokenizer
from steepen.errors import SteepenError, UsageError
from steepen.evaluation.load import LoadedRun, load
from steepen.inference.decoding import Sampling, continue_tokens
from steepen.inference.export import export
from steepen.inference.hf_tokenizer import from_hugging_face, hugging_face_tokenizer
from steepen.inference.import_model import import_model
from steepen.model.arms import ARMS
from steepen.requests.app import main

SCRIPT = Path(__file__).with_name("load_exported.py")
TOKENS = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(2))
PROMPTS = [[2, 6], [1, 2, 3, 4, 5, 6, 7, 8]]  # padded to one length in a batch
TEXTS = ["the loss falls", "  a law\n\nover  depth ", "naïve 漢字 <|endoftext| >", "2,048 tokens' scale!"]
OPTIONS: dict[str, dict[str, Any]] = {  # arms with other model options
    "loop-2": {"first_pass": "boundary", "softcap": 15.0, "rope_table": "bf16", "padded_softmax": True},
    "untied-2": {"rope_base": 500.0, "qk_scale": 1.2, "norm_eps": 1e-5, "residual_stream": "fp32"},
}
# Arms that generate 64 tokens, which takes a second each; `log.md` has the other arms.
GENERATED = ("vanilla", "loop-2", "untied-grow", "random-loop-grow", "vanilla+kv_heads=1+window=5")
BLOCKS = [
    "vanilla+kv_heads=1+window=5",
    "loop-2+experts=4+shared_experts=1+kv_heads=3",
    "vanilla+experts=3+active_experts=1+balance=none",
    "vanilla+parallel=true+activation=relu2",
    "loop-2+streams=2",
    "vanilla+parallel=true+streams=3",
    "untied-2+blocks=0-all@0.4+context=0.5-1@0.6+experts=1-4@0.4",  # the last network
]
CASES = [*sorted(ARMS), *BLOCKS, *(f"{arm} with options" for arm in OPTIONS)]


@pytest.fixture(scope="module")
def exported(
    random_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[LoadedRun, Path]]:
    """Every arm with random weights: the run and its export."""
    folder = tmp_path_factory.mktemp("exported")
    found: dict[str, tuple[LoadedRun, Path]] = {}
    for case in CASES:
        arm, _, other = case.partition(" with ")
        run = random_run(arm, **(OPTIONS[arm] if other else {}))
        out = export(run, folder / case.replace(" ", "-"))
        found[case] = load(run, device="cpu"), out
    return found


@pytest.fixture(scope="module")
def computed(
    exported: dict[str, tuple[LoadedRun, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    """What transformers computes with the exports, in one fresh process."""
    pytest.importorskip("transformers", reason="transformers is not installed (pip install 'steepen[hf]')")
    folder = tmp_path_factory.mktemp("computed")
    requests: list[dict[str, Any]] = []
    for case, (_, path) in exported.items():
        request: dict[str, Any] = {"name": case, "folder": str(path), "tokens": TOKENS.tolist()}
        if case in GENERATED:
            request["prompts"] = PROMPTS
        if case == "loop-2":
            request |= {"passes": 5, "texts": TEXTS, "save": str(folder / "saved"), "without cache": True}
        if case == "untied-2":
            request["passes"] = 1
        requests.append(request)
    (folder / "requests.json").write_text(json.dumps(requests))
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, str(SCRIPT), str(folder / "requests.json"), str(folder / "out.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        **load_file(folder / "out.safetensors"),
        "saved": torch.tensor(list(str(folder / "saved").encode())),
    }


def double(run: LoadedRun) -> LoadedRun:
    """The run with its network in fp64, with an exact RoPE table."""
    network = load(run.checkpoint, device="cpu").network.double()
    network.reset_rotary()
    return replace(run, network=network)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_equal_without_steepen(
    case: str, exported: dict[str, tuple[LoadedRun, Path]], computed: dict[str, Tensor]
) -> None:
    run, _ = exported[case]
    expected = run.network(TOKENS, passes=run.passes)
    torch.testing.assert_close(computed[f"{case}/float32"], expected, rtol=0, atol=1e-5)
    exact = double(run).network(TOKENS, passes=run.passes)
    for name in ("float64", "cached"):
        torch.testing.assert_close(computed[f"{case}/{name}"], exact, rtol=0, atol=1e-12)
    executed = run.spec.shape.allocation.executed(run.passes)
    assert computed[f"{case}/layers"].tolist() == [executed, executed]


@pytest.mark.parametrize(("case", "passes"), [("loop-2", 5), ("untied-2", 1)])
@torch.no_grad()
def test_passes_can_be_changed_when_loading(
    case: str, passes: int, exported: dict[str, tuple[LoadedRun, Path]], computed: dict[str, Tensor]
) -> None:
    exact = double(exported[case][0]).network(TOKENS, passes=passes)
    torch.testing.assert_close(computed[f"{case}/other passes"], exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", GENERATED)
@torch.no_grad()
def test_greedy_tokens_are_equal_with_and_without_cache_and_padding(
    case: str, exported: dict[str, tuple[LoadedRun, Path]], computed: dict[str, Tensor]
) -> None:
    run = double(exported[case][0])
    batch = continue_tokens(run.network, PROMPTS, 64, Sampling(temperature=0), passes=run.passes)
    for number, (prompt, found) in enumerate(zip(PROMPTS, batch, strict=True)):
        # The most probable tokens of the whole text are what generation without a cache chooses.
        logits = run.network(torch.tensor([prompt + found.tokens[:-1]]), passes=run.passes)
        assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == found.tokens
        assert len(found.tokens) == 64
        assert computed[f"{case}/greedy"][number].tolist() == found.tokens
        assert computed[f"{case}/uncached {number}"].tolist() == found.tokens
    if case == "loop-2":
        assert torch.equal(computed["loop-2/greedy without cache"], computed["loop-2/greedy"])


@torch.no_grad()
def test_the_loss_and_training_with_transformers(
    exported: dict[str, tuple[LoadedRun, Path]], computed: dict[str, Tensor]
) -> None:
    network = double(exported["loop-2"][0]).network
    expected = network(TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous())
    assert computed["loop-2/loss"].item() == pytest.approx(expected.item(), abs=1e-5)
    losses = computed["loop-2/trained"].tolist()
    if not losses:
        pytest.skip("accelerate is not installed, which Trainer needs")
    assert losses[0] == pytest.approx(expected.item(), abs=1e-3) and losses[-1] < losses[0] - 0.5


def test_the_exported_tokenizer_gives_the_same_ids(
    exported: dict[str, tuple[LoadedRun, Path]], computed: dict[str, Tensor]
) -> None:
    tokenizer = exported["loop-2"][0].tokenizer
    assert tokenizer is not None
    for number, text in enumerate(TEXTS):
        assert computed[f"loop-2/text {number}"].tolist() == [tokenizer.end_of_text, *tokenizer.encode(text)]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_export_is_imported_as_the_same_run(
    case: str, exported: dict[str, tuple[LoadedRun, Path]], tmp_path: Path
) -> None:
    run, folder = exported[case]
    imported = import_model(folder, tmp_path)
    assert imported.path == tmp_path / run.spec.hash and not imported.notes
    again = load(imported.path, device="cpu")
    assert again.spec == run.spec and again.passes == run.passes
    assert again.tokenizer.identity == run.tokenizer.identity
    for name, value in run.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[name], value)


def test_a_model_saved_by_transformers_is_imported(
    exported: dict[str, tuple[LoadedRun, Path]], computed: dict[str, Tensor], tmp_path: Path
) -> None:
    run, folder = exported["loop-2"]
    saved = Path(shutil.copytree(bytes(computed["saved"].tolist()).decode(), tmp_path / "saved"))
    shutil.copy(folder / "tokenizer.json", saved)
    again = load(import_model(saved, tmp_path).path, device="cpu")
    assert torch.equal(again.network(TOKENS), run.network(TOKENS))


def test_changed_weights_lose_the_record(trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = export(trained, tmp_path / "hf")
    again = load(import_model(folder, tmp_path / "same").path, device="cpu")
    assert again.record == load(trained, device="cpu").record is not None
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    imported = import_model(folder, tmp_path / "changed")
    assert "have changed since the export" in imported.notes[0]
    assert load(imported.path, device="cpu").record is None


def test_the_model_card_states_the_record(trained: Path, tmp_path: Path) -> None:
    folder = export(trained, tmp_path / "hf", data_license="CC-BY 4.0")
    card = (folder / "README.md").read_text()
    record = load(trained, device="cpu").record
    assert record is not None
    for text in (f"{record.validation_loss:.4f}", record.run, "Untied-Grow", "CC-BY 4.0", "core passes | 4"):
        assert text in card


def test_safetensors_export_and_its_import(trained: Path, tmp_path: Path) -> None:
    assert main(["export", str(trained), str(tmp_path / "out"), "--to", "safetensors"]) == 0
    described = json.loads((tmp_path / "out" / "steepen.json").read_text())
    assert described["network"]["passes"] == 4 and described["network"]["stored_cores"] == 4
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        assert "cores.3.0.qkv" in tensors.keys()  # noqa: SIM118
    assert main(["import", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]) == 0
    first, second = load(trained, device="cpu"), load(tmp_path / "runs" / trained.name, device="cpu")
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True)
    )


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no spec": lambda told: told.pop("spec"),
    "a step that is text": lambda told: told.update(step="last"),
    "absurd passes": lambda told: told.update(stored_passes=10**9),
    "a negative step": lambda told: told.update(step=-5),
    "an incomplete tokenizer": lambda told: told.update(tokenizer={"name": "bpe:300"}),
    "a tokenizer with another pattern": lambda told: told["tokenizer"].update(pattern="(a+)+$"),
    "another run's record": lambda told: told["spec"].update(seed=7),
}


@pytest.mark.parametrize("how", WRONG)
def test_altered_description_is_rejected(
    how: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(trained, tmp_path / "out", "safetensors")
    told = json.loads((folder / "steepen.json").read_text())
    WRONG[how](told)
    (folder / "steepen.json").write_text(json.dumps(told))
    assert main(["import", str(folder), "--runs", str(tmp_path / "runs")]) in (1, 2)
    assert "internal error" not in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_gpt2_tokenizer_has_the_same_ids_in_both_formats(tmp_path: Path) -> None:
    gpt2 = Tokenizer.gpt2()
    made = hugging_face_tokenizer(gpt2)
    for text in [*TEXTS, "I'll don't  \t\n x" * 3, "größer 😀 1234567 ...!!", "def f(x):\n    return x"]:
        assert made.encode(text, add_special_tokens=False).ids == gpt2.encode(text)
        assert made.decode(made.encode(text).ids) == text
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    described = {"name": "gpt2", "pattern": gpt2.pattern, "sha256": gpt2.identity}
    assert from_hugging_face(tmp_path / "tokenizer.json", described).tokens == gpt2.tokens
    with pytest.raises(SteepenError, match="is not the tokenizer"):
        from_hugging_face(tmp_path / "tokenizer.json", {**described, "name": "other"})


def test_bad_requests_are_rejected_in_one_sentence(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use hf or safetensors"):
        export(trained, tmp_path / "out", "onnx")
    with pytest.raises(UsageError, match="exists; give a folder"):
        export(trained, tmp_path)
    run = load(trained, device="cpu")
    arm = replace(run.spec.arm, block="my_blocks:Block")
    custom = replace(run, checkpoint=replace(run.checkpoint, spec=replace(run.spec, arm=arm)))
    with pytest.raises(UsageError, match=r"custom code \(my_blocks:Block\)"):
        export(custom, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_damaged_or_foreign_folder_is_not_imported(trained: Path, tmp_path: Path) -> None:
    folder = export(trained, tmp_path / "hf")
    with pytest.raises(UsageError, match="does not exist"):
        import_model(tmp_path / "nothing")
    with pytest.raises(UsageError, match="cannot be imported"):
        import_model(tmp_path)
    imported = import_model(folder, tmp_path / "runs")
    with pytest.raises(UsageError, match="exists; give another directory"):
        import_model(folder, tmp_path / "runs")
    assert imported.path.is_dir()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(SteepenError, match="cannot be read"):
        import_model(folder, tmp_path / "other")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="has no safetensors file"):
        import_model(folder, tmp_path / "other")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match="was not exported by steepen"):
        import_model(folder, tmp_path / "other")
    (folder / "config.json").write_text("{")
    with pytest.raises(SteepenError, match="cannot be read"):
        import_model(folder, tmp_path / "other")
