"""The kernels of a decode step, one new token per row: matrix-vector products, attention over the KV cache,
and the choice of the token.

A step of one text is bound by reading the weights once, so each kernel does all that lies between two
matrices: the norm before one, the activation or the residual connection after it. With programmatic dependent
launch (PDL) a kernel starts while the one before still runs and loads its weights, and only then waits for
its input. What is rounded to the compute dtype is what the reference rounds, so that near ties fall alike.
"""

# Triton kernels are untyped.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from steepen.kernels.norm import rms_norm_triton
from steepen.kernels.triton_backend import gdc_launch_dependents, gdc_wait, tl, triton

Epilogue = Literal["store", "add", "swiglu", "relu2"]
TILE_ELEMENTS = 8192  # weights that a program of one row multiplies: 16 KiB in bf16, all in flight at once
FEWEST_PROGRAMS = 256  # about two for each multiprocessor of an H100


@functools.cache
def launch_options(device: torch.device, rows: int) -> dict[str, Any]:
    """PDL for one row, where the GPU has it (capability 9.0 or more).

    Programs of several rows fill the GPU, and those of the next kernel that wait take room from them: at d8 a
    step of 32 rows takes 466 µs without PDL and 567 with it (H200).
    """
    pdl = rows == 1 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


# --- matrices -----------------------------------------------------------------------------------------------


