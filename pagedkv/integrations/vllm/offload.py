"""vLLM's OffloadingConnector over tiers of pagedkv: blocks come back from a disk or a store, each verified.

    blocks of vLLM ◀─▶ host memory of vLLM (cpu_bytes_to_use) ◀─▶ tiers of pagedkv, the fastest first

    vllm serve ... --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "PagedOffloadingSpec",
            "spec_module_path": "pagedkv.integrations.vllm.offload", "cpu_bytes_to_use": 17179869184,
            "tiers": ["disk:200GiB:/var/cache/pagedkv"], "weights": "sha256 of the weights"}}'

vLLM asks the tiers in its scheduler, and copies what they have into its host memory before a request may use it. A
chunk that does not arrive, or whose checksum does not fit, is a miss: its tokens are computed. vLLM's own host memory
has no checksums. On a GPU, vLLM copies between host memory and blocks; on a CPU, where vLLM has no such copies, this
file makes them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingWorker,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.vllm import require_known_vllm, vllm_version
from pagedkv.integrations.vllm.chunks import ChunkCopies, TierUnderChunks
from pagedkv.tiers import Op, tiers_of

ELSEWHERE = ("engine_id", "extra_config", "enable_kv_cache_events")
"""Fields of vLLM's OffloadingConfig that do not decide what the bytes of a chunk mean."""

SIZES = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
"""Fields of its parallel part that do: each worker has a part of a chunk."""


def _facts_of(config: Any, weights: str) -> dict[str, Any]:
    """Return all that vLLM tells of what the bytes of a chunk mean. config: vLLM's OffloadingConfig.

    vLLM 0.33 tells max_model_len, too, and 0.32 does not. It is a fact: LongRoPE has other keys beyond the length that
    a model was first trained for.
    """
    facts = {name: value for name, value in asdict(config).items() if name not in ELSEWHERE}
    facts["parallel"] = {name: facts["parallel"][name] for name in SIZES}
    return facts | {"weights": weights, "vllm": vllm_version(), "platform": type(current_platform).__name__}


class PagedOffloadingSpec(TieringOffloadingSpec):
    """vLLM's host memory over tiers of pagedkv.

    extra_config: "cpu_bytes_to_use", the bytes of host memory; "tiers", texts as `pagedkv serve --tier` takes them;
        "weights", a name for the weights, such as the digest of the checkpoint.
    """

    def __init__(self, config: Any) -> None:
        require_known_vllm("PagedOffloadingSpec", "spec_name")
        super().__init__(config)
        self._worker: Any = None
        tiers, weights = self.extra_config.get("tiers"), self.extra_config.get("weights", "")
        if not isinstance(tiers, list) or not tiers:
            raise InvalidRequest("extra_config names no tiers; add a list, such as 'tiers': ['disk:200GiB:FOLDER']")
        ours = [{"type": "_PagedTier", "module_path": __name__, "tier": tier, "weights": weights} for tier in tiers]
        self.secondary_tier_configs: list[dict[str, Any]] = [*self.secondary_tier_configs, *ours]

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return what copies between blocks and host memory."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _CpuWorker(kv_caches, region, self.blocks_per_chunk)
        worker: OffloadingWorker = self._worker
        return worker


class _PagedTier(SecondaryTierManager):
    """One tier of pagedkv below vLLM's host memory. tier: its text. weights: a name for the weights."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None,
        *, tier: str, weights: str = "",
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not isinstance(weights, str) or not weights:
            raise InvalidRequest("extra_config names no weights; add 'weights', such as the digest of the checkpoint")
        [made] = tiers_of([tier])
        self._under = TierUnderChunks(primary_kv_view, made, _facts_of(offloading_spec.config, weights))

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether the tier seems to have a chunk."""
        return LookupResult.HIT if self._under.has(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks."""
        self._begin(Op.STORE, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load chunks."""
        self._begin(Op.LOAD, job_metadata)

    def _begin(self, op: Op, job: TransferJob) -> None:
        self._under.begin(op, job.job_id, list(job.keys), job.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended. A chunk that was not verified is a miss."""
        return [
            JobResult(
                job_id=each.number,
                success=len(each.loaded) == len(each.keys),
                successful_keys=each.loaded or None,
                transfer_time=each.seconds,
                transfer_bytes=each.num_bytes,
            )
            for each in self._under.ended()
        ]

    def has_pending_work(self) -> bool:
        """Return whether jobs are under way."""
        return self._under.num_pending > 0

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Count a use of chunks."""
        self._under.touch(keys)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Let each chunk be stored when it is computed."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no job touches vLLM's host memory."""
        self._under.drain()

    def shutdown(self) -> None:
        """Close the tier."""
        self._under.close()


class _CpuWorker(OffloadingWorker):
    """Copies between blocks and host memory on a CPU, made when they are asked for."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        blocks, chunks = [], []
        for each in kv_caches.tensors:
            size = each.page_size_bytes
            blocks.append(each.tensor.view(torch.int8).view(-1, size))
            chunks.append(
                region.create_next_worker_view(size * blocks_per_chunk).unflatten(1, (blocks_per_chunk, size))
            )
        groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        self._region, self._copies = region, ChunkCopies(blocks, chunks, groups)
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Copy blocks to host memory."""
        return self._move(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        """Copy chunks of host memory to blocks. expedited, of vLLM 0.33: at once, as each copy is."""
        return self._move(job_id, dst_spec, src_spec, to_host=False)

    def _move(self, job_id: int, blocks: GPULoadStoreSpec, chunks: Any, *, to_host: bool) -> bool:
        began = time.perf_counter()
        num_bytes = self._copies.move(
            blocks.block_ids, chunks.block_ids, blocks.group_sizes, blocks.block_indices, to_host=to_host
        )
        self._ended.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the copies that were made since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: each copy was made when it was asked for."""

    def shutdown(self) -> None:
        """Give the host memory back."""
        self._copies.close()
        self._region.cleanup()
