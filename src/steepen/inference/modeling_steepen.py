"""A prelude-core-coda transformer for transformers; `steepen export` copies this file beside the weights.

The prelude's blocks run once, the core `config.passes` times, the coda once. A tied core is stored once; its
keys and values differ from pass to pass, so every executed block is a layer of the cache
(`config.num_hidden_layers`). The file needs torch and transformers only.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

BIAS_SCALE = 0.025  # of the bias on the choice of experts
CONNECTION_SCALE = 0.025  # of the weights of hyper-connections
# Custom block and boundaries by their "module:attribute" names; `steepen export --include-code` fills it.
CUSTOM: dict[str, Any] = {}


# What a config holds, with its defaults.
FIELDS: dict[str, Any] = {
    "vocab_size": 50257,  # ids that have a logit
    "padded_vocab_size": 50304,  # rows of the embedding and the head
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "max_position_embeddings": 2048,
    "prelude_blocks": 2,
    "core_blocks": 3,
    "coda_blocks": 3,
    "passes": 1,
    "stored_cores": 1,
    "tied_cores": True,
    "core_boundary": "identity",
    "coda_boundary": "identity",
    "first_pass": "prelude",  # input of the first core pass: the prelude's output, or the boundary's
    "norm_prelude": False,
    "residual_multiplier": 1.0,
    "output_multiplier": 1.0,
    "injection_weight": 1.0,
    "norm_eps": 1.1920929e-07,
    "rope_base": 10000.0,
    "rope_table": "fp32",
    "qk_scale": 1.0,
    "softcap": None,
    "residual_stream": "fp32",
    "kv_heads": None,  # None: one matrix of queries, keys and values
    "window": None,  # newest tokens that a query sees, itself included
    "activation": "swiglu",
    "parallel": False,  # attention and MLP read the same normed input
    "experts": None,
    "active_experts": 2,
    "shared_experts": 0,
    "choice_bias": False,  # whether a bias is added to the choice of experts
    "streams": None,  # copies of the residual stream that hyper-connections mix
    "custom_block": None,  # its name, and what it is built with
    "use_cache": True,
}


class SteepenConfig(PretrainedConfig):
    """Sizes, boundary operators and multipliers of a network. `passes` may be changed when loading."""

    model_type = "steepen"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        for name, default in FIELDS.items():
            setattr(self, name, kwargs.pop(name, default))
        self.num_key_value_heads = self.kv_heads or self.num_attention_heads
        self.head_dim = self.hidden_size // self.num_attention_heads
        kwargs.pop("num_hidden_layers", None)  # follows from the blocks and passes
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """Executed blocks: the layers of the cache."""
        return self.prelude_blocks + self.passes * self.core_blocks + self.coda_blocks

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        pass


def _norm(x: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=eps)


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE of (batch, time, heads, head_dim); channel i is paired with channel i + head_dim/2."""
    cos, sin = table[0].unsqueeze(-2), table[1].unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class SteepenBlock(nn.Module):
    """Pre-norm attention with RoPE and QK norm, then a pre-norm MLP: a SwiGLU, another one, or experts."""

    def __init__(self, config: SteepenConfig) -> None:
        super().__init__()
        width, self.config = config.hidden_size, config
        self.heads, self.eps = config.num_attention_heads, config.norm_eps
        self.residual = config.residual_multiplier
        self.scale = config.qk_scale * config.head_dim**-0.5
        if config.kv_heads is None:
            self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        else:
            self.q_proj = nn.Linear(width, width, bias=False)
            self.kv_proj = nn.Linear(width, 2 * config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        # intermediate_size is the width of the MLP, or of one expert.
        hidden, experts = config.intermediate_size, config.experts
        parts = 2 if config.activation == "swiglu" else 1
        dense = hidden if experts is None else config.shared_experts * hidden
        if dense:
            self.gate_up_proj = nn.Linear(width, parts * dense, bias=False)
            self.down_proj = nn.Linear(dense, width, bias=False)
        if experts is not None:
            self.router = nn.Linear(width, experts, bias=False)
            self.expert_gate_up_proj = nn.Linear(width, experts * parts * hidden, bias=False)
            self.expert_down_proj = nn.Linear(hidden, experts * width, bias=False)
            if config.choice_bias:
                self.choice_bias = nn.Parameter(torch.zeros(experts))
        if config.streams is not None:
            weights = config.streams * (config.streams + 2)
            self.attention_connection = nn.Parameter(torch.zeros(weights))
            if not config.parallel:
                self.mlp_connection = nn.Parameter(torch.zeros(weights))

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Callable[[int], Tensor | None],
        cache: Any = None,
        layer: int = 0,
    ) -> Tensor:
        """Add attention and MLP to the residual stream x; the branches have the dtype of `rotary`."""

        def attention(normed: Tensor) -> Tensor:
            return self._attention(normed, rotary, mask, cache, layer)

        def both(normed: Tensor) -> Tensor:
            return attention(normed) + self._mlp(normed)

        if self.config.parallel:
            return self._connect(x, "attention_connection", both, rotary.dtype)
        x = self._connect(x, "attention_connection", attention, rotary.dtype)
        return self._connect(x, "mlp_connection", self._mlp, rotary.dtype)

    def _connect(
        self, x: Tensor, name: str, branch: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Add a branch to the residual stream, or by hyper-connections to its copies."""
        streams = self.config.streams
        if streams is None:
            return x + self.residual * branch(_norm(x, self.eps).to(dtype))
        change = CONNECTION_SCALE * getattr(self, name).to(x.dtype)
        read, write, mix = change.split([streams, streams, streams**2])
        copies = torch.eye(streams, dtype=x.dtype, device=x.device)
        source = torch.einsum("...sw,s->...w", x, copies[0] + read)
        added = self.residual * branch(_norm(source, self.eps).to(dtype))
        moved = torch.einsum("...sw,st->...tw", x, copies.roll(1, 1) + mix.view(streams, streams))
        return moved + (1 + write).unsqueeze(-1) * added.unsqueeze(-2)

    def _attention(
        self, x: Tensor, rotary: Tensor, mask: Callable[[int], Tensor | None], cache: Any, layer: int
    ) -> Tensor:
        if self.config.kv_heads is None:
            query, key, value = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        else:
            query = self.q_proj(x).unflatten(-1, (self.heads, -1))
            key, value = self.kv_proj(x).unflatten(-1, (2, self.config.kv_heads, -1)).unbind(-3)
        query, key = (_norm(_rotate(part, rotary), self.eps) for part in (query, key))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, layer)
        visible = mask(key.shape[2])
        how = {"scale": self.scale, "enable_gqa": self.config.kv_heads is not None}
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, **how
        )
        return self.o_proj(attended.transpose(1, 2).flatten(-2))

    def _mlp(self, x: Tensor) -> Tensor:
        if self.config.experts is None:
            return self._dense(x, self.gate_up_proj.weight, self.down_proj.weight)
        routed = self._routed(x)
        if self.config.shared_experts:
            routed = routed + self._dense(x, self.gate_up_proj.weight, self.down_proj.weight)
        return routed

    def _dense(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        hidden = functional.linear(x, gate_up)
        if self.config.activation == "relu2":
            return functional.linear(functional.relu(hidden).square(), down)
        gate, up = hidden.chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, down)

    def _routed(self, x: Tensor) -> Tensor:
        """Each token through the experts that its scores choose, weighted by them."""
        active, experts = self.config.active_experts, self.config.experts
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).to(torch.promote_types(x.dtype, torch.float32))
        choice = scores.softmax(-1) + BIAS_SCALE * self.choice_bias if self.config.choice_bias else scores
        chosen = choice.topk(active, dim=-1).indices
        if active == 1:
            weights = scores.softmax(-1).gather(-1, chosen)
        else:
            weights = scores.gather(-1, chosen).softmax(-1)
        gate_up = self.expert_gate_up_proj.weight.chunk(experts)
        down = self.expert_down_proj.weight.chunk(experts)
        found = torch.zeros_like(tokens)
        for number in range(experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            part = self._dense(tokens[rows], gate_up[number], down[number])
            found[rows] += weights[rows, place].to(x.dtype).unsqueeze(-1) * part
        return found.view_as(x)


def _build_custom(config: SteepenConfig) -> nn.Module:
    """A custom block, given the shape, multipliers and options that steepen gives it."""
    told: dict[str, Any] = config.custom_block or {}
    shape, multipliers, options = (SimpleNamespace(**told[k]) for k in ("shape", "multipliers", "options"))
    shape.allocation = SimpleNamespace(**shape.allocation)
    return CUSTOM[told["name"]](shape, multipliers, options)


def _needed_mask(block: type, given: Tensor | None) -> Tensor | None:
    """The attention mask for a custom block: None if nothing is padded, or only where no text follows."""
    if given is None or (given.ndim == 2 and bool(given.all())):
        return None
    if "mask" in inspect.signature(block.forward).parameters:
        return given
    if bool((given.long().diff(dim=1) > 0).any()):
        raise ValueError("this model's custom block takes no mask: give texts without padding on the left.")
    return None


def _call_custom(
    block: nn.Module, x: Tensor, rotary: Tensor, visible: Tensor | None, cache: Any, layer: int
) -> Tensor:
    """Run a custom block; where the residual stream is wider than the weights, under autocast."""
    if visible is None and cache is None:
        rest, rotary = (), rotary[:, 0]  # a block without a mask expects one table for all rows
    else:
        slot = SimpleNamespace(append=lambda key, value: cache.update(key, value, layer))
        rest = (visible,) if cache is None else (visible, slot)
    same = x.dtype == rotary.dtype
    with contextlib.nullcontext() if same else torch.autocast(x.device.type, rotary.dtype):
        return block(x, rotary, *rest)


class SteepenPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about the network."""

    config_class = SteepenConfig
    base_model_prefix = "model"
    _no_split_modules = ["SteepenBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class SteepenModel(SteepenPreTrainedModel):
    """Tokens → hidden states after the last block, before the final norm."""

    def __init__(self, config: SteepenConfig) -> None:
        super().__init__(config)
        if not config.tied_cores and config.passes > config.stored_cores:
            raise ValueError(
                f"passes = {config.passes} is not valid: this untied network has {config.stored_cores} cores."
            )
        if config.passes < 1 or (config.core_blocks == 0 and config.passes > 1):
            raise ValueError(f"passes = {config.passes} is not valid for {config.core_blocks} core blocks.")

        def blocks(count: int) -> nn.ModuleList:
            make = SteepenBlock if config.custom_block is None else _build_custom
            return nn.ModuleList(make(config) for _ in range(count))

        self.embed_tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.prelude = blocks(config.prelude_blocks)
        self.cores = nn.ModuleList(blocks(config.core_blocks) for _ in range(config.stored_cores))
        self.coda = blocks(config.coda_blocks)
        self._rotary: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states (batch, time, width), and the cache with the new tokens."""
        config = self.config
        embedded: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        time, device, dtype = embedded.shape[1], embedded.device, embedded.dtype
        use_cache = config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=config)
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        limit = config.max_position_embeddings
        if past + time > limit:
            raise ValueError(f"{past + time} tokens are more than the network's context of {limit}.")
        if position_ids is None:
            position_ids = _positions(attention_mask, past, time, device)
        rotary = self._rotary_table(device, dtype)[:, position_ids].to(dtype)
        if config.custom_block is not None:
            attention_mask = _needed_mask(CUSTOM[config.custom_block["name"]], attention_mask)
        masks: dict[int, Tensor | None] = {}

        def mask(keys: int) -> Tensor | None:
            if keys not in masks:
                masks[keys] = _attention_mask(attention_mask, past, embedded, keys, config.window)
            return masks[keys]

        layer = 0
        states: list[Tensor] = []

        def run(blocks: nn.Module, x: Tensor) -> Tensor:
            nonlocal layer
            for block in blocks:  # pyright: ignore[reportGeneralTypeIssues]
                if config.custom_block is None:
                    x = block(x, rotary, mask, past_key_values, layer)
                else:
                    x = _call_custom(block, x, rotary, mask(past + time), past_key_values, layer)
                layer += 1
                states.append(x if config.streams is None else x.mean(-2))
            return x

        return BaseModelOutputWithPast(
            last_hidden_state=self._run_passes(embedded, run),
            past_key_values=past_key_values,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _run_passes(self, embedded: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """The prelude, every core pass and the coda; `run` applies some blocks."""
        config, stream = self.config, embedded.dtype
        if config.residual_stream == "fp32":
            stream = torch.promote_types(stream, torch.float32)
        x = _norm(embedded.to(stream), config.norm_eps)
        if config.streams is not None:
            x = x.unsqueeze(-2).expand(*x.shape[:-1], config.streams, -1)
        e = run(self.prelude, x)
        e = _norm(e, config.norm_eps) if config.norm_prelude else e
        h: Tensor | None = None
        for index in range(config.passes):
            core = self.cores[0 if config.tied_cores else index]
            as_is = h is None and config.first_pass == "prelude"
            h = run(core, e if as_is else self._boundary(config.core_boundary, h, e))
        h = run(self.coda, self._boundary(config.coda_boundary, h, e))
        return h if config.streams is None else h.mean(-2)

    def _boundary(self, name: str, h: Tensor | None, e: Tensor) -> Tensor:
        """Mix the hidden state h (None before the first pass) with the prelude's output e."""
        alpha = self.config.injection_weight
        if name in CUSTOM:
            return CUSTOM[name](h, e, alpha, lambda x: _norm(x, self.config.norm_eps))
        if "inject" not in name:
            h = e if h is None else h
            return _norm(h, self.config.norm_eps) if name == "norm" else h
        if h is None:
            return e if alpha == 1.0 else alpha * e
        return (_norm(h, self.config.norm_eps) if "norm" in name else h) + alpha * e

    def _rotary_table(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Cosines and sines, (2, context, head_dim/2), computed in fp64 and kept in fp32 or wider."""
        key = (device, torch.promote_types(dtype, torch.float32))
        if key not in self._rotary:
            config = self.config
            half = config.head_dim // 2
            frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
            steps = torch.arange(config.max_position_embeddings, dtype=torch.float64, device="cpu")
            angle = torch.outer(steps, frequency)
            table = torch.stack([angle.cos(), angle.sin()])
            if config.rope_table == "bf16":
                table = table.bfloat16()
            self._rotary[key] = table.to(key[1]).to(device)
        return self._rotary[key]


class SteepenForCausalLM(SteepenPreTrainedModel, GenerationMixin):
    """Tokens → logits of the next token."""

    def __init__(self, config: SteepenConfig) -> None:
        super().__init__(config)
        self.model = SteepenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (batch, time, vocabulary) in fp32 or wider; with labels, the mean loss."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        weight = self.lm_head.weight
        normed = _norm(hidden[:, kept], self.config.norm_eps).to(weight.dtype)
        logits = self.lm_head(normed)[..., : self.config.vocab_size]
        logits = self.config.output_multiplier * logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.config.softcap
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


def _positions(given: Tensor | None, past: int, time: int, device: torch.device) -> Tensor:
    """Positions of the new tokens, (batch or 1, time): padding on the left counts for nothing."""
    if given is not None and given.ndim == 2:
        return (given.long().cumsum(-1) - 1).clamp(min=0)[:, -time:]
    return torch.arange(past, past + time, device=device).unsqueeze(0)


def _attention_mask(
    given: Tensor | None, past: int, embedded: Tensor, keys: int, window: int | None
) -> Tensor | None:
    """Mask (batch or 1, 1, time, keys), True where a query sees a key; None if plain causal is meant.

    `given` is (batch, past + time), 1 where a token is not padding, or already has four dimensions.
    """
    time, device, dtype = embedded.shape[1], embedded.device, embedded.dtype
    if given is not None and given.ndim == 4:
        return given[..., :keys] if given.dtype == torch.bool else given[..., :keys].to(dtype)
    if given is None and past == 0 and keys == time and (window is None or window >= time):
        return None
    query = torch.arange(past, past + time, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    visible = (key <= query).expand(1, 1, time, keys)
    if window is not None:
        visible = visible & (key > query - window)
    if given is None:
        return visible
    real = functional.pad(given.bool(), (0, max(0, keys - given.shape[1])))[:, :keys]
    # Padding sees itself: a query without any key would be NaN.
    return (visible & real[:, None, None, :]) | (key == query)
