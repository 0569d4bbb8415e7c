"""Runs as models of the LM Evaluation Harness (lm-eval), under the name `steepen`.

python -m steepen.inference.lm_eval_model --model steepen --model_args run=runs/HASH --tasks TASK

The module runs lm-eval's own command line after registering the model. The package also declares it as an
entry point of the group `lm_eval.models`, for versions of lm-eval that read entry points (0.4.13 does not).
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast

from steepen.errors import SteepenError, UsageError
from steepen.evaluation.load import LoadedRun, load
from steepen.inference.decoding import check_passes
from steepen.inference.export import network_config
from steepen.inference.hf_tokenizer import hugging_face_tokenizer
from steepen.inference.modeling_steepen import SteepenConfig, SteepenForCausalLM
from steepen.inference.weights import hugging_face_weights, network_weights


def as_transformers(run: LoadedRun, passes: Any = None) -> tuple[Any, Any]:
    """The network of a run as a model of transformers, and its tokenizer."""
    if run.spec.arm.custom_code:
        raise UsageError(
            f"the arm {run.spec.arm.name} has custom code, which transformers does not know: `steepen export "
            "--include-code` writes a folder for `--model hf`."
        )
    own = run.tokenizer
    end = own.end_of_text
    config: dict[str, Any] = {**network_config(run), "bos_token_id": end, "eos_token_id": end}
    if passes is not None:
        if not isinstance(passes, int):
            raise UsageError(f"passes={passes} is not valid: give a whole number.")
        check_passes(run.network, passes)
        config["passes"] = passes
    model = SteepenForCausalLM(SteepenConfig(**config, pad_token_id=end))
    model.load_state_dict(hugging_face_weights(network_weights(run.network)))
    model = cast("Any", model).to(device=run.network.embedding.device, dtype=run.network.embedding.dtype)
    ends: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), own.end_text)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=hugging_face_tokenizer(own), model_max_length=run.network.shape.context, **ends
    )
    return model.eval(), tokenizer


@register_model("steepen")
class SteepenLM(HFLM):
    """lm-eval's class for transformers with a run: `run=DIR[,passes=K,precision=bf16,device=cuda]`.

    Every text is preceded by <|endoftext|>, as in training.
    """

    def __init__(
        self,
        run: str,
        passes: Any = None,
        precision: str = "auto",
        device: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = 64,
        **kwargs: Any,
    ) -> None:
        # lm-eval passes cuda:0 where no device is named.
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"
        loaded = load(run, device=device, precision=precision)
        model, tokenizer = as_transformers(loaded, passes)
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            max_length=loaded.network.shape.context,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            add_bos_token=True,
            **kwargs,
        )

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.model.device


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SteepenError as error:
        sys.exit(f"steepen: {error}")
