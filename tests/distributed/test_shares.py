"""The shares of all ranks make up the model, and no rank reads, or allocates, more than its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.checkpoint import BUNDLED, weights
from pagedkv.checkpoint.config import ModelConfig
from pagedkv.checkpoint.share import WHOLE, Share
from pagedkv.distributed import follower
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.linear.matrix import Matrix
from tests.model.conftest import CHECKPOINTS

from . import jobs
from .threads import on_threads

ROWS = ("qkv", "qkv_bias", "gate_up", "gate_up_bias")
COLUMNS = ("out", "down")


def loaded(folder: Path, share: Share = WHOLE, kind: str | None = None) -> weights.Weights:
    config, cpu = ModelConfig.load(folder), torch.device("cpu")
    return weights.load_weights(folder, config, dtype=torch.float32, device=cpu, kind=kind, share=share)


def dense(value: Any) -> torch.Tensor:
    return value.dense(torch.float32) if isinstance(value, Matrix) else value


def joined(name: str, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Return the whole tensor from the shares of all ranks."""
    if name in COLUMNS:
        return torch.cat(parts, dim=1)
    if name not in ROWS:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    size, dim = len(parts), config.head_dim
    heads = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
    heights = [height // size for height in (heads if name.startswith("qkv") else [config.intermediate_size] * 2)]
    split = [part.split_with_sizes(heights) for part in parts]
    return torch.cat([each[i] for i in range(len(heights)) for each in split])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_the_shares_make_up_the_weights(name: str, size: int, folder: Callable[..., Path]) -> None:
    made = folder(name)
    whole, parts = loaded(made), [loaded(made, Share(rank, size)) for rank in range(size)]
    config = ModelConfig.load(made)
    assert torch.equal(torch.cat([part.embedding for part in parts]), whole.embedding)
    assert torch.equal(torch.cat([dense(part.head) for part in parts]), dense(whole.head))
    for layer, wanted in enumerate(whole.layers):
        for field in fields(wanted):
            if (tensor := getattr(wanted, field.name)) is not None:
                shares = [getattr(part.layers[layer], field.name) for part in parts]
                assert torch.equal(joined(field.name, shares, config), tensor), field.name


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_shares_have_the_integers_of_the_whole(kind: str, folder: Callable[..., Path]) -> None:
    made = folder("llama", hidden_size=128, intermediate_size=256, head_dim=32)
    whole, parts = loaded(made, kind=kind), [loaded(made, Share(rank, 2), kind) for rank in range(2)]
    for layer, wanted in enumerate(whole.layers):
        for name in (*COLUMNS, "gate_up", "qkv"):
            shares = [dense(getattr(part.layers[layer], name)) for part in parts]
            assert torch.equal(joined(name, shares, ModelConfig.load(made)), dense(getattr(wanted, name)))


def test_a_rank_reads_and_allocates_only_its_share(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, allocated = list[tuple[str, int]](), list[int]()
    opened, allocate = weights._opened, weights.huge_pages.allocate

    class Recorded:
        """A file that records the bytes of whole tensors that are taken from it."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self.file.get_tensor(name)
            read.append((name, tensor.dim()))
            return tensor

    def counted(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return allocate(num_bytes)

    monkeypatch.setattr(weights, "_opened", lambda *path: Recorded(opened(*path)))
    monkeypatch.setattr(weights.huge_pages, "allocate", counted)
    loaded(folder("qwen2"))
    assert {dims for _, dims in read} == {1, 2}
    read.clear()
    for rank in range(2):
        loaded(folder("qwen2"), Share(rank, 2))
    assert {dims for _, dims in read} == {1}  # norms, and biases behind a sum
    whole, *shares = allocated
    assert all(share < 0.51 * whole for share in shares)


def test_the_bytes_of_weights_and_of_kv_halve(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0, as its engine has them, and on the follower."""
    pools = list[int]()

    class Recorded(follower.Storage):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            pools.append(self.bytes.numel())

    monkeypatch.setattr(follower, "Storage", Recorded)
    made = folder("llama")
    job = jobs.job_of(made, [[1, 2, 3]])
    whole = jobs.alone(job)
    half = on_threads(2, lambda ranks: jobs.led(ranks, job), lambda ranks: jobs.followed(ranks, job))
    assert [half["pool_bytes"], *pools] == [whole["pool_bytes"] / 2] * 2
    for num_bytes in (half["weight_bytes"], jobs.bytes_of(loaded(made, Share(1, 2)))):
        assert 0.5 <= num_bytes / whole["weight_bytes"] < 0.51  # norms are whole on each rank


@pytest.mark.parametrize(
    ("size", "sizes", "named"),
    [
        (3, {}, ["8 attention heads", "4 KV heads", "128 columns of the MLP", ": 1, 2, 4"]),
        (4, {"num_key_value_heads": 2}, ["2 KV heads", ": 1, 2"]),
        (2, {"vocab_size": 97}, ["97 tokens in the vocabulary", ": 1"]),
        (2, {"intermediate_size": 63}, ["63 columns of the MLP", ": 1"]),
    ],
)
def test_unequal_shares_are_refused_in_one_sentence(
    size: int, sizes: dict[str, int], named: list[str], folder: Callable[..., Path]
) -> None:
    config = ModelConfig.load(folder("llama", **sizes))
    with pytest.raises(InvalidRequest) as refusal:
        config.share(size)
    assert str(refusal.value).startswith(f"{size} ranks cannot have equal shares of this model")
    assert all(text in str(refusal.value) for text in named)
    assert "\n" not in str(refusal.value)


def test_two_ranks_can_share_the_bundled_checkpoint() -> None:
    share = ModelConfig.load(BUNDLED).share(2)
    assert (share.num_heads, share.num_kv_heads, share.vocab_size) == (2, 1, 660)


def test_groups_of_columns_that_a_rank_would_cut_are_refused(folder: Callable[..., Path]) -> None:
    made = folder("llama", hidden_size=128, intermediate_size=192, head_dim=32)
    assert loaded(made, kind="int8")
    with pytest.raises(InvalidRequest, match=r"down_proj.* has 96 on each of 2 ranks"):
        loaded(made, Share(0, 2), "int8")
