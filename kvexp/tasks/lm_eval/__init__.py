"""EleutherAI's lm-eval as a source of tasks: its definitions, its items, its metrics. Imports lm-eval late."""

from kvexp.tasks.lm_eval.items import Item, Request
from kvexp.tasks.lm_eval.protocol import MODES, PAPERS, PROTOCOLS, Protocol, protocol_of
from kvexp.tasks.lm_eval.task import SEVEN, LMEval

__all__ = ["MODES", "PAPERS", "PROTOCOLS", "SEVEN", "Item", "LMEval", "Protocol", "Request", "protocol_of"]
