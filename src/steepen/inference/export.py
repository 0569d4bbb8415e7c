"""Export a trained network: to a folder for transformers, with a model card, or to plain safetensors."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from steepen.errors import UsageError
from steepen.evaluation.load import LoadedRun, load
from steepen.inference.custom_code import file_stem, source_files
from steepen.inference.hf_tokenizer import TOKENIZER_FILE, hugging_face_tokenizer
from steepen.inference.kv_cache import supports_cache
from steepen.inference.weights import digest, hugging_face_weights, network_weights
from steepen.utils.codec import to_builtins
from steepen.utils.files import UNENCODABLE, follow_umask, new_directory
from steepen.utils.formatting import format_flops

HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [steepen]
---
"""
USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # passes=K for other core passes
tokens = model.generate(**tokenizer("The law of", return_tensors="pt"), max_new_tokens=40)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```
"""


def model_card(run: LoadedRun, data_license: str | None = None) -> str:
    """The card in Markdown, from the run's spec, record and scores."""
    spec, record, shape = run.spec, run.record, run.network.shape
    rows: list[tuple[str, str]] = [
        ("arm", f"{spec.arm.title} (`{spec.arm.name}`): {spec.arm.about or 'a custom arm'}"),
        ("size", f"d{shape.depth}: width {shape.width}, {shape.heads} heads, blocks {shape.allocation}"),
        ("core passes", str(run.passes)),
        ("parameters", f"{sum(p.numel() for p in run.network.parameters()):,}"),
        ("context", f"{shape.context:,} tokens"),
        ("training", f"{run.checkpoint.step:,} of {spec.steps:,} steps of {spec.batch_tokens:,} tokens"),
        ("seed", str(spec.seed)),
        ("data", f"identity `{spec.data.identity}`"),
        ("licence of the data", data_license or "not stated"),
        ("run", f"`{spec.hash}`"),
    ]
    if spec.arm.custom_code:
        names = ", ".join(f"`{name}`" for name in spec.arm.custom_code)
        rows.append(("custom code", f"{names}, copied into this folder; loading the model runs it"))
    if record is not None and run.checkpoint.is_final:
        bits = record.validation_bits_per_byte
        loss = f"{record.validation_loss:.4f}" + ("" if bits is None else f" ({bits:.4f} bits per byte)")
        rows += [("training FLOPs", format_flops(record.flops)), ("validation loss", loss)]
        rows += _scores(record.evaluation)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"{HEADER}\n# {spec.arm.title} d{shape.depth}\n\n{USE}\n| | |\n|---|---|\n{table}\n"


def _scores(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """The scores that `steepen eval` added to the record."""
    rows: list[tuple[str, str]] = []
    core = evaluation.get("core") or {}
    for key, name in (("core22", "CORE (22 tasks)"), ("core17", "CORE (17 tasks)"), ("nll22", "answer NLL")):
        if core.get(key) is not None:
            rows.append((name, f"{core[key]:.4f}"))
    if depth := evaluation.get("kl_depth"):
        rows.append(("KL effective depth", f"{depth['depth']} of {depth['executed']} executed blocks"))
    return rows


FORMATS = ("hf", "safetensors")
EXPORT_FORMAT = "steepen-export-1"
MODELING_FILE = "modeling_steepen.py"
DESCRIPTION_FILE = "steepen.json"  # of a safetensors export
MAX_SHARD_SIZE = "5GB"


def export(
    run: str | Path | LoadedRun,
    out: str | Path,
    to: str = "hf",
    *,
    data_license: str | None = None,
    include_code: bool = False,
) -> Path:
    """Export a run or checkpoint directory to a new folder `out` in the format `to`: hf or safetensors.

    Weights are written in fp32, as trained. `data_license` is stated on the model card. `include_code` is the
    consent to write the source of the arm's custom block and boundaries into the folder.
    """
    if to not in FORMATS:
        raise UsageError(f"`to` = {to!r} is not valid: use {' or '.join(FORMATS)}.")
    out = Path(out)
    if out.exists():
        raise UsageError(f"{out} exists; give a folder that does not.")
    loaded = run if isinstance(run, LoadedRun) else load(run, device="cpu", precision="fp32")
    with new_directory(out) as folder:
        if to == "hf":
            write_hugging_face(loaded, folder, data_license, include_code=include_code)
        else:
            write_safetensors(loaded, folder)
        for file in folder.glob("*.safetensors"):
            follow_umask(file)
    return out


def write_hugging_face(
    run: LoadedRun, folder: Path, data_license: str | None = None, *, include_code: bool = False
) -> None:
    """Write config, modeling code, weights, tokenizer, generation config and model card into a folder."""
    from huggingface_hub import save_torch_state_dict

    arm = run.spec.arm
    if arm.custom_code and not include_code:
        raise UsageError(
            f"the arm {arm.name} has custom code ({', '.join(arm.custom_code)}): with `include_code` its "
            "source is copied into the export; `to` = safetensors needs none."
        )
    tokenizer, weights = run.tokenizer, network_weights(run.network)
    classes = {"Config": "SteepenConfig", "Model": "SteepenModel", "ModelForCausalLM": "SteepenForCausalLM"}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.end_of_text)
    ends |= {"use_cache": supports_cache(run.network)}
    config = {
        **network_config(run),
        "architectures": ["SteepenForCausalLM"],
        "auto_map": {f"Auto{name}": f"{Path(MODELING_FILE).stem}.{own}" for name, own in classes.items()},
        "model_type": "steepen",
        "dtype": "float32",
        **ends,
        "steepen_run": describe(run, digest(weights)),
    }
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"_from_model_config": False, **ends, "do_sample": False})
    _write_code(arm.custom_code, folder)
    named = hugging_face_weights(weights, custom=":" in arm.block)
    save_torch_state_dict(named, folder, max_shard_size=MAX_SHARD_SIZE)
    (folder / TOKENIZER_FILE).write_text(hugging_face_tokenizer(tokenizer).to_str(), encoding="utf-8")
    special: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.end_text)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.network.shape.context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", described | special)
    _write(folder / "special_tokens_map.json", special)
    (folder / "README.md").write_text(model_card(run, data_license), encoding="utf-8")


def _write_code(custom: tuple[str, ...], folder: Path) -> None:
    """Write the modeling code, and the custom code that it imports."""
    source = resources.files("steepen.inference").joinpath(MODELING_FILE).read_text(encoding="utf-8")
    files = source_files(custom) if custom else {}
    lines: list[str] = []
    for name in sorted(files):  # transformers copies what this file imports, and imports of imports
        lines.append(f"from .{Path(name).stem} import __name__ as _{Path(name).stem}")
    entries: list[str] = []
    for number, name in enumerate(dict.fromkeys(custom)):
        module, _, attribute = name.partition(":")
        first, *rest = attribute.split(".")
        lines.append(f"from .{file_stem(module)} import {first} as _custom_{number}")
        entries.append(f"    {name!r}: {'.'.join([f'_custom_{number}', *rest])},")
    if custom:
        declared = "CUSTOM: dict[str, Any] = {}\n"
        assert declared in source
        lines += ["CUSTOM: dict[str, Any] = {", *entries, "}\n"]
        source = source.replace(declared, "\n".join(lines))
    for name, text in {**files, MODELING_FILE: source}.items():
        (folder / name).write_text(text, encoding="utf-8")


def write_safetensors(run: LoadedRun, folder: Path) -> None:
    """Write the weights by their own names, a JSON file that describes network and run, and the tokenizer."""
    from huggingface_hub import save_torch_state_dict

    weights = network_weights(run.network)
    _write(folder / DESCRIPTION_FILE, {**describe(run, digest(weights)), "network": network_config(run)})
    save_torch_state_dict(weights, folder, max_shard_size=MAX_SHARD_SIZE)
    (folder / TOKENIZER_FILE).write_text(hugging_face_tokenizer(run.tokenizer).to_str(), encoding="utf-8")


def network_config(run: LoadedRun) -> dict[str, Any]:
    """Sizes, boundary operators and multipliers, by the names of `modeling_steepen.SteepenConfig`."""
    network = run.network
    shape, arm, options = network.shape, network.arm, network.options
    block = to_builtins(arm.block_options)
    custom = None
    if ":" in arm.block:
        derived = {"head_dim": shape.head_dim, "token_ids": shape.token_ids}
        given = {"shape": {**to_builtins(shape), **derived}, "options": to_builtins(options)}
        custom = {"name": arm.block, **given, "multipliers": to_builtins(network.multipliers)}
    return {
        "custom_block": custom,
        **{name: value for name, value in block.items() if name != "balance"},
        "choice_bias": arm.block_options.experts is not None and arm.block_options.balance == "bias",
        "vocab_size": network.token_ids,
        "padded_vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "intermediate_size": arm.block_options.mlp_width(shape),
        "max_position_embeddings": shape.context,
        "prelude_blocks": shape.allocation.prelude,
        "core_blocks": shape.allocation.core,
        "coda_blocks": shape.allocation.coda,
        "passes": run.passes,
        "stored_cores": len(network.cores),
        "tied_cores": arm.tied,
        "core_boundary": arm.core_boundary,
        "coda_boundary": arm.coda_boundary,
        "first_pass": options.first_pass,
        "norm_prelude": arm.norm_prelude,
        "residual_multiplier": network.multipliers.residual,
        "output_multiplier": network.multipliers.output,
        "injection_weight": network.multipliers.injection,
        **{name: getattr(options, name) for name in ("norm_eps", "rope_base", "rope_table", "qk_scale")},
        "softcap": options.softcap,
        "residual_stream": options.residual_stream,
    }


def describe(run: LoadedRun, weights: str) -> dict[str, Any]:
    """What `steepen import` needs to make a run again; `weights` is their digest."""
    tokenizer = run.tokenizer
    return {
        "format": EXPORT_FORMAT,
        "run": run.spec.hash,
        "step": run.checkpoint.step,
        "passes": run.passes,
        "stored_passes": run.network.passes,
        "weights_sha256": weights,
        "tokenizer": {
            "name": tokenizer.name,
            "pattern": tokenizer.pattern,
            "sha256": tokenizer.identity,
            **({} if tokenizer.end_id is None else {"end_of_text": tokenizer.end_text}),
        },
        "spec": run.spec.to_dict(),
        "record": None if run.record is None else run.record.to_dict(),
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8", UNENCODABLE)