@triton.jit
def _finish(
    y, other, residual_ptr, out_ptr, offset, mask, factor, dtype: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Round the products to the compute dtype, apply what follows the matrix, and store."""
    y = y.to(dtype).to(tl.float32)
    if EPILOGUE == "swiglu":
        y = (y / (1.0 + tl.exp(-y))).to(dtype).to(tl.float32) * other.to(dtype).to(tl.float32)
    if EPILOGUE == "relu2":
        y = tl.maximum(y, 0.0)
        y = y * y
    if EPILOGUE == "add":
        residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = residual + (factor * y).to(dtype).to(tl.float32)
    tl.store(out_ptr + offset, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _vector_kernel(
    x_ptr, w_ptr, residual_ptr, out_ptr, outputs, inputs, factor, eps,
    NORM: tl.constexpr, EPILOGUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row: weights are loaded first, which needs no other kernel."""
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = k < inputs
    mask = (n < outputs)[:, None] & inside[None, :]
    pointer = w_ptr + n.to(tl.int64)[:, None] * inputs + k[None, :]
    w = tl.load(pointer, mask=mask, other=0.0)
    if EPILOGUE == "swiglu":  # the rows of `up` come after all of those of `gate`
        up = tl.load(pointer + outputs.to(tl.int64) * inputs, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x = (x * tl.rsqrt(tl.sum(x * x) / inputs + eps)).to(dtype).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    other = y
    if EPILOGUE == "swiglu":
        other = tl.sum(up.to(tl.float32) * x[None, :], axis=1)
    _finish(y, other, residual_ptr, out_ptr, n, n < outputs, factor, dtype, EPILOGUE)


@triton.jit
def _matrix_kernel(
    x_ptr, w_ptr, residual_ptr, out_ptr, rows, outputs, inputs, factor,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of up to ROWS rows, on tensor cores; the input has the dtype of the weights."""
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    n_mask, row_mask = n < outputs, row < rows
    x_pointer = x_ptr + row[:, None] * inputs + k[None, :]
    w_pointer = w_ptr + n.to(tl.int64)[:, None] * inputs + k[None, :]
    y = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    other = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for first in range(0, inputs, BLOCK_K):
        inside = (first + k < inputs)[None, :]
        x = tl.load(x_pointer + first, mask=row_mask[:, None] & inside, other=0.0)
        w = tl.load(w_pointer + first, mask=n_mask[:, None] & inside, other=0.0)
        y = tl.dot(x, tl.trans(w), y, input_precision="ieee")
        if EPILOGUE == "swiglu":
            up = tl.load(
                w_pointer + outputs.to(tl.int64) * inputs + first, mask=n_mask[:, None] & inside, other=0.0
            )
            other = tl.dot(x, tl.trans(up), other, input_precision="ieee")
    offset = row[:, None] * outputs + n[None, :]
    mask = row_mask[:, None] & n_mask[None, :]
    _finish(y, other, residual_ptr, out_ptr, offset, mask, factor, dtype, EPILOGUE)


def decode_linear(
    x: Tensor,
    weight: Tensor,
    *,
    outputs: int | None = None,
    norm_eps: float | None = None,
    epilogue: Epilogue = "store",
    residual: Tensor | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weightᵀ of the first `outputs` rows of (out, in) weights, (rows, in) → (rows, outputs).

    With `norm_eps` of RMSNorm(x). "swiglu": silu of the first half of the outputs times the second; "relu2":
    max(0, y)²; "add": residual + factor·y, in the residual's dtype.
    """
    rows, inputs = x.shape
    parts = 2 if epilogue == "swiglu" else 1
    outputs = len(weight) // parts if outputs is None else outputs
    if out is None:
        dtype = weight.dtype if residual is None else residual.dtype
        out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    added = out if residual is None else residual
    if rows == 1:
        tile = vector_tile(inputs, outputs, parts)
        _vector_kernel[(triton.cdiv(outputs, tile["BLOCK_N"]),)](
            x, weight, added, out, outputs, inputs, factor, norm_eps or 0.0,
            NORM=norm_eps is not None, EPILOGUE=epilogue, **tile, **launch_options(x.device, rows),
        )  # fmt: skip
        return out
    if norm_eps is not None:
        x = rms_norm_triton(x, norm_eps, weight.dtype)[0]
    tile = matrix_tile(rows, outputs, weight.dtype)
    grid = (triton.cdiv(outputs, tile["BLOCK_N"]), triton.cdiv(rows, tile["ROWS"]))
    _matrix_kernel[grid](
        x, weight, added, out, rows, outputs, inputs, factor,
        EPILOGUE=epilogue, **tile,
    )  # fmt: skip
    return out


def vector_tile(inputs: int, outputs: int, parts: int) -> dict[str, int]:
    """Launch options of `_vector_kernel`: whole rows of weights, and enough programs for a GPU."""
    block = triton.next_power_of_2(inputs)
    count = max(1, TILE_ELEMENTS // (block * parts))
    while count > 1 and outputs < FEWEST_PROGRAMS * count:
        count //= 2
    return {"BLOCK_N": count, "BLOCK_K": block, "num_warps": min(max(4, block * parts // TILE_ELEMENTS), 16)}


def matrix_tile(rows: int, outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch options of `_matrix_kernel`; fp32 tiles are smaller, as tl.dot has no tensor cores for them."""
    wide = dtype == torch.float32
    return {
        "ROWS": 16 if rows <= 16 or wide else 32,
        "BLOCK_N": 16 if outputs < 64 * FEWEST_PROGRAMS or wide else 64,
        "BLOCK_K": 64 if wide else 128,
        "num_warps": 4,
        "num_stages": 2 if wide else 4,
    }


# --- attention over the cache -------------------------------------------------------------------------------


@triton.jit
def _rotate_norm(pointer, cos, sin, column, half, mask, eps, dtype: tl.constexpr):
    """RoPE and RMSNorm of one head, as its two halves in fp32, rounded to the compute dtype."""
    first = tl.load(pointer + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + half + column, mask=mask, other=0.0).to(tl.float32)
    a = (first * cos - second * sin).to(dtype).to(tl.float32)
    b = (first * sin + second * cos).to(dtype).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(a * a + b * b) / (2 * half) + eps)
    return (a * rstd).to(dtype).to(tl.float32), (b * rstd).to(dtype).to(tl.float32)


@triton.jit
def _attend_tile(
    key_ptr, value_ptr, cache, key, column, mask, half, oldest, index, q1, q2, v1, v2, new_score, scale,
    best, total, o1, o2,
):  # fmt: skip
    """Add some cached keys and values to a running softmax, and at `index` those of the new token."""
    stored = ((key >= oldest) & (key < index))[:, None] & mask[None, :]
    offset = cache + key[:, None] * 2 * half + column[None, :]
    a = tl.load(key_ptr + offset, mask=stored, other=0.0).to(tl.float32)
    b = tl.load(key_ptr + offset + half, mask=stored, other=0.0).to(tl.float32)
    c = tl.load(value_ptr + offset, mask=stored, other=0.0).to(tl.float32)
    d = tl.load(value_ptr + offset + half, mask=stored, other=0.0).to(tl.float32)
    is_new = key == index
    score = tl.sum(a * q1[None, :] + b * q2[None, :], axis=1)
    score = tl.where(is_new, new_score, score) * scale
    score = tl.where((key >= oldest) & (key <= index), score, float("-inf"))
    c = tl.where(is_new[:, None], v1.to(tl.float32)[None, :], c)
    d = tl.where(is_new[:, None], v2.to(tl.float32)[None, :], d)
    highest = tl.maximum(best, tl.max(score, axis=0))
    reference = tl.where(highest == float("-inf"), 0.0, highest)  # -inf before the oldest visible key
    p = tl.exp(score - reference)
    shrink = tl.exp(best - reference)
    total = total * shrink + tl.sum(p, axis=0)
    o1 = o1 * shrink + tl.sum(p[:, None] * c, axis=0)
    o2 = o2 * shrink + tl.sum(p[:, None] * d, axis=0)
    return highest, total, o1, o2


@triton.jit
def _merge(
    o1, o2, best, total, output, stats_ptr, partial_ptr, done_ptr, pair, number, first_chunk, last_chunk,
    column, half, mask, dtype: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store what a chunk has found; the last program to do so merges the chunks of its head."""
    place = (pair * CHUNKS + number).to(tl.int64)
    tl.store(stats_ptr + 2 * place, best)
    tl.store(stats_ptr + 2 * place + 1, total)
    tl.store(partial_ptr + place * 2 * half + column, o1, mask=mask)
    tl.store(partial_ptr + place * 2 * half + half + column, o2, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them counts
    finished = tl.atomic_add(done_ptr + pair, 1, sem="acq_rel")
    if finished == last_chunk - first_chunk:
        tl.debug_barrier()
        every = tl.arange(0, CHUNKS)
        used = (every >= first_chunk) & (every <= last_chunk)
        places = (pair * CHUNKS + every).to(tl.int64)
        # Other multiprocessors have written these: not from the L1 cache.
        bests = tl.load(stats_ptr + 2 * places, mask=used, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats_ptr + 2 * places + 1, mask=used, other=0.0, cache_modifier=".cg")
        share = tl.exp(bests - tl.max(bests, axis=0))
        whole = tl.sum(share * totals, axis=0)
        parts = partial_ptr + places[:, None] * 2 * half + column[None, :]
        both = used[:, None] & mask[None, :]
        all1 = tl.load(parts, mask=both, other=0.0, cache_modifier=".cg")
        all2 = tl.load(parts + half, mask=both, other=0.0, cache_modifier=".cg")
        o1 = tl.sum(share[:, None] * all1, axis=0) / whole
        o2 = tl.sum(share[:, None] * all2, axis=0) / whole
        tl.store(output, o1.to(dtype), mask=mask)
        tl.store(output + half, o2.to(dtype), mask=mask)
        tl.store(done_ptr + pair, 0)


# A program attends to one chunk of the keys, and the last of a head to finish merges what all have found. It
# reads key and value of the new token from the projection, so that it need not wait for who stores them.
@triton.jit
def _attention_kernel(
    qkv_ptr, table_ptr, key_ptr, value_ptr, index_ptr, padding_ptr, out_ptr, stats_ptr, partial_ptr, done_ptr,
    heads, group, half, length, context, chunk, window, scale, eps,
    WINDOW: tl.constexpr, CHUNKS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    row, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv, kv_heads = head // group, heads // group
    index = tl.load(index_ptr + row).to(tl.int32)
    padding = tl.load(padding_ptr + row).to(tl.int32)
    oldest = padding
    if WINDOW:
        oldest = tl.maximum(padding, index - window + 1)
    column = tl.arange(0, HALF)
    mask = column < half
    angle = table_ptr + (index - padding) * half + column
    cos = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + context * half, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    first_chunk, last_chunk = oldest // chunk, index // chunk
    if (number >= first_chunk) & (number <= last_chunk):
        token = qkv_ptr + row * (heads + 2 * kv_heads) * 2 * half
        q1, q2 = _rotate_norm(token + head * 2 * half, cos, sin, column, half, mask, eps, dtype)
        k1, k2 = _rotate_norm(token + (heads + kv) * 2 * half, cos, sin, column, half, mask, eps, dtype)
        new_value = token + (heads + kv_heads + kv) * 2 * half + column
        v1 = tl.load(new_value, mask=mask, other=0.0)
        v2 = tl.load(new_value + half, mask=mask, other=0.0)
        cache = (row.to(tl.int64) * kv_heads + kv) * length * 2 * half
        if (number == last_chunk) & (head == kv * group):
            new = cache + index * 2 * half + column
            tl.store(key_ptr + new, k1.to(dtype), mask=mask)
            tl.store(key_ptr + new + half, k2.to(dtype), mask=mask)
            tl.store(value_ptr + new, v1.to(dtype), mask=mask)
            tl.store(value_ptr + new + half, v2.to(dtype), mask=mask)
        new_score = tl.sum(k1 * q1 + k2 * q2)
        best = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        o1, o2 = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
        for first in range(number * chunk, tl.minimum(number * chunk + chunk, index + 1), KEYS):
            best, total, o1, o2 = _attend_tile(
                key_ptr, value_ptr, cache, first + tl.arange(0, KEYS), column, mask, half, oldest, index,
                q1, q2, v1, v2, new_score, scale, best, total, o1, o2,
            )  # fmt: skip
        output = out_ptr + (row * heads + head) * 2 * half + column
        if first_chunk == last_chunk:
            tl.store(output, (o1 / total).to(dtype), mask=mask)
            tl.store(output + half, (o2 / total).to(dtype), mask=mask)
        else:
            _merge(
                o1, o2, best, total, output, stats_ptr, partial_ptr, done_ptr, row * heads + head, number,
                first_chunk, last_chunk, column, half, mask, dtype, CHUNKS,
            )  # fmt: skip


class DecodeAttention:
    """Attention of one new token per row over a cache of `length` keys, with its buffers.

    `table` is the RoPE table (2, context, head_dim/2) in the compute dtype, `index` (rows) the place of the
    new token in the cache and `padding` (rows) that of the first token of each row.
    """

    KEYS: int = 64  # keys at a time

    def __init__(
        self,
        table: Tensor,
        index: Tensor,
        padding: Tensor,
        *,
        heads: int,
        length: int,
        window: int | None,
        scale: float,
        eps: float,
    ) -> None:
        self.table, self.index, self.padding = table.contiguous(), index, padding
        self.heads, self.length, self.window, self.scale, self.eps = heads, length, window, scale, eps
        rows, device = len(index), index.device
        # About 1,024 programs if the cache is full; those of chunks without keys end at once.
        chunks = min(max(1, 1024 // (rows * heads)), 64)
        self.chunk = self.KEYS * triton.cdiv(triton.cdiv(length, chunks), self.KEYS)
        self.chunks = triton.next_power_of_2(triton.cdiv(length, self.chunk))
        pairs, head_dim = rows * heads, 2 * table.shape[-1]
        self.stats = torch.empty(pairs, self.chunks, 2, device=device)
        self.partial = torch.empty(pairs, self.chunks, head_dim, device=device)
        self.done = torch.zeros(pairs, dtype=torch.int32, device=device)

    def __call__(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store key and value of the new tokens and attend: (rows, (heads + 2·kv_heads)·head_dim) →
        (rows, heads·head_dim). `keys` and `values` are (rows, kv_heads, length, head_dim).
        """
        rows, kv_heads, length, head_dim = keys.shape
        out = torch.empty(rows, self.heads * head_dim, dtype=qkv.dtype, device=qkv.device)
        _attention_kernel[(rows, self.heads, self.chunks)](
            qkv, self.table, keys, values, self.index, self.padding, out, self.stats, self.partial, self.done,
            self.heads, self.heads // kv_heads, head_dim // 2, length, self.table.shape[1], self.chunk,
            self.window or 0, self.scale, self.eps,
            WINDOW=self.window is not None, CHUNKS=self.chunks,
            HALF=triton.next_power_of_2(head_dim // 2), KEYS=self.KEYS, num_warps=4,
            **launch_options(qkv.device, rows),
        )  # fmt: skip
        return out


# --- the next token -----------------------------------------------------------------------------------------


@triton.jit
def _load_key(raw_ptr, place, vocabulary):
    """Products of the head, −∞ beyond the vocabulary, and integers with the same order."""
    raw = tl.load(raw_ptr + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32) + 0.0
    bits = raw.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if raw_ptr.dtype.element_ty == tl.bfloat16:
        key = key >> 16  # the bits that bf16 has
    return raw, key


@triton.jit
def _value(key, raw_ptr):
    """The number that has a key."""
    key = key.to(tl.int32)
    if raw_ptr.dtype.element_ty == tl.bfloat16:
        key = key << 16
        # A negative number's lower bits are ones in its key.
        key = tl.where(key < 0, key | 0xFFFF, key)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _logit(raw, multiplier, softcap, SOFTCAP: tl.constexpr):
    logit = multiplier * raw
    if SOFTCAP:  # softcap·tanh(logit/softcap), without overflow
        small = tl.exp(-2.0 * tl.abs(logit) / softcap)
        bent = softcap * (1.0 - small) / (1.0 + small)
        logit = tl.where(logit < 0.0, -bent, bent)
    return logit


@triton.jit
def _select(raw_ptr, weight_ptr, vocabulary, low, high, bound, BLOCK: tl.constexpr):
    """The lowest key such that all higher ones have at most the mass `bound`, and that mass.

    The key is above `low` and at most `high`, above which there is no mass. Each pass reads the masses above
    three keys between, which leaves a quarter of the interval.
    """
    lane = tl.arange(0, BLOCK)
    above = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        quarter = tl.maximum((high - low) >> 2, 1)
        a, b, c = low + quarter, low + ((high - low) >> 1), high - quarter
        mass_a, mass_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        mass_c = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocabulary, BLOCK):
            _, key = _load_key(raw_ptr, first + lane, vocabulary)
            weight = tl.load(weight_ptr + first + lane, mask=first + lane < vocabulary, other=0.0)
            mass_a += tl.where(key > a, weight, 0.0)
            mass_b += tl.where(key > b, weight, 0.0)
            mass_c += tl.where(key > c, weight, 0.0)
        total_a, total_b, total_c = tl.sum(mass_a), tl.sum(mass_b), tl.sum(mass_c)
        in_a, in_b, in_c = total_a <= bound, total_b <= bound, total_c <= bound
        above = tl.where(in_a, total_a, tl.where(in_b, total_b, tl.where(in_c, total_c, above)))
        low_c = tl.where(in_c, b, c)
        high_c = tl.where(in_c, c, high)
        low = tl.where(in_a, low, tl.where(in_b, a, low_c))
        high = tl.where(in_a, a, tl.where(in_b, b, high_c))
    return high, above


@triton.jit
def _sample(
    raw_ptr, weight_ptr, uniform_ptr, vocabulary, lane, highest, low, high, multiplier, softcap,
    inverse_temperature, top_p, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row whose keys are above `low` and at most `high`, that of `highest`."""
    top = _logit(highest, multiplier, softcap, SOFTCAP)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        raw, key = _load_key(raw_ptr, first + lane, vocabulary)
        weight = tl.exp((_logit(raw, multiplier, softcap, SOFTCAP) - top) * inverse_temperature)
        tl.store(weight_ptr + first + lane, weight, mask=first + lane < vocabulary)
        mass += tl.where(first + lane < vocabulary, weight, 0.0)
    kept = tl.sum(mass)
    if top_p < 1.0:
        # Keep a token if those before it have less than top_p together.
        last, above = _select(raw_ptr, weight_ptr, vocabulary, low, high, top_p * kept, BLOCK)
        own = tl.exp(
            (_logit(_value(last, raw_ptr), multiplier, softcap, SOFTCAP) - top) * inverse_temperature
        )
        equals = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, vocabulary, BLOCK):
            _, key = _load_key(raw_ptr, first + lane, vocabulary)
            equals += (key == last).to(tl.int32)
        needed = tl.ceil((top_p * kept - above) / own)
        kept = above + own * tl.minimum(tl.maximum(needed, 1.0), tl.sum(equals).to(tl.float32))
        low = last - 1
    bound = tl.load(uniform_ptr) * kept
    found, above = _select(raw_ptr, weight_ptr, vocabulary, low, high, bound, BLOCK)
    own = tl.exp((_logit(_value(found, raw_ptr), multiplier, softcap, SOFTCAP) - top) * inverse_temperature)
    # Among equal logits the token with as many before it as the bound has passed.
    wanted = tl.maximum((bound - above) / own, 0.0)
    before = tl.full((), 0, tl.int32)
    token = tl.full((), 0, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        _, key = _load_key(raw_ptr, first + lane, vocabulary)
        equal = (key == found).to(tl.int32)
        rank = before + tl.cumsum(equal, axis=0) - 1
        taken = (equal > 0) & (rank.to(tl.float32) <= wanted)
        token = tl.maximum(token, tl.max(tl.where(taken, first + lane, 0), axis=0))
        before += tl.sum(equal)
    return token


# One program chooses the token of a row. Sampling sorts nothing: the token at which the mass of the most
# probable ones reaches a bound is found by bisection over keys, and among equal logits by its index. Products
# and masses of 50,257 ids, which every pass reads again, are 300 kB in bf16, more than an L1 cache holds.
@triton.jit
def _choose_kernel(
    raw_ptr, weight_ptr, uniform_ptr, token_ptr, found_ptr, index_ptr, vocabulary, count, prompt, multiplier,
    softcap, inverse_temperature, top_p,
    GREEDY: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    raw_ptr += row.to(tl.int64) * vocabulary
    weight_ptr += row.to(tl.int64) * vocabulary
    index = tl.load(index_ptr + row)
    column = index + 1 - prompt
    lane = tl.arange(0, BLOCK)
    highest, best_key = _load_key(raw_ptr, lane, vocabulary)
    best, lowest_key = lane, tl.where(lane < vocabulary, best_key, 0x7FFFFFFF)
    for first in range(BLOCK, vocabulary, BLOCK):
        raw, key = _load_key(raw_ptr, first + lane, vocabulary)
        best = tl.where(key > best_key, first + lane, best)
        highest = tl.maximum(highest, raw)
        best_key = tl.maximum(best_key, key)
        lowest_key = tl.minimum(lowest_key, tl.where(first + lane < vocabulary, key, 0x7FFFFFFF))
    top_key = tl.max(best_key, axis=0)
    token = tl.min(tl.where(best_key == top_key, best, 0x7FFFFFFF), axis=0)
    if not GREEDY:
        top, low = tl.max(highest, axis=0), tl.min(lowest_key, axis=0).to(tl.int64) - 1
        token = _sample(
            raw_ptr, weight_ptr, uniform_ptr + row * count + column, vocabulary, lane, top, low,
            top_key.to(tl.int64), multiplier, softcap, inverse_temperature, top_p, SOFTCAP, BLOCK,
        )  # fmt: skip
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(found_ptr + row * count + column, token.to(tl.int64))
    tl.store(index_ptr + row, index + 1)


class DecodeChoice:
    """Chooses the token of every row on the GPU, and counts `index` on.

    `uniforms` and `found` are (rows, count): a random number in [0, 1) for each draw, and the tokens. The
    token of column 0 follows the prompt and is at place `prompt` of the cache: `index` (rows), the place of
    the newest token, is `prompt` when column 1 is chosen.
    """

    BLOCK: int = 4096  # logits at a time: more would spill registers

    def __init__(
        self,
        uniforms: Tensor,
        tokens: Tensor,
        found: Tensor,
        index: Tensor,
        *,
        prompt: int,
        multiplier: float,
        softcap: float | None,
        temperature: float,
        top_p: float,
    ) -> None:
        self.uniforms, self.tokens, self.found, self.index = uniforms, tokens, found, index
        self.prompt, self.multiplier, self.softcap = prompt, multiplier, softcap
        self.temperature, self.top_p = temperature, top_p

    def __call__(self, raw: Tensor) -> None:
        """Choose from the products of the head, (rows, vocabulary), as `inference.decoding.Chooser` does."""
        rows, vocabulary = raw.shape
        greedy = self.temperature == 0
        weight = raw if greedy else torch.empty(rows, vocabulary, device=raw.device)
        _choose_kernel[(rows,)](
            raw, weight, self.uniforms, self.tokens, self.found, self.index, vocabulary, self.found.shape[1],
            self.prompt, self.multiplier, self.softcap or 0.0, 0.0 if greedy else 1.0 / self.temperature,
            self.top_p, GREEDY=greedy, SOFTCAP=self.softcap is not None, BLOCK=self.BLOCK, num_warps=32,
            **launch_options(raw.device, rows),
        )  # fmt: skip
