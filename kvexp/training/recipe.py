"""How a model of the testbed is trained."""

from __future__ import annotations

from dataclasses import dataclass

# Questions are the hard form: a marker makes the summary easy, and learnt first it delays them.
MIXTURE = {"questions": 0.4, "summary": 0.3, "dialogue": 0.3}


@dataclass(frozen=True)
class Recipe:
    """How to train. learning rates decay linearly to a tenth over the last `cooldown` share of the steps."""

    steps: int = 2600
    seed: int = 0
    batch_tokens: int = 4096
    lr: float = 2e-3  # AdamW: embeddings, norms, biases
    muon_lr: float = 1e-2  # Muon: the hidden matrices
    warmup: int = 50
    cooldown: float = 0.4
    one_attribute: float = 0.4  # share of documents all of whose facts are of one attribute: only names tell them apart
    context_weight: float = 0.1  # of predicting a token that is no answer
    pass_mark: float = 0.9  # mean recall over the last lessons of each kind that moves the curriculum on
    every: int = 100  # steps between log lines and checkpoints
