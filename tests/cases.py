"""Every method with the settings that tests give it and what each independent truth says of it: one table for all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import oracles
from oracles import Oracle
from reference import Rule

from kvexp.core import Method, SlotSelection
from kvexp.methods import (
    A2SF,
    CAKE,
    CAOTE,
    CUR,
    D2O,
    GKV,
    H2O,
    H2OC,
    RKV,
    TOVA,
    VATP,
    AttentionMatching,
    CaM,
    CapKV,
    Compactor,
    DefensiveKV,
    DilatedWindow,
    ExpectedAttention,
    Full,
    H2ODamping,
    Ideal,
    KeyAttention,
    KeyDiff,
    Keyformer,
    KeyformerA2SF,
    KNorm,
    KVzap,
    KVzip,
    KVzipPlus,
    LagKV,
    OpenVINO,
    PyramidKV,
    QFilters,
    Random,
    SnapKV,
    SpAtten,
    StreamingLLM,
    TriAttention,
    VaSE,
    Window,
)


@dataclass(frozen=True)
class Case:
    """A method and its truths; a suite runs the cases that have the truth it compares with.

    oracle: kept sets in stock models (test_kept_sets.py). rule: outputs, kept sets and scores on random streams
    (test_reference.py). planted: one mark per plant of `planted.PLANTS`, in their order: + the answer's slot survives
    12 of 96 slots, - it does not, g only where query heads share a kv head, l only where positions are learned
    (test_planted.py). golden: recordings of the authors' code in tests/golden (test_golden.py). properties: whether
    test_properties.py draws it. unbounded: words of the reason why bounded prefill refuses it
    (test_bounded_prefill.py); "": it does not.
    """

    method: Method
    oracle: Oracle | None = None
    rule: Rule | None = None
    planted: str = ""
    golden: tuple[str, ...] = ()
    properties: bool = False
    unbounded: str = ""
    select: SlotSelection = field(default_factory=SlotSelection)


def key_norm(_: int, __: int, ___: int, key: Any) -> float:
    return -math.sqrt(sum(float(x) ** 2 for x in key))


SUM = Rule(attention=True)
THIRD, HALF, FIFTH = Fraction(3, 10), Fraction(1, 2), Fraction(1, 5)
GUMBEL = Rule(attention=True, tau=(1.0, 2.0), recent_ratio=THIRD)
# The last `window` tokens of the prompt observe and stay; the token being generated is not one of them.
SNAP = Rule("snapkv", True, recent_without_self=True, decode_evicts=False)
KEYFORMER_GOLDEN = ("keyformer_gptj_*", "keyformer_gpt2_*", "keyformer_mpt_newbias_*")
A2SF_GOLDEN = ("a2sf_*",)

# Plants: sink, loud; needle, unseen, long ago, a while ago, just now; long answer, told; recency, ALiBi; induction;
# seen below. The comments say why the marks are what they are.
CASES: dict[str, Case] = {
    # Nothing is lost.
    "full": Case(Full(), oracles.full, Rule(evicts=False), "++ +++++ ++ ++ + +", unbounded="evicts nothing"),
    # Own top 11 of each query's full row: what the question looks at is there, whoever else looked.
    "ideal": Case(Ideal(), None, Rule(per_query=True), "++ +++++ ++ ++ + +", ("a2sf_rowmask_*",)),
    # Positions 85 to 95. The fact told at 96 is 16 tokens old when asked: one window too far.
    "window": Case(Window(), oracles.window, Rule("newest"), "-- ----- -- ++ - -", ("a2sf_rowmask_*",), True),
    # The even ones of the last 22: reaches the told fact (96) and misses the newest token (95).
    "dilated_window": Case(DilatedWindow(), oracles.dilated_window, Rule("grid", dilation=1), "-- ----- -+ -- - -"),
    "dilated_window_2": Case(DilatedWindow(dilation=2), rule=Rule("grid", dilation=2), properties=True),
    "streaming_llm": Case(
        StreamingLLM(n_sinks=2), oracles.streaming_llm, Rule("newest", sinks=2), properties=True
    ),
    # Four sinks and seven recent: the window, and the sink whatever its key looks like.
    "streaming_llm_4": Case(
        StreamingLLM(), None, Rule("newest", sinks=4), "++ ----- -- ++ - -",
        ("keyformer_mpt_streamingllm_b2", "h2o_llama_realdrop_streaming"),
    ),
    # Sum over all rows. The sink has most; eight mentions make 8, more than the crowd's 6, whenever they came; two make
    # 2. What nobody looked at has crumbs. Without a window a newcomer has no time to collect: told and blue go at once.
    "key_attention": Case(KeyAttention(), oracles.key_attention, SUM, "++ +-++- +- -- + -", properties=True),
    # The same sum; five recent slots let newcomers collect (told) and hold the newest (recency).
    "h2o": Case(
        H2O(), oracles.h2o, replace(SUM, recent_ratio=HALF), "++ +-++- ++ ++ + -",
        ("h2o_llama_realdrop", "h2o_llama_lmeval_global", "a2sf_rowmask_*"), True,
    ),
    "h2o_few_recent": Case(H2O(recent_ratio=0.2), rule=replace(SUM, recent_ratio=FIFTH)),
    "h2o_all_recent": Case(H2O(recent_ratio=1.0), rule=replace(SUM, recent_ratio=Fraction(1))),
    "h2o_mask": Case(
        H2O(impl="mask"), rule=replace(SUM, recent_ratio=HALF, hidden_next_step=True), golden=("h2o_*_hh_mask",)
    ),
    "h2o_chunks": Case(H2O(), oracles.h2o_chunks, select=SlotSelection(by="chunk", chunk=3)),
    "h2o_critical": Case(H2O(), oracles.h2o_critical, select=SlotSelection(values="critical")),
    "h2o_c": Case(H2OC(compensation="none"), oracles.h2o_c, golden=("pqcache_baselines_mha",)),
    # Four sinks, four of that sum, four recent; at 12 slots of 96 tokens the compensation is not a slot yet.
    "h2o_c_compensated": Case(H2OC(), planted="++ +-++- ++ ++ + -"),
    "h2o_damping": Case(
        H2ODamping(damping=0.5), oracles.h2o_damping, replace(SUM, recent_ratio=FIFTH, damping=0.5), properties=True
    ),
    # Nothing is damped before the first eviction, so prompts are as in h2o; 45 steps leave 0.9^45 = 1 % of the needle's
    # 8, less than two rows of the crowd that is being decoded.
    "h2o_damping_0.9": Case(
        H2ODamping(), None, replace(SUM, recent_ratio=FIFTH, damping=0.9), "++ +-++- -+ ++ + -"
    ),
    "h2o_damping_0": Case(H2ODamping(damping=0.0), rule=replace(SUM, recent_ratio=FIFTH, damping=0.0)),
    "h2o_damping_1": Case(H2ODamping(damping=1.0), rule=replace(SUM, recent_ratio=FIFTH)),
    # The same sum times the size of the value, which is one word's in all slots but the sink's, and that is protected.
    "vatp": Case(VATP(n_sinks=2), oracles.vatp, properties=True),
    "vatp_1": Case(VATP(n_sinks=1), planted="++ +-++- ++ ++ + -"),
    # The same sum of noised rows. Fresh noise averages out over rows; two recent slots.
    "keyformer": Case(Keyformer(), oracles.keyformer, GUMBEL, "++ +-++- ++ ++ + -", KEYFORMER_GOLDEN, True),
    "keyformer_gaussian": Case(Keyformer(noise="gaussian"), None, GUMBEL, "++ +-++- ++ ++ + -"),
    "keyformer_constant": Case(Keyformer(noise="constant"), None, GUMBEL, "++ +-++- ++ ++ + -"),
    "keyformer_none": Case(Keyformer(noise="none"), None, GUMBEL, "++ +-++- ++ ++ + -", KEYFORMER_GOLDEN),
    "keyformer_per_key": Case(Keyformer(fresh=False), rule=GUMBEL, properties=True),
    "keyformer_hot": Case(Keyformer(tau_init=0.5, tau_end=5.0), rule=replace(GUMBEL, tau=(0.5, 5.0))),
    "keyformer_frozen": Case(
        Keyformer(key_window="release_frozen"), rule=replace(GUMBEL, frozen=True), golden=KEYFORMER_GOLDEN
    ),
    # What leaves the recent window is lost whatever it has collected: told while decoding, forgotten.
    "keyformer_none_frozen": Case(
        Keyformer(noise="none", key_window="release_frozen"), planted="++ +-++- +- ++ + -"
    ),
    # One score for all layers: as spatten in this.
    "keyformer_shared": Case(
        Keyformer(score_scope="shared"), oracles.keyformer_shared, replace(GUMBEL, across_layers=True),
        "++ +-++- ++ ++ + +", properties=True, unbounded="over all layers"),
    # A row nine tokens old counts 0.1^9: what the last row or two looked at. With ALiBi those are the newest.
    "a2sf": Case(
        A2SF(), oracles.forgetting(0.1), replace(SUM, alpha=0.1), "++ +---+ -- -+ - -", A2SF_GOLDEN, properties=True
    ),
    "a2sf_0": Case(A2SF(alpha=0.0), rule=replace(SUM, alpha=0.0), golden=A2SF_GOLDEN, properties=True),
    "a2sf_0.8": Case(A2SF(alpha=0.8), oracles.forgetting(0.8)),
    # A row n tokens old counts 0.9^n: the crowd holds 0.06 / (1 - 0.9) = 0.6. Two new mentions make 1.9, eight that end
    # 9 tokens ago 5.7 x 0.9^9 = 2.2; eight that end 70 ago nothing. No window: newcomers go at once, except with ALiBi,
    # where a newcomer has 0.5 of its own and all older than nine tokens have faded below that.
    "a2sf_0.9": Case(A2SF(alpha=0.9), None, replace(SUM, alpha=0.9), "++ +--++ -- -+ - -"),
    "a2sf_protected": Case(
        A2SF(alpha=0.9, protect_recent=2), None, replace(SUM, alpha=0.9, recent=2), "++ +--++ -+ ++ - -",
        properties=True,
    ),
    # As key_attention, in the limit alpha = 1.
    "a2sf_1": Case(A2SF(alpha=1.0), None, SUM, "++ +-++- +- -- + -", A2SF_GOLDEN),
    "a2sf_full_rows": Case(
        A2SF(alpha=0.5, score_source="full"), rule=replace(SUM, alpha=0.5, everything=True), golden=A2SF_GOLDEN
    ),
    "keyformer_a2sf": Case(
        KeyformerA2SF(), oracles.keyformer_a2sf, replace(GUMBEL, alpha=0.9), "++ +--++ -+ ++ - -", properties=True
    ),
    "keyformer_a2sf_shared": Case(
        KeyformerA2SF(score_scope="shared", alpha=0.6), rule=replace(GUMBEL, alpha=0.6, across_layers=True),
        properties=True,
    ),
    # The last row alone. While an answer is decoded it is another row, and the needle is gone after one.
    "tova": Case(
        TOVA(), oracles.tova, replace(SUM, alpha=0.0, last_rows=1, pool_heads=True), "++ +---+ -- -+ - -",
        properties=True,
    ),
    "tova_protected": Case(
        TOVA(protect_recent=2), rule=replace(SUM, alpha=0.0, last_rows=1, pool_heads=True, recent=2), properties=True
    ),
    # The same row, times how far the slot's value lies from the output, which mostly says "no" as the crowd does: a P
    # has 0.062 / 0.938 * 0.17 = 0.011, a needle that nobody looks at 0.0011 * 1.3, and sink and crowd are 13 slots.
    "caote": Case(CAOTE(), oracles.caote, None, "++ +---+ -- -+ - -", properties=True),
    # 93 of 96 values say "no", and so does their mean: a P has 0.066 * 0.023 = 0.0015, such a needle 0.0011 * 1.39 =
    # 0.0016. While an answer of "no" is decoded into eleven slots, their mean says "no" less, and it goes.
    "caote_fast": Case(CAOTE(form="fast"), oracles.fast_caote, None, "++ +++++ -- -+ - +"),
    "caote_over_h2o": Case(CAOTE(alpha="accumulated", recent_ratio=0.5), oracles.caote_over_h2o),
    "dropkv": Case(CAOTE(alpha="window", window=3), oracles.dropkv, properties=True),
    # What these put into their slots: test_rewriting.py.
    "attention_matching": Case(
        AttentionMatching(n_sinks=1, window=2, queries=3, reference="prompt", bias="none", values="kept"),
        oracles.attention_matching, properties=True, unbounded="a whole prompt"),
    # Two of 96 rows that look at nothing else: a mean square of 2/96, for the distractors' 1/144 at most.
    "attention_matching_1": Case(
        AttentionMatching(n_sinks=1, window=2, reference="prompt", bias="none", values="kept"),
        planted="++ +-+++ ++ ++ + -"),
    "attention_matching_fitted": Case(AttentionMatching(), unbounded="rewrites"),
    "d2o": Case(D2O(n_sinks=1), planted="++ +-++- ++ ++ + -", unbounded="rewrites"),
    "cam": Case(CaM(n_sinks=1), unbounded="rewrites"),
    "capkv": Case(CapKV(n_sinks=1, n_future=5), oracles.capkv, properties=True),
    # Values that nothing else spans: every plant's is of its own, whether few or many look at it.
    "capkv_default": Case(CapKV(), planted="++ +++++ ++ ++ + +"),
    "defensivekv": Case(DefensiveKV(window=3, kernel=1), oracles.defensivekv),
    # As snapkv_4, times the length of the value, which the sink has only where positions are learned.
    "defensivekv_4": Case(DefensiveKV(window=4, kernel=3), planted="ll +---+ ++ ++ - -"),
    "snapkv": Case(
        SnapKV(window=2, kernel=3), oracles.snapkv, replace(SNAP, last_rows=2, window=2, kernel=3, recent=2),
        properties=True, unbounded="the prompt's last 2 queries"),
    "snapkv_avg": Case(
        SnapKV(window=3, kernel=5, pool="avg"),
        rule=replace(SNAP, last_rows=3, window=3, kernel=5, pool="avg", recent=3),
    ),
    # The last four rows, once, and those four tokens: as tova at the end of the prompt, but nothing is evicted later.
    "snapkv_4": Case(SnapKV(window=4, kernel=3), planted="++ +---+ ++ ++ - -"),
    "snapkv_decoding": Case(
        SnapKV(window=3, kernel=3, pool="avg", decoding=True), oracles.snapkv_decoding, properties=True
    ),
    "snapkv_defensive": Case(
        SnapKV(window=3, kernel=1, softmax="older", aggregate="defensive", decoding=True), oracles.snapkv_defensive,
        properties=True,
    ),
    # Blocks of one token here; 32 beside the engine itself (tests/generate/test_openvino.py).
    "openvino": Case(
        OpenVINO(block=1, start_size=1, recent_size=1, window=3), oracles.openvino_norm,
        unbounded="the prompt's last 3 queries",
    ),
    "openvino_crush": Case(
        OpenVINO(block=1, start_size=1, recent_size=2, window=4, aggregation="sum", crush=1, anchor="alternating"),
        oracles.openvino_crush, unbounded="the prompt's last 4 queries",
    ),
    "pyramidkv": Case(PyramidKV(window=2, kernel=3, beta=3.0), oracles.snapkv, unbounded="the prompt's last 2 queries"),
    # One layer has it all: as snapkv. In the two of the induction model slots go from the top layer, where the phrase
    # is looked up, to the bottom one: 20 and 4, which are the observers.
    "pyramidkv_4": Case(PyramidKV(window=4, kernel=3), planted="++ +---+ ++ ++ - -"),
    "cake": Case(CAKE(window=3, kernel=3), oracles.cake, unbounded="among layers"),
    # The same four rows, once. A needle that one or two of them look at has 0.25 or 0.5 of their attention and a
    # variance of 0.25 or 0.33, two hundred times; sink and crowd have 0.17 and 0.06 in each and hardly vary.
    "cake_4": Case(CAKE(window=4, kernel=3), planted="++ +---+ ++ ++ - -"),
    "rkv": Case(RKV(window=3, kernel=3, importance=0.9), oracles.rkv, properties=True),
    "rkv_release": Case(RKV(window=3, kernel=3, importance=0.07, form="release"), oracles.rkv_release),
    "rkv_defensive": Case(RKV(window=3, kernel=3, importance=0.9, aggregate="defensive"), oracles.rkv_defensive),
    "gkv": Case(GKV(window=3, memory=0.5, importance=0.9), oracles.gkv, properties=True),
    # As snapkv_4 at the end of the prompt. A long answer forgets: 45 steps leave 0.8^45 of the needle's score, less
    # than any query that is being decoded gives to the crowd.
    "gkv_attention": Case(GKV(window=4, importance=1.0), planted="++ +---+ -+ ++ - -"),
    "vase": Case(VaSE(n_sinks=1, window=2, kernel=3, large=0.4), oracles.vase, properties=True),
    # The last four tokens and seven more. A rare key resembles few, which is worth 0.0058 more than filler; a tenth of
    # I is 0.0062 for the crowd and its neighbours, more slots than there are. Two mentions in four rows beat that,
    # older ones count nothing. Where query heads share a kv head, an idle one's logit for the sink is the largest of
    # all, so the sink takes all of I, and rare keys stay whoever looks, as in keydiff.
    "rkv_4": Case(RKV(window=4, kernel=3), planted="++ +ggg+ ++ ++ + g"),
    # Short keys: the quiet sink, and the needle nobody looked at. Every other vital slot has the longest key.
    "knorm": Case(KNorm(), oracles.knorm, Rule(initial_score=key_norm), "+- -+--- -- -- - -", properties=True),
    # Rare words, whoever looks: the filler is the mean key. One needle beside one sink, eight mentions and the crowd's
    # 12, one told fact, one blue. A phrase said five times is 20 slots besides the sink, of which the newest ten stay.
    "keydiff": Case(KeyDiff(), oracles.keydiff, None, "++ +++++ ++ ++ + +", properties=True),
    "lagkv": Case(LagKV(n_sinks=1, lag=2), oracles.lagkv, properties=True, unbounded="compares each partition"),
    # The sink, 3 tokens behind the 23 partitions, the last partition, and one token of each of the three before; once.
    "lagkv_4": Case(LagKV(n_sinks=1, lag=4), planted="++ ----- -+ ++ - -"),
    "lagkv_causal": Case(
        LagKV(n_sinks=0, lag=3, against="previous", protect_recent=3), oracles.lagkv_causal, properties=True
    ),
    "cur": Case(CUR(n_sinks=1, block=4), oracles.cur, properties=True, unbounded="compares each token"),
    # Values have one length, but the sink's is empty: a share of 1/15 in the first block and of 1/16 in all others, so
    # four sinks and the block's newest seven stay, 9 to 15; where the sink says something too, the newest. Once.
    "cur_value": Case(CUR(leverage="value"), planted="++ ----- -+ -- - -"),
    "expected_attention": Case(
        ExpectedAttention(n_sinks=1, n_future=5), oracles.expected_attention, properties=True
    ),
    "expected_attention_paper": Case(
        ExpectedAttention(n_sinks=1, n_future=5, epsilon=0.02, weight="output"), oracles.expected_attention_paper
    ),
    # What the mean prompt query looks at, and what few look at strongly, for exp(logit) is lopsided: eight mentions of
    # 92 rows give the needle 14 * 8 / 92 = 1.2 and 14^2 * 0.079 / 2 = 7.8, two of them 0.3 and 2.1, a P 4. Once.
    "expected_attention_default": Case(ExpectedAttention(), planted="++ +-++- ++ -+ + -"),
    # Calibrated on the prompt itself: what the average of its queries looks at, the sink (its key times 0.93 or more)
    # and the crowd (0.2 or more). Eight mentions of 96 turn it by 0.056 to the needle, to a fact told later not at all.
    # The newest is protected.
    "qfilters": Case(QFilters(), oracles.qfilters, None, "++ ----- -- ++ - -", properties=True),
    "kvzip": Case(KVzip(n_sinks=1, chunk=5, instruct=False), oracles.kvzip, unbounded="a second time"),
    # The prompt from the fifth token on is fed again, 40 tokens at a time, each beside its own slots. One mention that
    # stands in the needle's 40 is enough, 0.5 (the fed needle has the other half) against a P's 0.06; mentions that
    # stand later (a while ago, just now) read another part. Else the newest win by a smaller crowd. Once.
    "kvzip_40": Case(KVzip(chunk=40, instruct=False), planted="++ +-+-- ++ -+ + -"),
    "kvzip_plus": Case(KVzipPlus(n_sinks=1, chunk=5, instruct=False), oracles.kvzip_plus, unbounded="a second time"),
    # Of one length are all values but the sink's, and all that attention gets.
    "kvzip_plus_40": Case(KVzipPlus(chunk=40, instruct=False), planted="++ +-+-- ++ -+ + -"),
    # Trained on three copies of the prompt: what kvzip_plus sees of each word (with learned positions: of each place).
    # A word that no prompt had, told, is like any other, and the newest stay; two of those are protected.
    "kvzap": Case(KVzap(n_sinks=1, protect_recent=2), oracles.kvzap, None, "++ +-+-- +- ++ + -"),
    "compactor": Case(
        Compactor(n_sinks=1, n_recent=2, chunk=5, sketch=6), oracles.compactor, properties=True,
        unbounded="those around it",
    ),
    # A key that stands once is an outlier, whatever its norm and whoever looks: its leverage is near 1, a P's 1/12, a
    # filler's 1/74, and all have a spread of 0.1. Twice that beats the crowd, at which everyone looks (with fifteen
    # idle heads, which look at nothing, it stands 11 spreads above the mean). A phrase said five times: 20 outliers of
    # 1/5, behind the crowd's twelve. Once, and the last two stay.
    "compactor_blended": Case(Compactor(n_sinks=1, n_recent=2, blending=2.0), planted="++ +++++ ++ ++ - +"),
    "triattention": Case(TriAttention(max_offset=9), oracles.triattention, properties=True),
    # The mean query times the key: 5 for the sink, 4 for a P; 8 * 14 / 96 = 1.2 for a needle mentioned eight times is
    # more than the fillers' 0 and less than the thirteen.
    "triattention_default": Case(TriAttention(), planted="++ ----- -- ++ - -"),
    # By lot: no plant can say what it keeps.
    "random": Case(Random(), oracles.random, Rule(), properties=True),
    "random_redraw": Case(Random(redraw=True, protect_recent=3), oracles.random_recent, properties=True),
    "random_blocks": Case(Random(redraw=True, per="model", block=4, protect_recent=3), oracles.random_recent),
    # Sum over all rows, heads and layers: idle heads look at the sink only, layer 0 of the induction model gives every
    # token 1 from its successor; what lower layers looked at is kept above (seen below).
    "spatten": Case(
        SpAtten(), oracles.spatten, replace(SUM, pool_heads=True, across_layers=True), "++ +-++- +- -- + +",
        properties=True, unbounded="over all layers"),
}  # fmt: skip
