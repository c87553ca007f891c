"""Identity: the inputs besides token ids that decide K and V. A page is found only by a prompt with equal inputs.

weights     fingerprint: pages of other weights are forgotten
hooks       the same: hooks of modules inside the model change what layers compute
adapters    salt: pages with other adapters stay, and are not found
autocast    salt, too
dropout     a model in training mode neither shares pages nor finds any
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

_SAMPLES: Final = 8  # elements of each tensor


def fingerprint(model: Any) -> int:
    """Return a number that changes with the weights of `model`, and with the hooks of its modules.

    Of each tensor count its address, its version, which autograd counts up, and elements spread over it: optimizers
    with fused kernels, `parameter.data` and new tensors at an old address leave no other trace. A change that spares
    these elements, without autograd, is not noticed: Pool.forget is for it. The hooks of `patch` do not count.
    """
    tensors = [*model.parameters(), *model.buffers()]
    marks = tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors)
    samples: dict[Any, list[torch.Tensor]] = {}
    with torch.no_grad():
        for each in tensors:
            if type(each) in _PLAIN and each.is_contiguous() and each.numel() and not each.is_meta:
                size = min(_SAMPLES, each.numel())
                some = each.as_strided((size,), (each.numel() // size,), each.storage_offset())
                samples.setdefault((each.dtype, each.device), []).append(some)
        contents = tuple(torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in samples.values())
    hooks = tuple(
        (number, hook)
        for number, module in enumerate(model.modules())
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook, function in hooks.items()
        if not str(getattr(function, "__module__", "")).startswith(__package__)
    )
    return hash((marks, contents, hooks))


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def salt_of(model: Any) -> bytes:
    """Return what a prompt is computed with: the active adapters of PEFT, their scales, and the dtype of autocast."""
    found = set()
    if torch.is_autocast_enabled(model.device.type):
        found.add(f"autocast {torch.get_autocast_dtype(model.device.type)}")
    for module in model.modules() if "peft" in sys.modules else ():
        active = getattr(module, "active_adapters", None) if hasattr(module, "base_layer") else None
        if active is not None and not getattr(module, "disable_adapters", False):
            scales = getattr(module, "scaling", {})
            found.add(repr([(name, scales.get(name)) for name in active] if isinstance(scales, dict) else active))
    return "\n".join(sorted(found)).encode()


def is_random(model: Any) -> bool:
    """Return whether a part of the model is in training mode: with dropout, equal tokens get other K and V."""
    return any(module.training for module in model.modules())
