"""Triton kernels of observation and decode steps, imported only where `observe=triton` was asked for.

Observation: the log-sum-exp of every observed row, then every slot's weighted column sum. A decode step:
`split_kv_attention` reads keys and values once and writes the logits, and per split of the slots (flash-decoding) the
softmax statistics (running maximum m, sum of exponentials l) and weighted values (acc) of the attention and of what is
observed; `combine_splits` combines the splits and writes the column sums. No atomics, one program per result: two runs
agree to the bit. Memory is O(queries + slots).
"""

from __future__ import annotations

import triton
import triton.language as tl

POOL_MASK = tl.constexpr((1 << 22) - 1)  # POOL_SIZE - 1 of kvexp.core.noise, as triton_ops checks
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


UNSEEN, PLAIN, TEMPERED, GUMBEL, GAUSSIAN = (tl.constexpr(i) for i in range(5))  # how a row is observed


@triton.jit
def _observed(x, seen, kind, tau, offset, kv_pos, gumbel, gaussian, NOISE: tl.constexpr):
    """(x + zeta) / tau of logits x [G, N] of one row and kv head, where `seen`; else -inf.

    offset [G]: where each query head's draws start in the noise pools; kv_pos [N]: position ids of the slots.
    """
    y = x
    if NOISE:
        index = (offset[:, None] + kv_pos[None, :]) & POOL_MASK
        kinds = kind + tl.zeros_like(index)
        y += tl.load(gumbel + index, mask=seen & (kinds == GUMBEL), other=0.0)
        y += tl.load(gaussian + index, mask=seen & (kinds == GAUSSIAN), other=0.0)
    return tl.where(seen, y / tau, NEG_INF)


