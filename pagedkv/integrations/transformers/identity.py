"""Identity: the inputs besides token ids that decide K and V. A page is found only by a prompt with equal inputs.

weights     fingerprint: pages of other weights are forgotten
hooks       the same: hooks of modules inside the model, and of all modules, change what layers compute
forwards    the same: a module whose `forward` was replaced, on the module, its class or a base of it, computes
            something else
salt        identity_of: the bytes that a user gives. Pages with other bytes stay, and are not found
adapters    identity_of, too
autocast    identity_of, too
rows        a model whose adapters differ by row or by position neither shares pages nor finds any
dropout     a model in training mode neither shares pages nor finds any
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from typing import Any, Final

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from pagedkv.errors import InvalidRequest

_SAMPLES: Final = 8  # elements of each tensor


def fingerprint(model: Any) -> tuple[object, ...]:
    """Return what changes with the weights of `model`, and with the hooks and the forwards of its modules.

    Of each tensor count its address, its version, which autograd counts up, and elements spread over it: optimizers
    with fused kernels, `parameter.data` and new tensors at an old address leave no other trace. A change that spares
    these elements, without autograd, is not noticed: Pool.forget is for it. The hooks of `patch` do not count, nor
    those with which PEFT gives rows their adapters: no pages are shared then (is_reproducible).

    A forward counts as a weak reference: its address alone may be that of a later function, and a strong reference
    would keep the model alive.
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
    modules = list(model.modules())
    hooks = tuple(
        (number, hook)
        for number, module in enumerate(modules)
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook, function in hooks.items()
        if not _module_of(function).startswith(__package__)
        and not (hooks is module._forward_pre_hooks and _is_of_peft(function))
    )
    forwards = tuple(_reference(vars(module).get("forward") or type(module)) for module in modules)
    of_classes = tuple(
        _reference(vars(base)["forward"])
        for kind in dict.fromkeys(type(module) for module in modules)
        for base in kind.__mro__
        if "forward" in vars(base)
    )
    of_all = (*_global_forward_hooks, *_global_forward_pre_hooks)
    return marks, contents, hooks, of_all, forwards, of_classes


def _reference(function: Any) -> object:
    try:
        return weakref.ref(function)
    except TypeError:  # a callable object with slots
        return function


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def identity_of(model: Any, salt: bytes) -> bytes:
    """Return the bytes by which prompts are told apart: the user's `salt`, and what `model` computes prompts with.

    b"" for a prompt without any. Each field begins with its length, so no salt reads like other fields.
    model: None for a cache that no patched model has used. Raises: InvalidRequest for a salt that is no bytes
    """
    if not isinstance(salt, bytes):
        raise InvalidRequest(f"the salt of a PagedCache is a {type(salt).__name__}; give bytes")
    autocast, adapters = ("", []) if model is None else (_autocast_of(model), _adapters_of(model))
    if not salt and not autocast and not adapters:
        return b""
    packed = hashlib.sha256(_joined([each.encode() for each in adapters])).digest() if adapters else b""
    return _joined([salt, autocast.encode(), packed])


def _joined(fields: list[bytes]) -> bytes:
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def _autocast_of(model: Any) -> str:
    """Return the dtype of autocast on the device of `model`, or "" without autocast."""
    device = model.device.type
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""


def _adapters_of(model: Any) -> list[str]:
    """Return the number of each module with active adapters of PEFT, with their names and scales."""
    found = []
    for number, module in enumerate(model.modules() if "peft" in sys.modules else ()):
        if _is_hooked_by_peft(module):
            found.append(f"{number} has an adapter for each row")
        active = getattr(module, "active_adapters", None) if hasattr(module, "base_layer") else None
        if active and not getattr(module, "disable_adapters", False):
            scales = getattr(module, "scaling", {})
            found.append(
                repr((number, [(name, scales.get(name)) for name in active] if isinstance(scales, dict) else active))
            )
    return found


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
    return any(_is_of_peft(hook) for hook in module._forward_pre_hooks.values())


def _is_of_peft(hook: Any) -> bool:
    return _module_of(hook).startswith("peft.")


def _module_of(function: Any) -> str:
    return str(getattr(getattr(function, "func", function), "__module__", ""))  # hooks of PEFT are partial
