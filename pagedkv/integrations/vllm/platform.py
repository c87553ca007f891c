"""The CPU platform of vLLM with our parts: chosen by PAGEDKV_VLLM=1."""

from __future__ import annotations

from typing import Any

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from pagedkv.integrations.vllm import OURS

_Base: Any = resolve_obj_by_qualname(cpu_platform_plugin() or "vllm.platforms.cpu.CpuPlatform")
"""The platform that vLLM itself would choose: that of some processors has a class of its own."""


class PagedCpuPlatform(_Base):  # type: ignore[misc]
    """A platform of CPUs whose attention is ours, unless a layer is MLA, or another backend was asked for by name."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the path of a backend's class. vLLM asks when it makes a layer, before weights are loaded."""
        # Parts of vLLM that the import needs are not ready when vLLM imports this file.
        from pagedkv.integrations.vllm import linears

        linears.install()
        is_other = selected_backend not in (None, AttentionBackendEnum.CUSTOM)
        if is_other or attn_selector_config.use_mla or attn_selector_config.use_sparse:
            path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            return path
        return str(AttentionBackendEnum.CUSTOM.get_path()) if selected_backend is not None else OURS
