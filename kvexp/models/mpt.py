"""MPT, whose attention module ignores Hugging Face's interface and has ALiBi by slot index: a subclass without both."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.mpt.modeling_mpt import MptAttention

from kvexp.core import AttentionParams
from kvexp.models.attention_hook import cached_attention, check_dropout


class KvexpMptAttention(MptAttention):  # type: ignore[misc]
    """MPT's attention through kvexp, with ALiBi as slope * (slot position - query position).

    So it is right for survivors that are not contiguous. alibi_power: the checkpoint's alibi_bias_max / 8. transformers
    builds its slopes for 8 whatever the checkpoint says, which is wrong for some (MPT-7B-StoryWriter: 16); slopes are
    powers of two, so raising them to this power gives the right ones.
    """

    alibi_power: float = 1.0

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        check_dropout(self, self.attn_dropout_p)
        batch, count = hidden_states.shape[:2]
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.reshape(batch, count, self.n_heads, self.head_dim).transpose(1, 2) for part in mixed.chunk(3, dim=2)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # The bias table is [heads, 1, max_seq_len], linear in its last axis.
        slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
        params = AttentionParams(float(self.softmax_scale), alibi=(slopes**self.alibi_power).to(query.device))
        out = cached_attention(query, key, value, attention_mask, params)
        return self.out_proj(out.transpose(1, 2).reshape(batch, count, -1)), None
