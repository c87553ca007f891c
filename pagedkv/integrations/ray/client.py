"""A reply that outlives its replica: if the replica dies, another one goes on behind the last token that came.

The prompt and the tokens so far are sent again. The new replica finds the pages that it knows of them, and computes the
rest. A token is given to the caller once, when it has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from pagedkv.engine import SamplingParams
from pagedkv.errors import EngineStopped, InvalidRequest

RESUMABLE: Final = "max_tokens temperature top_k top_p min_p seed stop_ids ignore_eos logit_bias allowed_ids".split()
"""Fields of SamplingParams that mean the same for the rest of a reply."""


async def generate(
    handle: DeploymentHandle, token_ids: Sequence[int], params: Mapping[str, Any] | None = None, *,
    tenant: bytes = b"", deaths: int = 10, found: list[int] | None = None,
) -> AsyncGenerator[int, None]:  # fmt: skip
    """Yield the tokens of a reply. A caller that ends before its end (`aclose`) ends it on the replica, too.

    params: fields of SamplingParams, of those in RESUMABLE. With temperature 0 the tokens are those of an engine that
            lives; else the tokens after a death are drawn anew, also with a seed.
    deaths: replicas of this reply that may die, or be closed.
    found:  a list to which the number of tokens is appended that each replica found in its pool.
    Raises: InvalidRequest for other params, or wrong values of these; as PagedReplica.generate
    """
    params = dict(params or {})
    if other := sorted(set(params) - set(RESUMABLE)):
        raise InvalidRequest(f"params has {', '.join(other)}; a reply can go on elsewhere with {', '.join(RESUMABLE)}")
    most, made = SamplingParams(**params).max_tokens, list[int]()
    method = handle.options(stream=True).generate
    while True:
        response = method.remote([*token_ids, *made], params | {"max_tokens": most - len(made)}, tenant)
        is_first = True
        try:
            async for tokens, is_last, cached in response:
                if found is not None and is_first:
                    found.append(cached)
                is_first = False
                for token in tokens:
                    made.append(token)
                    yield token
                if is_last:
                    return
        except (RayActorError, RayTaskError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, EngineStopped):
                raise error.cause or error from None
            deaths -= 1
            if deaths < 0:
                raise
            if len(made) == most:  # it died between the last token and the end
                return
        except (GeneratorExit, asyncio.CancelledError):  # the caller has left
            response.cancel()
            raise
