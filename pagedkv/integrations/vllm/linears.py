"""Linear layers of vLLM on CPUs: `pagedkv.linear` computes steps of few tokens.

vLLM asks a function of its own what a layer without quantisation computes with, once its weights are loaded. `install`
puts ours in front of it:

    layer                                                    computes with
    a matrix of float32, bfloat16 or float16                 pagedkv.linear: weights stay rows, as they were loaded
    other weights, a processor with AMX, AMD's zentorch      what vLLM chooses

additional_config={"pagedkv_linears": false} leaves all layers to vLLM.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from pagedkv import linear
from pagedkv.integrations.vllm.additional_config import LINEARS, option_in

_LOGGER: Final = init_logger("vllm.pagedkv")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def install() -> None:
    """Put `choose` in front of vLLM's function. A second call does nothing."""
    host = utils.dispatch_cpu_unquantized_gemm
    if hasattr(host, "is_pagedkv"):  # another plug-in may have wrapped it
        return

    @wraps(host)
    def choose(layer: Any, remove_weight: bool) -> None:
        if not is_served(layer.weight):
            host(layer, remove_weight)
            return
        _LOGGER.info_once("Linear layers by pagedkv: steps of few tokens, weights of %s", layer.weight.dtype)
        layer.cpu_linear = linear

    vars(choose)["is_pagedkv"] = True
    utils.dispatch_cpu_unquantized_gemm = choose


def is_served(weight: torch.Tensor) -> bool:
    """Return whether `pagedkv.linear` computes with `weight`, in the engine that is being made."""
    config = get_current_vllm_config_or_none()
    asked = option_in(None if config is None else config.additional_config, LINEARS)
    has_better = torch.cpu._is_amx_tile_supported() or current_platform.is_zen_cpu()
    return asked and not has_better and not weight.is_meta and weight.ndim == 2 and weight.dtype in _DTYPES
