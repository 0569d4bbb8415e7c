"""CORE on a GPU: scores equal the reference scorer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from steepen.data import Tokenizer
from steepen.evaluation.core.bundle import Bundle
from steepen.evaluation.core.run_suite import CoreOptions, evaluate_core
from steepen.model.network import Network

from .core_reference import score_one

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_gpu_scores_equal_the_reference(
    dtype: torch.dtype,
    tolerance: float,
    make_network: Callable[..., Network],
    tokenizer: Tokenizer,
    bundle: Bundle,
    tmp_path: Path,
) -> None:
    network = make_network("loop-2").to("cuda").to(dtype)
    evaluate_core(network, tokenizer, bundle, CoreOptions((0,)), folder=tmp_path)
    for task in bundle.tasks:
        for line in (tmp_path / f"{task.label}.seed0.jsonl").read_text().splitlines():
            fast = json.loads(line)
            slow = score_one(network, tokenizer, task, fast["index"])
            pairs = zip(fast["losses"] or [fast["nll"]], slow.losses or (slow.nll,), strict=True)
            for a, b in pairs:
                assert (a is None and b is None) or a == pytest.approx(b, abs=tolerance)
