"""Two Triton kernels: the log-sum-exp of every observed row, then every slot's weighted column sum.

Imported only where `observe=triton` was asked for: everything else works without Triton. No atomics, one program per
result: two runs agree to the bit. Memory is O(queries + slots).
"""

import triton
import triton.language as tl

POOL_MASK = tl.constexpr((1 << 22) - 1)  # POOL_SIZE - 1 of kvexp.core.observe.noise, as triton_observe checks
NONE, POOLED, PER_KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NEG_INF = tl.constexpr(-1.0e30)  # stands for -inf in running maxima, since -inf - -inf is NaN


@triton.jit
def _tile(
    q, k, taus, query_pos, key_pos, slope, pool_offsets, per_key, row, col, rows_end, slots,
    scale, window, stride_qm, stride_qd, stride_kn, stride_kd,
    D: tl.constexpr, BLOCK_D: tl.constexpr, NOISE: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    TEMPERED: tl.constexpr, UPCAST: tl.constexpr, noise_pool,
):  # fmt: skip
    """(x + zeta) / tau of query rows `row` and slots `col`, float32 [rows, slots], and bool [rows, slots]: seen."""
    d = tl.arange(0, BLOCK_D)
    row_ok, col_ok = row < rows_end, col < slots
    a_at = row.to(tl.int64)[:, None] * stride_qm + d[None, :] * stride_qd
    b_at = col.to(tl.int64)[None, :] * stride_kn + d[:, None] * stride_kd
    a = tl.load(q + a_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    b = tl.load(k + b_at, mask=col_ok[None, :] & (d < D)[:, None], other=0.0)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    x = tl.dot(a, b, input_precision="ieee")
    x = x.to(a.dtype).to(tl.float32) * scale  # rounded to the model's dtype first, as a materialised product is
    row_pos = tl.load(query_pos + row, mask=row_ok, other=-1)
    kv_pos = tl.load(key_pos + col, mask=col_ok, other=-1)
    if ALIBI:
        x += slope * (kv_pos[None, :] - row_pos[:, None]).to(tl.float32)
    if NOISE == POOLED:
        offset = tl.load(pool_offsets + row, mask=row_ok, other=0)
        index = (offset[:, None] + kv_pos[None, :]) & POOL_MASK
        x += tl.load(noise_pool + index)
    if NOISE == PER_KEY:
        x += tl.load(per_key + col, mask=col_ok, other=0.0)[None, :]
    if TEMPERED:
        x = x / tl.load(taus + row, mask=row_ok, other=1.0)[:, None]
    seen = (kv_pos[None, :] >= 0) & (kv_pos[None, :] <= row_pos[:, None])
    if WINDOW:
        seen = seen & (kv_pos[None, :] > row_pos[:, None] - window)
    return x, seen


@triton.jit
def row_log_sum_exp(
    q, k, lse, query_pos, key_pos, slopes, pool_offsets, per_key, noise_pool, taus,
    first, rows, slots, heads, groups, scale, window,
    stride_qb, stride_qh, stride_qg, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_pb, stride_ph,
    D: tl.constexpr, BLOCK_D: tl.constexpr, NOISE: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    TEMPERED: tl.constexpr, UPCAST: tl.constexpr, IN_ORDER: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of every row's logits: lse [B, H, G, Q] of rows `first` on; grid (blocks of M rows, B * H * G).

    Rows that see nothing get NEG_INF.
    """
    block, bhg = tl.program_id(0), tl.program_id(1)
    g, h, b = bhg % groups, bhg // groups % heads, bhg // groups // heads
    start = first + block * M
    row = start + tl.arange(0, M)
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + g.to(tl.int64) * stride_qg
    k += b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    key_pos += b * stride_pb + h * stride_ph
    slope = tl.load(slopes + h * groups + g) if ALIBI else 0.0
    low, high = 0, slots
    if IN_ORDER:  # row i sees nothing behind its own column
        high = tl.minimum(slots, slots - rows + start + M)
        if WINDOW:
            low = tl.maximum(0, slots - rows + start + 1 - window) // N * N
    top = tl.full([M], NEG_INF, tl.float32)
    total = tl.zeros([M], tl.float32)
    for n in range(low, high, N):
        x, seen = _tile(
            q, k, taus, query_pos + b * rows, key_pos, slope, pool_offsets + bhg.to(tl.int64) * rows,
            per_key + bhg.to(tl.int64) * slots, row, n + tl.arange(0, N), rows, slots, scale, window,
            stride_qm, stride_qd, stride_kn, stride_kd, D, BLOCK_D, NOISE, ALIBI, WINDOW, TEMPERED, UPCAST, noise_pool,
        )  # fmt: skip
        x = tl.where(seen, x, NEG_INF)
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.where(seen, tl.exp(x - higher[:, None]), 0.0), 1)
        top = higher
    result = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), NEG_INF)
    tl.store(lse + bhg.to(tl.int64) * rows + row, result, mask=row < rows)


@triton.jit
def column_sums(
    q, k, lse, out, weights, query_pos, key_pos, slopes, pool_offsets, per_key, noise_pool, taus,
    first, rows, slots, heads, groups, scale, window,
    stride_qb, stride_qh, stride_qg, stride_qm, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_pb, stride_ph,
    D: tl.constexpr, BLOCK_D: tl.constexpr, NOISE: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    TEMPERED: tl.constexpr, UPCAST: tl.constexpr, IN_ORDER: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Column sums, out [B, H, S], over the query heads of a kv head and over rows; grid (blocks of N slots, B * H)."""
    block, bh = tl.program_id(0), tl.program_id(1)
    h, b = bh % heads, bh // heads
    col = block * N + tl.arange(0, N)
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    k += b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    key_pos += b * stride_pb + h * stride_ph
    low, high = first, rows
    if IN_ORDER:  # the first row that sees this block is its own column's; with a window there is a last one too
        low = tl.maximum(first, block * N - (slots - rows))
        if WINDOW:
            high = tl.minimum(rows, block * N + N + window - (slots - rows))
    total = tl.zeros([N], tl.float32)
    for g in range(groups):
        bhg = (bh * groups + g).to(tl.int64)
        slope = tl.load(slopes + h * groups + g) if ALIBI else 0.0
        for m in range(low, high, M):
            row = m + tl.arange(0, M)
            x, seen = _tile(
                q + g * stride_qg, k, taus, query_pos + b * rows, key_pos, slope, pool_offsets + bhg * rows,
                per_key + bhg * slots, row, col, rows, slots, scale, window,
                stride_qm, stride_qd, stride_kn, stride_kd,
                D, BLOCK_D, NOISE, ALIBI, WINDOW, TEMPERED, UPCAST, noise_pool,
            )  # fmt: skip
            norm = tl.load(lse + bhg * rows + row, mask=row < rows, other=0.0)
            weight = tl.load(weights + b * rows + row, mask=row < rows, other=0.0)
            total += tl.sum(tl.exp(tl.where(seen, x - norm[:, None], NEG_INF)) * weight[:, None], 0)
    tl.store(out + bh.to(tl.int64) * slots + col, total, mask=col < slots)
