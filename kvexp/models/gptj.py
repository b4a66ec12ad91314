"""GPT-J, whose attention module ignores Hugging Face's attention interface: a subclass that attends through kvexp."""

from __future__ import annotations

from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention

from kvexp.core import AttentionParams
from kvexp.models.attention_hook import cached_attention, check_dropout


class KvexpGPTJAttention(GPTJAttention):  # type: ignore[misc]
    """GPT-J's attention through kvexp, with logits in float32 whatever the model's dtype, as in the original."""

    embed_positions: Tensor

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Attention output [B, H, Q, D] in place of the original's, through kvexp; None for the weights."""
        check_dropout(self, self.attn_dropout.p)
        params = AttentionParams(1 / float(self.scale_attn), upcast=True)
        return cached_attention(query, key, value, attention_mask, params), None

    def _get_embed_positions(self, position_ids: Tensor) -> Tensor:
        """The table of positions [rows, positions, dim] as a view; the original copies it in every layer and step."""
        self.embed_positions = self.embed_positions.to(position_ids.device)
        return self.embed_positions.expand(position_ids.shape[0], -1, -1)
