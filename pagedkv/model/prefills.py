"""Prefills: the loop of a process that computes prompts for others, which decode them.

    take       the prompts that the other side asks for
    submit     each as a request of one token
    step       the pages of each chunk go out when it is committed
    finish     no further page of the prompt comes

The loop knows requests and prompts; it must not know how pages travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from pagedkv import debug
from pagedkv.errors import PagedKVError
from pagedkv.sampling.params import SamplingParams

if TYPE_CHECKING:
    from pagedkv.model.engine import Engine
    from pagedkv.model.request import Request
    from pagedkv.tiers.transfer import AskedPrompt, PrefillServer

WAIT: Final = 0.02
"""Seconds that an idle loop waits for a prompt."""
PREFILL: Final = SamplingParams(max_tokens=1, ignore_eos=True)


def serve_prefills(
    engine: Engine, servers: Sequence[PrefillServer], *, until: Callable[[], bool] = lambda: False
) -> None:
    """Compute the prompts that the other sides of `servers` ask for, until `until()` is true.

    servers: tiers of the engine. A prompt that the engine refuses is computed by the side that asked for it, and so is
        one that is not computed when `until()` is true.
    """
    under_way: list[tuple[PrefillServer, AskedPrompt, Request]] = []
    while not until():
        for server in servers:
            is_idle = not (engine.has_work or under_way)
            for prompt in server.take(WAIT / len(servers) if is_idle else 0.0):
                if (request := _submit(engine, prompt)) is None:
                    server.finish(prompt, is_computed=False)
                else:
                    under_way.append((server, prompt, request))
        for _, prompt, request in under_way:
            if prompt.is_cancelled and not request.finished:
                engine.cancel(request)
        if engine.has_work:
            engine.step()
        for server, prompt, request in [one for one in under_way if one[2].finished]:
            server.finish(prompt)
            under_way.remove((server, prompt, request))
    for server, prompt, request in under_way:
        engine.cancel(request)
        server.finish(prompt, is_computed=False)


def servers_at(addresses: Sequence[str]) -> list[PrefillServer]:
    """Return a server for each address, see `link_at`, with the key in PAGEDKV_TIER_KEY. Raises: InvalidRequest"""
    from pagedkv.tiers.transfer import PrefillServer, link_at  # torch.distributed

    return [PrefillServer(link_at(address), key=debug.tier_key()) for address in addresses]


def network_address(address: str) -> str:
    """Return the "HOST:PORT" of an address, see `link_at`."""
    from pagedkv.tiers.transfer import kind_and_address

    return kind_and_address(address)[1]


def _submit(engine: Engine, prompt: AskedPrompt) -> Request | None:
    """Queue a prompt. None: it is not wanted any more, or the engine cannot compute it."""
    if prompt.is_cancelled or prompt.salt:
        return None
    try:
        return engine.submit(prompt.token_ids.tolist(), PREFILL, tenant=prompt.tenant)
    except PagedKVError:
        return None
