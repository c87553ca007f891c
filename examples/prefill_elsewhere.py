"""Prefill here, decode there: one process computes a long prompt, another reads its pages as they come, and answers.

Run: python examples/prefill_elsewhere.py
"""

import socket
import subprocess
import sys

from pagedkv.model import Engine, Limits, SamplingParams, serve_prefills
from pagedkv.tiers.transfer import DistributedLink, PrefillServer, RemotePrefill


def prefill(address: str) -> None:
    """Compute what the decode process asks for, in chunks of 64 tokens, until it has ended."""
    server = PrefillServer(DistributedLink(address))
    with Engine.load(tiers=[server], num_frames=128, limits=Limits(prefill_chunk=64)) as engine:
        has_begun = False

        def has_ended() -> bool:
            nonlocal has_begun
            has_begun = has_begun or server.is_connected
            return has_begun and not server.is_connected

        serve_prefills(engine, [server], until=has_ended)
        print(
            "prefill process:", engine.stats().computed_tokens, "tokens computed,", server.stats().stored, "pages sent"
        )
        assert engine.cache.stats().mapped == 0


def decode(address: str) -> None:
    """Answer a prompt without computing it."""
    prompt = list(range(10, 500))
    alone = Engine.load(num_frames=128).generate([prompt], SamplingParams(max_tokens=8))[0].completions[0]
    remote = RemotePrefill(DistributedLink(address))
    with Engine.load(tiers=[remote], num_frames=128) as engine:
        assert remote.wait(60), "the prefill process does not come"
        answer = engine.generate([prompt], SamplingParams(max_tokens=8))[0].completions[0]
        print("decode process:", answer.cached_tokens, "of", len(prompt), "tokens of the prompt came from there")
    assert answer.token_ids == alone.token_ids
    assert answer.cached_tokens == 480  # whole pages of 16; the rest is computed here


if __name__ == "__main__":
    if len(sys.argv) > 1:
        prefill(sys.argv[1])
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        with subprocess.Popen([sys.executable, __file__, address]) as there:
            decode(address)
        assert there.returncode == 0
