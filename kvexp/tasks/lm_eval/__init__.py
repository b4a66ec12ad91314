"""EleutherAI's lm-eval as a source of tasks: its definitions, its items, its metrics. Imports lm-eval late."""

from .items import Item, Request
from .protocol import MODES, PAPERS, PROTOCOLS, Protocol, protocol_of
from .task import SEVEN, LMEval

__all__ = ["MODES", "PAPERS", "PROTOCOLS", "SEVEN", "Item", "LMEval", "Protocol", "Request", "protocol_of"]
