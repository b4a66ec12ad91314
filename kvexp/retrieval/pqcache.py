"""PQCache: product quantisation of the keys, approximate scores from centroid tables, exact attention on the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from kvexp.retrieval.index import CostModel, KVIndex, assign, init_rows, lloyd, profile_kmeans
from kvexp.retrieval.method import Combine, PrefillKV, Retrieval, RetrievalQuery
from kvexp.retrieval.offload import BlockCacheConfig
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, Range

PROFILED = (256, 512, 1024, 2048, 4096, 8192, 16384)  # prompt lengths the adaptive cap is fitted to, if they are quick


@dataclass(frozen=True)
class PQCache(Retrieval):
    """Keys (post-RoPE) in m sub-vectors, 2^b centroids each; relevance = sum over sub-vectors of q.centroid[code].

    Source: Zhang et al. 2024, arXiv:2407.12820. Clustered per prompt, layer, kv head and sub-vector: all real
    prompt keys but the sinks (cluster=prompt) or only those outside the recent window too (outside_window); every
    other token gets the codes of its nearest centroids (L2). Rows with no more such keys than centroids are
    searched exactly (their receipts say so). combine: how the query heads of a kv head become one choice.

    cluster_on: cpu, during the computation on a GPU (the paper), or model, the model's device (always so with
    offload=False). Codes live in CPU memory and are fetched one layer ahead.

    Departures from the release, whose defects are not reproduced: prompt tokens of the recent window are clustered
    with their own keys (there: whatever the buffer held); generated tokens get codes in every version; window and
    candidates move in step in all layers; nothing survives a prompt; only full blocks are cached; scores are
    float32; codes are one or two bytes, not eight; any grouping of heads works; inner-product clustering, which
    does not run there, is left out.
    """

    name: ClassVar[str] = "pqcache"
    m: Annotated[int, AtLeast(1)] = 2  # sub-vectors
    b: Annotated[int, Range(1, 12)] = 6  # bits per code
    # adaptive: as many k-means iterations as hide behind one layer's prefill on this machine
    max_iter: Annotated[int, AtLeast(1)] | Literal["adaptive"] = 10
    combine: Combine = "softmax_sum"
    # outside_window: only keys outside the recent window are clustered
    cluster: Literal["prompt", "outside_window"] = "prompt"
    cluster_on: Literal["cpu", "model"] = "cpu"  # model: where the keys are
    kmeans_seed: Annotated[int, Range(0, (1 << 32) - 1)] = 4321
    cache_tokens: Annotated[int, AtLeast(0)] = 4096  # block cache on the device, per kv head; 0: none
    cache_block: Annotated[int, AtLeast(1)] = 128
    cache_policy: Literal["lfu", "lru"] = "lfu"
    cache_blocks_per_step: Annotated[int, AtLeast(1)] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.cache  # checks that it holds a block

    @property
    def cache(self) -> BlockCacheConfig | None:
        if self.cache_tokens == 0:
            return None
        return BlockCacheConfig(self.cache_tokens, self.cache_block, self.cache_policy, self.cache_blocks_per_step)

    @property
    def indexes_on_host(self) -> bool:
        return self.cluster_on == "cpu"

    def check_heads(self, dim: int) -> None:
        if dim % self.m:
            fits = ", ".join(str(m) for m in range(1, min(dim, 64) + 1) if dim % m == 0)
            raise ConfigError(
                f"method.m={self.m} does not divide the {dim} components of this model's heads; m may be {fits}"
            )

    def calibrate(self, seconds: Callable[[int], float], longest: int, heads: int, dim: int, device: str) -> Any:
        if self.max_iter != "adaptive":
            return None
        lengths = [n for n in PROFILED if n <= longest] or [longest]
        where = "cpu" if self.cluster_on == "cpu" and self.offload else device
        return profile_kmeans(seconds, heads * self.m, dim // self.m, 1 << self.b, lengths, where)

    # -- indexing -----------------------------------------------------------------------------------------------------

    def build(self, index: KVIndex, prompt: PrefillKV) -> None:
        keys, (batch, heads, _, dim) = prompt.keys, prompt.keys.shape
        shape = (batch, heads, self.m, 1 << self.b, dim // self.m)
        centroids = torch.zeros(shape, device=keys.device)
        smallest = torch.uint8 if self.b <= 8 else torch.int16
        codes = torch.zeros(batch, heads, prompt.capacity, self.m, dtype=smallest, device=keys.device)
        index.notes = {"kmeans_iterations": [0.0] * batch, "exact": [False] * batch}
        for row in range(0, batch, prompt.beams):
            same = slice(row, row + prompt.beams)  # the beams of a sample hold one prompt
            iterations = self._cluster(keys[row], prompt, row, centroids[row], codes[row])
            centroids[same], codes[same] = centroids[row].clone(), codes[row].clone()
            index.notes["kmeans_iterations"][same] = [iterations or 0.0] * prompt.beams
            index.notes["exact"][same] = [iterations is None] * prompt.beams
        index.register("centroids", centroids)
        index.register("codes", codes, per=1, home=prompt.host_device)

    def _cluster(self, keys: Tensor, prompt: PrefillKV, row: int, centroids: Tensor, codes: Tensor) -> float | None:
        """Cluster one row's keys [H, S, D] into centroids [H, m, K, d] and codes [H, S, m], in place.

        Returns the mean number of iterations, or None where there are no more keys than centroids.
        """
        length, clusters = prompt.lengths[row], 1 << self.b
        last = length if self.cluster == "prompt" else length - prompt.recent[row]
        count = last - self.n_sinks
        if count <= clusters:
            return None
        parts = keys[:, self.n_sinks : length].float().unflatten(-1, (self.m, -1)).transpose(1, 2).flatten(0, 1)
        iterations = self.max_iter
        if iterations == "adaptive":
            assert isinstance(prompt.calibration, CostModel)
            iterations = prompt.calibration.iterations(count)
        clustering = lloyd(parts[:, :count], init_rows(count, clusters, self.kmeans_seed), iterations)
        labels = clustering.labels
        if last < length:
            labels = torch.cat([labels, assign(parts[:, count:].contiguous(), clustering.centroids)[0]], dim=1)
        centroids.copy_(clustering.centroids.view_as(centroids))
        codes[:, self.n_sinks : length] = labels.view(len(keys), self.m, -1).transpose(1, 2).to(codes.dtype)
        return float(clustering.iterations.float().mean())

    def extend(self, index: KVIndex, key: Tensor, value: Tensor, positions: list[int]) -> None:
        centroids = index["centroids"]
        parts = key.float().unflatten(-1, (self.m, 1, -1)).flatten(0, 2)
        codes = assign(parts, centroids.flatten(0, 2))[0].view(*key.shape[:2], self.m)
        index.write("codes", positions, codes)

    def index_bits_per_token(self, dim: int) -> float:
        return float(self.m * self.b)

    # -- searching ----------------------------------------------------------------------------------------------------

    def relevance(self, retrieval_query: RetrievalQuery) -> Tensor:
        codes = retrieval_query.index["codes"][:, :, : retrieval_query.memory.length]
        retrieval_query.memory.add_index_traffic(codes.shape[1] * self.m * codes.element_size())
        approximate = retrieval_query.reduce_group(
            retrieval_query.logits(dots(retrieval_query.query, retrieval_query.index["centroids"], codes)), self.combine
        )
        exact = retrieval_query.index.notes["exact"]
        if not any(exact):
            return approximate
        searched = retrieval_query.reduce_group(retrieval_query.exact_logits(), self.combine)
        return torch.where(torch.tensor(exact, device=approximate.device)[:, None, None], searched, approximate)


def dots(query: Tensor, centroids: Tensor, codes: Tensor) -> Tensor:
    """Approximate q.k [B, H, G, S] float32 of query [B, H, G, D], centroids [B, H, m, K, d] and codes [B, H, S, m]."""
    b, h, m, clusters = centroids.shape[:4]
    tables = torch.einsum("bhgmd,bhmcd->bhmcg", query.float().unflatten(-1, (m, -1)), centroids)
    # One embedding_bag call adds the m table rows of each token, for all kv and query heads at once.
    tables_before = torch.arange(b * h * m, dtype=torch.int32, device=codes.device).mul_(clusters).view(b, h, 1, m)
    rows = codes.to(torch.int32) + tables_before
    group_dots = torch.nn.functional.embedding_bag(rows.view(-1, m), tables.flatten(0, 3), mode="sum")
    return group_dots.view(b, h, -1, group_dots.shape[-1]).transpose(2, 3).contiguous()
