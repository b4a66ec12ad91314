"""Two Triton kernels of one decode step: attention over the slots in parts, then what the parts come to.

The first reads keys and values once: logits to a scratch, and per part of the slots the softmax statistics of what is
attended to and of what is observed. The second adds the parts up and writes what each slot is given. No atomics: two
runs agree to the bit. Imported only where `observe=triton` was asked for.
"""

import triton
import triton.language as tl

from kvexp.core.observe.triton_observe_kernels import GONE, POOL_MASK

UNSEEN, PLAIN, TEMPERED, GUMBEL, GAUSSIAN = (tl.constexpr(i) for i in range(5))  # how a row is observed


@triton.jit
def _observed(x, seen, kind, tau, place, theirs, gumbel, gaussian, NOISE: tl.constexpr):
    """(x + zeta) / tau of logits x [G, N] of one row and kv head; place [G]; theirs [N]: the slots' positions."""
    y = x
    if NOISE:
        at = (place[:, None] + theirs[None, :]) & POOL_MASK
        kinds = kind + tl.zeros_like(at)
        y += tl.load(gumbel + at, mask=seen & (kinds == GUMBEL), other=0.0)
        y += tl.load(gaussian + at, mask=seen & (kinds == GAUSSIAN), other=0.0)
    return tl.where(seen, y / tau, GONE)


