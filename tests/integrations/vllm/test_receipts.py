"""Receipts and hints in vLLM without vLLM: requests and blocks that look like those of vLLM."""

from __future__ import annotations

import random
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv.core import FramePool
from pagedkv.integrations.vllm.frame_queue import FrameQueue
from pagedkv.integrations.vllm.hints import KvHints
from pagedkv.integrations.vllm.receipts import Receipts

PAGE = 4


def request_of(ids: list[int], name: str = "a", salt: str = "", adapter: str = "") -> Any:
    hashes, before = [], b""
    for at in range(0, len(ids) - PAGE + 1, PAGE):
        of_first = salt + adapter if at == 0 else ""
        before = sha256(repr((before, ids[at : at + PAGE], of_first)).encode()).digest()
        hashes.append(before)
    return SimpleNamespace(
        request_id=name, all_token_ids=list(ids), num_prompt_tokens=len(ids), num_tokens=len(ids), block_hashes=hashes,
        cache_salt=salt, num_preemptions=0, kv_hints=None,
    )  # fmt: skip


class World:
    """A prefix cache that vLLM might have, which tells how much of a prompt is found."""

    def __init__(self, most: int = 400_000, unit: int = 1) -> None:
        self.receipts, self.cached = Receipts((PAGE, unit * PAGE), most, 0), set[bytes]()

    def send(self, request: Any) -> str:
        """Send a prompt. Return its reason, as the count of reasons tells it."""
        found = 0
        while found < (len(request.all_token_ids) - 1) // PAGE and request.block_hashes[found] in self.cached:
            found += 1
        before = self.receipts.counts.copy()
        self.receipts.note(request, found * PAGE, len(request.block_hashes) * PAGE)
        self.receipts.tell([(request, found * PAGE)])
        self.cached |= set(request.block_hashes)
        [reason] = self.receipts.counts - before
        return reason


PROMPT = list(range(100, 118))


def test_each_reason_of_a_miss_is_told(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    assert world.send(request_of(PROMPT[:3])) == "short"
    assert world.send(request_of(PROMPT)) == "new"
    assert world.send(request_of(PROMPT)) == "hit"
    assert world.send(request_of(PROMPT, salt="another tenant")) == "new"
    assert world.send(request_of(PROMPT, adapter="lora")) == "other salt"
    assert world.send(request_of([1, *PROMPT])) == "new"
    with caplog.at_level("INFO", "vllm.pagedkv"):
        assert world.send(request_of([*PROMPT[:9], 7, *PROMPT[10:]], name="edited")) == "differs"
    assert "edited: 8 of 18 tokens found; differs at 9: token was 109 and is 7" in caplog.text
    world.cached.remove(request_of(PROMPT).block_hashes[1])
    assert world.send(request_of(PROMPT)) == "evicted"


def test_prompts_of_one_step_are_compared_with_those_planned_before_them() -> None:
    world = World()
    first, second = request_of(PROMPT, "a"), request_of([*PROMPT[:6], 1, 2, 3], "b")
    for request, found in ((first, 0), (second, PAGE)):
        world.receipts.note(request, found, len(request.block_hashes) * PAGE)
    world.receipts.tell([(first, 0), (second, PAGE)])
    assert world.receipts.counts == {"new": 1, "differs": 1}


def test_what_is_found_may_end_at_multiples_of_several_pages() -> None:
    """Layer groups with blocks of other sizes share the hashes of small ones."""
    world, ids = World(unit=4), list(range(100))
    receipts = world.receipts
    receipts.note(request_of(ids), 0, 96)
    receipts.tell([])
    receipts.tell([(request_of(ids), 96)])
    receipts.tell([(request_of([*ids[:50], 7, *ids[51:]]), 48)])
    receipts.tell([(request_of([*ids[:59], 7, *ids[60:]]), 48)])
    receipts.tell([(request_of(ids), 0)])
    assert receipts.counts == {"hit": 1, "differs": 2, "evicted": 1}
    assert receipts._receipt(request_of([*ids[:59], 7, *ids[60:]]), 48).position == 59


def test_a_session_counts_once_and_embeddings_do_not() -> None:
    world, request = World(), request_of(PROMPT)
    for _ in range(3):
        world.receipts.tell([(request, 0)])
    embedded = request_of(PROMPT)
    embedded.prompt_embeds = [[0.5]]
    world.receipts.note(embedded, 0, 16)
    world.receipts.tell([(embedded, 0)])
    assert world.receipts.counts == {"new": 1}


def test_reasons_of_a_long_life_are_right() -> None:
    """Prompts with edits at known places, evictions and salts: each reason and position is the known one."""
    dice, world = random.Random(3), World()
    stems = [[dice.randrange(1000) for _ in range(64)] for _ in range(20)]
    sent: set[int] = set()
    for number in range(2000):
        which = dice.randrange(20)
        stem, deed = stems[which], dice.random()
        if which not in sent:
            assert world.send(request_of(stem, str(number))) == "new"
            sent.add(which)
        elif deed < 0.4:
            at = dice.randrange(1, 59)
            edited = [*stem[:at], 5000 + number, *stem[at + 1 :]]
            assert world.send(request_of(edited, str(number))) == "differs"
        elif deed < 0.6:
            world.cached.remove(request_of(stem).block_hashes[at := dice.randrange(15)])
            request = request_of(stem, str(number))
            assert world.receipts._receipt(request, at * PAGE).position == at * PAGE
            assert world.send(request) == "evicted"
        else:
            assert world.send(request_of(stem, str(number))) == "hit"


def blocks_of(count: int) -> list[Any]:
    return [
        SimpleNamespace(block_id=at, block_hash=str(at), block_hash_num_tokens=(at + 1) * PAGE, is_null=False)
        for at in range(count)
    ]


@pytest.fixture(autouse=True)
def _every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "3")


