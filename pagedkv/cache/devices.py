"""Devices: the name that a user gives to a device, checked before memory is taken on it. Knows torch."""

from __future__ import annotations

import torch

from pagedkv.errors import InvalidRequest


def device_of(device: torch.device | str) -> torch.device:
    """Return a device. Raises: InvalidRequest for one that torch does not know, or a GPU that this machine lacks"""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(
            f"device is {device!r}, which torch does not know ({reason}); give 'cpu' or 'cuda'"
        ) from None
    if found.type == "cuda" and (found.index or 0) >= (count := torch.cuda.device_count()):
        raise InvalidRequest(f"device is {str(found)!r}; torch finds {count} GPUs here, give one of them or 'cpu'")
    return found
