"""Eviction methods, one file each. In formulas: j a slot, k the budget, q a query row, x_q its logits, U union."""

from __future__ import annotations

from kvexp.methods.a2sf import A2SF
from kvexp.methods.attention_matching import AttentionMatching
from kvexp.methods.cake import CAKE
from kvexp.methods.cam import CaM
from kvexp.methods.caote import CAOTE
from kvexp.methods.capkv import CapKV
from kvexp.methods.compactor import Compactor
from kvexp.methods.cur import CUR
from kvexp.methods.d2o import D2O
from kvexp.methods.defensivekv import DefensiveKV
from kvexp.methods.dilated_window import DilatedWindow
from kvexp.methods.epikv import EpiKV
from kvexp.methods.expected_attention import ExpectedAttention
from kvexp.methods.full import Full
from kvexp.methods.gkv import GKV
from kvexp.methods.h2o import H2O
from kvexp.methods.h2o_c import H2OC
from kvexp.methods.h2o_damping import H2ODamping
from kvexp.methods.ideal import Ideal
from kvexp.methods.key_attention import KeyAttention
from kvexp.methods.keydiff import KeyDiff
from kvexp.methods.keyformer import Keyformer
from kvexp.methods.keyformer_a2sf import KeyformerA2SF
from kvexp.methods.knorm import KNorm
from kvexp.methods.kvzap import KVzap
from kvexp.methods.kvzip import KVzip
from kvexp.methods.kvzip_plus import KVzipPlus
from kvexp.methods.lagkv import LagKV
from kvexp.methods.openvino import OpenVINO
from kvexp.methods.pyramidkv import PyramidKV
from kvexp.methods.qfilters import QFilters
from kvexp.methods.random import Random
from kvexp.methods.rkv import RKV
from kvexp.methods.snapkv import SnapKV
from kvexp.methods.spatten import SpAtten
from kvexp.methods.streaming_llm import StreamingLLM
from kvexp.methods.tova import TOVA
from kvexp.methods.triattention import TriAttention
from kvexp.methods.vase import VaSE
from kvexp.methods.vatp import VATP
from kvexp.methods.window import Window

__all__ = [
    "A2SF",
    "CAKE",
    "CAOTE",
    "CUR",
    "D2O",
    "GKV",
    "H2O",
    "H2OC",
    "RKV",
    "TOVA",
    "VATP",
    "AttentionMatching",
    "CaM",
    "CapKV",
    "Compactor",
    "DefensiveKV",
    "DilatedWindow",
    "EpiKV",
    "ExpectedAttention",
    "Full",
    "H2ODamping",
    "Ideal",
    "KNorm",
    "KVzap",
    "KVzip",
    "KVzipPlus",
    "KeyAttention",
    "KeyDiff",
    "Keyformer",
    "KeyformerA2SF",
    "LagKV",
    "OpenVINO",
    "PyramidKV",
    "QFilters",
    "Random",
    "SnapKV",
    "SpAtten",
    "StreamingLLM",
    "TriAttention",
    "VaSE",
    "Window",
]
