"""GPT-J ignores Hugging Face's attention interface: the same module with our attention inside."""

from __future__ import annotations

from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention

from kvexp.core import Geometry
from kvexp.models.attention import attend


class KvexpGPTJAttention(GPTJAttention):  # type: ignore[misc]
    """Logits in float32 whatever the model's dtype, as the original computes them."""

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        geometry = Geometry(1 / float(self.scale_attn), upcast=True)
        return attend(query, key, value, attention_mask, geometry), None
