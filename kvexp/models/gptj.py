"""GPT-J ignores Hugging Face's attention interface: the same module with our attention inside."""

from __future__ import annotations

from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention

from kvexp.core import AttentionParams
from kvexp.models.attention_hook import attend


class KvexpGPTJAttention(GPTJAttention):  # type: ignore[misc]
    """Logits in float32 whatever the model's dtype, as the original computes them."""

    embed_positions: Tensor

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        geometry = AttentionParams(1 / float(self.scale_attn), upcast=True)
        return attend(query, key, value, attention_mask, geometry), None

    def _get_embed_positions(self, position_ids: Tensor) -> Tensor:
        """The table [rows, positions, dim] as a view: the original copies it for every row in every layer and step."""
        self.embed_positions = self.embed_positions.to(position_ids.device)
        return self.embed_positions.expand(position_ids.shape[0], -1, -1)