@triton.jit
def attend_parts(
    q, k, v, logits, tops, totals, sums, seen_tops, seen_totals, key_at, newest, slopes, kinds, taus, places,
    gumbel, gaussian, heads, groups, slots, parts, length, scale, window,
    stride_qb, stride_qh, stride_qg, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_pb, stride_ph,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, G: tl.constexpr,
    ALIBI: tl.constexpr, WINDOW: tl.constexpr, OBSERVED: tl.constexpr, NOISE: tl.constexpr, UPCAST: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Grid (parts of `length` slots, B * H). logits [B, H, G, S]; tops, totals [B, H, G, parts]; sums [.., DV]."""
    part, bh = tl.program_id(0), tl.program_id(1)
    h, b = bh % heads, bh // heads
    g, d, e = tl.arange(0, G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    g_ok = g < groups
    q += b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    k += b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
    v += b.to(tl.int64) * stride_vb + h.to(tl.int64) * stride_vh
    key_at += b.to(tl.int64) * stride_pb + h.to(tl.int64) * stride_ph
    head = bh.to(tl.int64) * groups + g
    query = tl.load(
        q + g[:, None] * stride_qg + d[None, :] * stride_qd, mask=g_ok[:, None] & (d < D)[None, :], other=0.0
    )
    mine, kind, tau = tl.load(newest + b), tl.load(kinds + b), tl.load(taus + b)
    slope = tl.load(slopes + h * groups + g, mask=g_ok, other=0.0) if ALIBI else 0.0
    place = tl.load(places + head, mask=g_ok, other=0) if NOISE else 0
    top, seen_top = tl.full([G], GONE, tl.float32), tl.full([G], GONE, tl.float32)
    total, seen_total = tl.zeros([G], tl.float32), tl.zeros([G], tl.float32)
    found = tl.zeros([G, BLOCK_DV], tl.float32)
    for n in range(part * length, tl.minimum(part * length + length, slots), N):
        col = n + tl.arange(0, N)
        ok = col < slots
        at = col.to(tl.int64)
        keys = tl.load(
            k + at[None, :] * stride_kn + d[:, None] * stride_kd, mask=ok[None, :] & (d < D)[:, None], other=0.0
        )
        theirs = tl.load(key_at + col, mask=ok, other=-1)
        if UPCAST:
            x = tl.dot(query.to(tl.float32), keys.to(tl.float32), input_precision="ieee") * scale
        else:  # rounded to the model's dtype first, as a materialised product is
            x = tl.dot(query, keys, input_precision="ieee").to(query.dtype).to(tl.float32) * scale
        if ALIBI:
            x += slope[:, None] * (theirs - mine)[None, :].to(tl.float32)
        live = theirs >= 0
        if WINDOW:
            live = live & (theirs > mine - window)
        seen = live[None, :] & g_ok[:, None]
        x = tl.where(seen, x, GONE)
        tl.store(logits + head[:, None] * slots + at[None, :], x, mask=g_ok[:, None] & ok[None, :])
        higher = tl.maximum(top, tl.max(x, 1))
        fade = tl.exp(top - higher)
        p = tl.where(seen, tl.exp(x - higher[:, None]), 0.0)
        total = total * fade + tl.sum(p, 1)
        values = tl.load(
            v + at[:, None] * stride_vn + e[None, :] * stride_vd, mask=ok[:, None] & (e < DV)[None, :], other=0.0
        )
        found = found * fade[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        top = higher
        if OBSERVED:
            y = _observed(x, seen, kind, tau, place, theirs, gumbel, gaussian, NOISE)
            higher = tl.maximum(seen_top, tl.max(y, 1))
            fresh = tl.sum(tl.where(seen, tl.exp(y - higher[:, None]), 0.0), 1)
            seen_total = seen_total * tl.exp(seen_top - higher) + fresh
            seen_top = higher
    there = head * parts + part
    tl.store(tops + there, top, mask=g_ok)
    tl.store(totals + there, total, mask=g_ok)
    tl.store(sums + there[:, None] * DV + e[None, :], found, mask=g_ok[:, None] & (e < DV)[None, :])
    if OBSERVED:
        tl.store(seen_tops + there, seen_top, mask=g_ok)
        tl.store(seen_totals + there, seen_total, mask=g_ok)


@triton.jit
def add_parts(
    logits, tops, totals, sums, seen_tops, seen_totals, out, given, key_at, kinds, taus, places, gumbel, gaussian,
    heads, groups, slots, parts, stride_pb, stride_ph,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr, OBSERVED: tl.constexpr,
    NOISE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of N slots, B * H). out [B, H, G, DV]; given [B, H, S]: what is observed, summed over a group."""
    block, bh = tl.program_id(0), tl.program_id(1)
    h, b = bh % heads, bh // heads
    g, part = tl.arange(0, G), tl.arange(0, PARTS)
    g_ok = g < groups
    head = bh.to(tl.int64) * groups + g
    there = head[:, None] * parts + part[None, :]
    ok = g_ok[:, None] & (part < parts)[None, :]
    if block == 0:
        e = tl.arange(0, BLOCK_DV)
        top = tl.load(tops + there, mask=ok, other=GONE)
        share = tl.exp(top - tl.max(top, 1)[:, None])
        norm = tl.sum(tl.load(totals + there, mask=ok, other=0.0) * share, 1)
        norm = tl.where(norm > 0, norm, 1.0)
        result = tl.zeros([G, BLOCK_DV], tl.float32)
        highest = tl.max(top, 1)
        for i in range(parts):
            weight = tl.exp(tl.load(tops + head * parts + i, mask=g_ok, other=GONE) - highest)
            found = tl.load(
                sums + (head * parts + i)[:, None] * DV + e[None, :],
                mask=g_ok[:, None] & (e < DV)[None, :],
                other=0.0,
            )
            result += found * weight[:, None]
        tl.store(out + head[:, None] * DV + e[None, :], result / norm[:, None], mask=g_ok[:, None] & (e < DV)[None, :])
    if OBSERVED:
        kind, tau = tl.load(kinds + b), tl.load(taus + b)
        col = block * N + tl.arange(0, N)
        inside = col < slots
        theirs = tl.load(key_at + b.to(tl.int64) * stride_pb + h.to(tl.int64) * stride_ph + col, mask=inside, other=-1)
        x = tl.load(logits + head[:, None] * slots + col[None, :], mask=g_ok[:, None] & inside[None, :], other=GONE)
        seen = x > GONE
        place = tl.load(places + head, mask=g_ok, other=0) if NOISE else 0
        y = _observed(x, seen, kind, tau, place, theirs, gumbel, gaussian, NOISE)
        top = tl.load(seen_tops + there, mask=ok, other=GONE)
        highest = tl.max(top, 1)
        norm = tl.sum(tl.load(seen_totals + there, mask=ok, other=0.0) * tl.exp(top - highest[:, None]), 1)
        norm = tl.where(norm > 0, norm, 1.0)
        p = tl.where(seen & (kind != UNSEEN), tl.exp(y - highest[:, None]) / norm[:, None], 0.0)
        tl.store(given + bh.to(tl.int64) * slots + col, tl.sum(p, 0), mask=inside)
