"""Memory arithmetic: equal to what a cache, a manager and loaded weights take."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace

import pytest
from safetensors.torch import load_file, save_file

from pagedkv import KVSpec, PagedKVCache
from pagedkv.core import MemoryManager
from pagedkv.core.tables.layer_groups import Group
from pagedkv.engine import Engine, Limits, SamplingParams
from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.fit import GROUP, WEIGHT_BITS, Footprint, footprint_of_config
from pagedkv.engine.checkpoint.tokenizer import Tokenizer
from pagedkv.engine.checkpoint.weights import DeltaWeights
from pagedkv.engine.model.decoder import Decoder
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.linear import matrix
from pagedkv.kernels.linear.matrix import Matrix
from tests.engine.conftest import CHECKPOINTS, HYBRIDS


def bytes_of(decoder: Decoder) -> dict[int, int]:
    """The bytes of each tensor of a decoder, by its address: a tied head counts once."""
    parts = [getattr(layer, field.name) for layer in decoder.weights.layers for field in fields(layer)]
    parts = [each for part in parts for each in (part if isinstance(part, DeltaWeights) else (part,))]
    parts += [decoder.weights.embedding, decoder.weights.norm, decoder.weights.head]
    found: dict[int, int] = {}
    for part in parts:
        for tensor in (part.stored, part.scales) if isinstance(part, Matrix) else (part,):
            if tensor is not None:
                found[tensor.data_ptr()] = tensor.nbytes
    return found


@pytest.mark.parametrize("name", [*CHECKPOINTS, *HYBRIDS])
def test_weights_are_those_that_a_decoder_loads(checkpoint, name):
    decoder = checkpoint(name).decoder()
    config = decoder.config
    footprint = footprint_of_config(config, config.specs(dtype="float32"))
    assert footprint.weight_bytes == sum(bytes_of(decoder).values())
    tied = decoder.weights.embedding is decoder.weights.head
    assert footprint.weight_bytes - footprint.read_bytes == (0 if tied else decoder.weights.embedding.nbytes)


def test_states_of_a_hybrid_are_those_of_its_cache_and_take_memory_from_pages(checkpoint):
    config = checkpoint("qwen3_5").decoder().config
    for dtype in ("float32", "bfloat16"):
        found = footprint_of_config(config, config.specs(dtype=dtype))
        assert found.state_bytes == config.state_spec(dtype).frame_bytes
    states, memory = 3 * found.state_bytes, found.weight_bytes + 2**22
    count, of_each = found.sequences(found.num_frames(memory), 100), found.frames(100) * found.frame_bytes + states
    assert count * of_each <= 2**22 < (count + 2) * of_each  # states take whole frames
    assert count < replace(found, state_bytes=0).sequences(found.num_frames(memory), 100)
    assert found.tokens_per_s(10**9, 100) == 10**9 / (found.read_bytes + found.kv_bytes(100) + 2 * found.state_bytes)
    assert found.longest_context(found.frames(100) + found.state_frames) == 112  # whole frames of 16 tokens


@pytest.mark.parametrize("kind", WEIGHT_BITS)
def test_weights_of_integers_are_those_that_a_decoder_loads(kind):
    decoder = Decoder.load(BUNDLED, weights=kind)
    footprint = footprint_of_config(decoder.config, decoder.config.specs(), kind)
    assert footprint.weight_bytes == sum(bytes_of(decoder).values())


def test_a_tied_head_of_integers_is_a_matrix_beside_the_embedding(tmp_path):
    folder = shutil.copytree(BUNDLED, tmp_path / "tied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    for kind in (None, "int8"):
        decoder = Decoder.load(folder, weights=kind)
        footprint = footprint_of_config(decoder.config, decoder.config.specs(), kind)
        assert footprint.weight_bytes == sum(bytes_of(decoder).values())
        unread = decoder.weights.embedding.nbytes if kind else 0
        assert footprint.weight_bytes - footprint.read_bytes == unread


def test_integers_that_the_matrices_cannot_have_are_refused(checkpoint):
    assert GROUP == matrix.GROUP
    decoder = checkpoint("llama").decoder()
    with pytest.raises(InvalidRequest, match="a matrix of this model has 96 columns"):
        footprint_of_config(decoder.config, decoder.config.specs(), "int8")


@pytest.mark.parametrize(("name", "chunk", "block_size"), [("gemma3", 1, 16), ("mistral", 7, 5), ("gemma2", 2048, 16)])
def test_the_engine_takes_a_context_in_the_frames_that_are_counted_for_it(checkpoint, name, block_size, chunk):
    decoder = checkpoint(name).decoder()
    specs = decoder.config.specs(block_size=block_size, dtype="float32")
    footprint = replace(footprint_of_config(decoder.config, specs), at_once=chunk)
    length = 60
    for frames in (footprint.frames(length - 1), footprint.frames(length - 1) - 1):
        cache = PagedKVCache(specs, layer_groups=decoder.config.layer_groups(), num_frames=frames)
        assert footprint.frame_bytes == cache.frame_bytes
        for num_prompt in (3, length - 3):
            engine = Engine(decoder, Tokenizer.load(BUNDLED), cache, limits=Limits(prefill_chunk=chunk))
            params = SamplingParams(max_tokens=length - num_prompt, ignore_eos=True)
            if frames < footprint.frames(length - 1):
                with pytest.raises(InvalidRequest, match=f"take {frames + 1} frames of {block_size} tokens"):
                    engine.submit([5] * num_prompt, params)
                continue
            [request] = engine.generate([[5] * num_prompt], params)
            assert len(request.completions[0].token_ids) == length - num_prompt
            assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("chunk", [1, 16])
def test_as_many_sequences_grow_in_a_pool_as_are_counted(window, chunk):
    """Each in its turn computes a prompt of 60 tokens, then all decode together."""
    spec = KVSpec(1, 1, 32, block_size=4, window=window, dtype="float32")
    for num_frames in (0, 15, 45):
        count = Footprint((spec,), 0, 0, chunk).sequences(num_frames, 80)
        mm = MemoryManager(max(1, num_frames), 4, prefix_cache=False, groups=[Group(window)])
        spaces = [mm.open() for _ in range(count)]
        for space in spaces:
            while len(space) < 60:
                mm.commit(mm.plan([space], [min(chunk, 60 - len(space))]), None)
        for _ in range(20 if spaces else 0):
            mm.commit(mm.plan(spaces, [1] * count), None)
        if window is None:
            assert count == num_frames // 20
        else:
            assert count or num_frames < spec.pages(window - 1 + chunk) + 1


def test_the_longest_context_is_the_last_that_fits():
    for window in (None, 100):
        footprint = Footprint((KVSpec(2, 1, 8, window=window), KVSpec(2, 1, 8)), 1000, 1000)
        for num_frames in (0, 1, 2, 7, 40):
            longest = footprint.longest_context(num_frames)
            assert longest is not None
            assert footprint.frames(longest) <= num_frames < footprint.frames(longest + 1)
    windowed = (KVSpec(2, 1, 8, window=100),)
    assert Footprint(windowed, 0, 0, at_once=1).longest_context(8) is None
    assert Footprint(windowed, 0, 0).longest_context(8) == 8 * 16  # the chunk of a longer prompt needs more
    assert footprint.num_frames(999) == 0
    assert footprint.num_frames(1000 + 3 * footprint.frame_bytes) == 3