def test_retained_blocks_are_taken_last_and_tails_first_until_their_time() -> None:
    blocks = blocks_of(20)
    queue = FrameQueue(blocks, FramePool(20, key_bytes=4), share=0.5)
    used = queue.popleft_n(20)
    assert queue.retain(used[:4], until=50) == "accepted"
    assert queue.retain(used[4:8], until=20) == "accepted"
    assert queue.retain(used[8:12], until=90) == "clipped"  # 2 more fit, and nothing is needed later
    queue.append_n(used[::-1])
    order = [block.block_id for block in queue.get_all_free_blocks()]
    assert order == [*range(19, 9, -1), 9, 8, 3, 2, 1, 0, 7, 6, 5, 4]
    assert queue.popleft_n(12) == [blocks[number] for number in order[:12]]
    queue.remove_n(blocks[:1])  # a request finds it
    queue.append_n(blocks[:1])
    queue.expire(20)
    assert [block.block_id for block in queue.get_all_free_blocks()] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert queue.retain(blocks[10:18], until=60) == "clipped"
    assert queue.release(blocks[:4]) == 4
    assert queue.num_free_blocks == 8


def test_what_is_needed_sooner_takes_the_place_of_what_is_needed_later() -> None:
    blocks = blocks_of(20)
    queue = FrameQueue(blocks, FramePool(20, key_bytes=4), share=0.2)
    queue.popleft_n(20)
    assert queue.retain(blocks[:4], until=90) == "accepted"
    assert queue.retain(blocks[4:6], until=99) == "rejected"
    assert queue.retain(blocks[6:8], until=10) == "accepted"
    assert set(queue._until) == {0, 1, 6, 7}


def test_hostile_hints_never_take_a_block_from_who_needs_it() -> None:
    dice, blocks = random.Random(1), blocks_of(64)
    queue = FrameQueue(blocks, FramePool(64, key_bytes=4), share=0.1)
    used: list[Any] = []
    for number in range(3000):
        deed = dice.random()
        if deed < 0.3 and queue.num_free_blocks:
            used += queue.popleft_n(dice.randint(1, queue.num_free_blocks))
        elif deed < 0.6:
            dice.shuffle(used)
            gone, used = used[: (half := len(used) // 2)], used[half:]
            (queue.append_n if dice.random() < 0.8 else queue.prepend_n)(gone)
        elif deed < 0.9:
            answer = queue.retain(dice.sample(used, min(len(used), 9)), dice.choice([0, 1e18, number, number + 5]))
            assert answer in ("accepted", "clipped", "rejected")
        elif deed < 0.95:
            queue.release(dice.sample(blocks, 8))
        else:
            queue.expire(number)
        assert len(queue._until) <= 6
        assert queue.num_free_blocks == 64 - len(used) == len(queue.get_all_free_blocks())


class Pool:
    """Notes what the hints of a request ask of the pool of blocks."""

    def __init__(self) -> None:
        self.free_block_queue, self.calls = self, list[tuple[Any, ...]]()

    def retain(self, *asked: Any) -> str:
        self.calls.append(("retain", *asked))
        return "clipped"

    def demote(self, blocks: Any) -> str:
        self.calls.append(("demote", blocks))
        return "accepted"


def action(kind: str, version: str = "1", **payload: Any) -> Any:
    return SimpleNamespace(action_id="1", action_type=kind, action_version=version, payload=payload)


def test_blocks_of_another_pool_are_left_alone() -> None:
    pool, request = Pool(), request_of(PROMPT)
    mine, others = blocks_of(3), blocks_of(3)
    for block in others:
        block.pool = object()
    request.kv_hints = SimpleNamespace(actions=[action("demote")])
    KvHints(pool, has_connector=False).obey(request, [mine, others], now=0.0)
    assert pool.calls == [("demote", mine)]


def test_an_envelope_is_executed_action_by_action(caplog: pytest.LogCaptureFixture) -> None:
    blocks, pool, request = blocks_of(4), Pool(), request_of(PROMPT)
    blocks[3].block_hash = None
    wrong = [
        action("Retain"), action("Retain", seconds=-1), action("pin", seconds=10**400), action("evict"),
        action("demote", seconds=2),
        action("pin", "9", seconds=2), action("demote", tokens=0), action("demote", tokens="4"), action("demote", x=1),
    ]  # fmt: skip
    asked = [action("Retain", seconds=30, tokens=9), action("DEMOTE"), action("prefetch"), *wrong]
    request.kv_hints = SimpleNamespace(actions=asked)
    with caplog.at_level("DEBUG", "vllm.pagedkv"):
        KvHints(pool, has_connector=False).obey(request, [blocks], now=100.0)
    assert pool.calls == [("retain", blocks[:2], 130.0), ("demote", blocks[:3])]
    answers = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert answers == ["clipped", "accepted", "missing", *["rejected"] * len(wrong)]