@triton.jit
def split_kv_attention(
    q, k, v, logits, m_parts, l_parts, acc_parts, seen_m_parts, seen_l_parts, key_pos, newest, slopes,
    kinds, taus, pool_offsets, gumbel, gaussian, heads, groups, slots, parts, length, scale, window,
    stride_qb, stride_qh, stride_qg, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_pb, stride_ph,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, G: tl.constexpr,
    ALIBI: tl.constexpr, WINDOW: tl.constexpr, OBSERVED: tl.constexpr, NOISE: tl.constexpr, UPCAST: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Softmax statistics and weighted values of one split; grid (splits of `length` slots, R * H).

    Writes logits [R, H, G, S]; m_parts, l_parts, seen_m_parts, seen_l_parts [R, H, G, parts]; acc_parts [R, H, G,
    parts, Dv].
    """
    split, bh = tl.program_id(0), tl.program_id(1)
    h, b = bh % heads, bh // heads
    g, d, e = tl.arange(0, G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    g_ok = g < groups
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    k += b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h.to(tl.int64) * stride_vh
    key_pos += b.to(tl.int64) * stride_pb + h.to(tl.int64) * stride_ph
    head = bh.to(tl.int64) * groups + g
    query = tl.load(
        q + g[:, None] * stride_qg + d[None, :] * stride_qd, mask=g_ok[:, None] & (d < D)[None, :], other=0.0
    )
    query_pos, kind, tau = tl.load(newest + b), tl.load(kinds + b), tl.load(taus + b)
    slope = tl.load(slopes + h * groups + g, mask=g_ok, other=0.0) if ALIBI else 0.0
    offset = tl.load(pool_offsets + head, mask=g_ok, other=0) if NOISE else 0
    m_i, seen_m_i = tl.full([G], NEG_INF, tl.float32), tl.full([G], NEG_INF, tl.float32)
    l_i, seen_l_i = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
    acc = tl.zeros([G, BLOCK_DV], tl.float32)
    for n in range(split * length, tl.minimum(split * length + length, slots), N):
        col = n + tl.arange(0, N)
        ok = col < slots
        index = col.to(tl.int64)
        keys = tl.load(
            k + index[None, :] * stride_kn + d[:, None] * stride_kd, mask=ok[None, :] & (d < D)[:, None], other=0.0
        )
        kv_pos = tl.load(key_pos + col, mask=ok, other=-1)
        if UPCAST:
            x = tl.dot(query.to(tl.float32), keys.to(tl.float32), input_precision="ieee") * scale
        else:  # rounded to the model's dtype first, as a materialised product is
            x = tl.dot(query, keys, input_precision="ieee").to(query.dtype).to(tl.float32) * scale
        if ALIBI:
            x += slope[:, None] * (kv_pos - query_pos)[None, :].to(tl.float32)
        live = kv_pos >= 0
        if WINDOW:
            live = live & (kv_pos > query_pos - window)
        seen = live[None, :] & g_ok[:, None]
        x = tl.where(seen, x, NEG_INF)
        tl.store(logits + head[:, None] * slots + index[None, :], x, mask=g_ok[:, None] & ok[None, :])
        higher = tl.maximum(m_i, tl.max(x, 1))
        fade = tl.exp(m_i - higher)
        p = tl.where(seen, tl.exp(x - higher[:, None]), 0.0)
        l_i = l_i * fade + tl.sum(p, 1)
        values = tl.load(
            v + index[:, None] * stride_vn + e[None, :] * stride_vd, mask=ok[:, None] & (e < DV)[None, :], other=0.0
        )
        acc = acc * fade[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        m_i = higher
        if OBSERVED:
            y = _observed(x, seen, kind, tau, offset, kv_pos, gumbel, gaussian, NOISE)
            higher = tl.maximum(seen_m_i, tl.max(y, 1))
            fresh = tl.sum(tl.where(seen, tl.exp(y - higher[:, None]), 0.0), 1)
            seen_l_i = seen_l_i * tl.exp(seen_m_i - higher) + fresh
            seen_m_i = higher
    at = head * parts + split
    tl.store(m_parts + at, m_i, mask=g_ok)
    tl.store(l_parts + at, l_i, mask=g_ok)
    tl.store(acc_parts + at[:, None] * DV + e[None, :], acc, mask=g_ok[:, None] & (e < DV)[None, :])
    if OBSERVED:
        tl.store(seen_m_parts + at, seen_m_i, mask=g_ok)
        tl.store(seen_l_parts + at, seen_l_i, mask=g_ok)


@triton.jit
def combine_splits(
    logits, m_parts, l_parts, acc_parts, seen_m_parts, seen_l_parts, out, given, key_pos,
    kinds, taus, pool_offsets, gumbel, gaussian, heads, groups, slots, parts, stride_pb, stride_ph,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr, OBSERVED: tl.constexpr,
    NOISE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The attention output and column sums out of the splits; grid (blocks of N slots, R * H).

    Writes out [R, H, G, Dv], and given [R, H, S]: column sums over a group's query heads.
    """
    block, bh = tl.program_id(0), tl.program_id(1)
    h, b = bh % heads, bh // heads
    g, split = tl.arange(0, G), tl.arange(0, PARTS)
    g_ok = g < groups
    head = bh.to(tl.int64) * groups + g
    at = head[:, None] * parts + split[None, :]
    ok = g_ok[:, None] & (split < parts)[None, :]
    if block == 0:
        e = tl.arange(0, BLOCK_DV)
        m_i = tl.load(m_parts + at, mask=ok, other=NEG_INF)
        share = tl.exp(m_i - tl.max(m_i, 1)[:, None])
        norm = tl.sum(tl.load(l_parts + at, mask=ok, other=0.0) * share, 1)
        norm = tl.where(norm > 0, norm, 1.0)
        result = tl.zeros([G, BLOCK_DV], tl.float32)
        highest = tl.max(m_i, 1)
        for i in range(parts):
            weight = tl.exp(tl.load(m_parts + head * parts + i, mask=g_ok, other=NEG_INF) - highest)
            acc = tl.load(
                acc_parts + (head * parts + i)[:, None] * DV + e[None, :],
                mask=g_ok[:, None] & (e < DV)[None, :],
                other=0.0,
            )
            result += acc * weight[:, None]
        tl.store(out + head[:, None] * DV + e[None, :], result / norm[:, None], mask=g_ok[:, None] & (e < DV)[None, :])
    if OBSERVED:
        kind, tau = tl.load(kinds + b), tl.load(taus + b)
        col = block * N + tl.arange(0, N)
        inside = col < slots
        kv_pos = tl.load(key_pos + b.to(tl.int64) * stride_pb + h.to(tl.int64) * stride_ph + col, mask=inside, other=-1)
        x = tl.load(logits + head[:, None] * slots + col[None, :], mask=g_ok[:, None] & inside[None, :], other=NEG_INF)
        seen = x > NEG_INF
        offset = tl.load(pool_offsets + head, mask=g_ok, other=0) if NOISE else 0
        y = _observed(x, seen, kind, tau, offset, kv_pos, gumbel, gaussian, NOISE)
        m_i = tl.load(seen_m_parts + at, mask=ok, other=NEG_INF)
        highest = tl.max(m_i, 1)
        norm = tl.sum(tl.load(seen_l_parts + at, mask=ok, other=0.0) * tl.exp(m_i - highest[:, None]), 1)
        norm = tl.where(norm > 0, norm, 1.0)
        p = tl.where(seen & (kind != UNSEEN), tl.exp(y - highest[:, None]) / norm[:, None], 0.0)
        tl.store(given + bh.to(tl.int64) * slots + col, tl.sum(p, 0), mask=inside)
