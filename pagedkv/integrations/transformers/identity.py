"""Identity: the inputs besides token ids that decide K and V. A page is found only by a prompt with equal inputs.

weights     fingerprint: pages of other weights are forgotten
hooks       the same: hooks of modules inside the model change what layers compute
adapters    salt: pages with other adapters stay, and are not found
rows        a model whose adapters differ by row or by position neither shares pages nor finds any
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
        if _is_hooked_by_peft(module):
            found.add("an adapter for each row")
        active = getattr(module, "active_adapters", None) if hasattr(module, "base_layer") else None
        if active is not None and not getattr(module, "disable_adapters", False):
            scales = getattr(module, "scaling", {})
            found.add(repr([(name, scales.get(name)) for name in active] if isinstance(scales, dict) else active))
    return "\n".join(sorted(found)).encode()


def is_reproducible(model: Any) -> bool:
    """Return whether equal tokens get equal K and V.

    They do not with dropout, in training mode, nor if PEFT has an adapter for each row (`adapter_names`) or from some
    token on (aLoRA): it hooks its layers while such a call runs.
    """
    modules = list(model.modules())
    is_random = any(module.training for module in modules)
    return not is_random and ("peft" not in sys.modules or not any(_is_hooked_by_peft(module) for module in modules))


def makes_own_inputs(model: Any) -> bool:
    """Return whether something else than the class of the model makes the inputs of its forward passes.

    PEFT puts the tokens of prompt tuning and of prefix tuning before a prompt in this way.
    """
    name = "prepare_inputs_for_generation"
    replaced = vars(model).get(name)
    return replaced is not None and getattr(replaced, "__func__", None) is not getattr(type(model), name)


def _is_hooked_by_peft(module: Any) -> bool:
    functions = (getattr(hook, "func", hook) for hook in module._forward_pre_hooks.values())  # they are partial
    return any(str(getattr(function, "__module__", "")).startswith("peft.") for function in functions)
