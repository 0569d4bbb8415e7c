"""The model card of an exported run: what was trained, on how much, and how it scored."""

from __future__ import annotations

from typing import Any

from steepen.evaluation.load import LoadedRun
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
    spec, record, shape = run.spec, run.record, run.spec.shape
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
