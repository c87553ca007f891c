"""SGLang's hierarchical cache over the stores of pagedkv.tiers: each page is verified when it is read.

    HiCache thread of SGLang ─▶ batch_exists, batch_get, batch_set ─▶ Records ─▶ Redis, Mooncake, objects

SGLang names a page by the hash of its tokens and of all before them. The name of a record covers this hash, the
weights, the ranks, and dtype, layout and shape of the pages in SGLang's host pool. So servers that differ in one of
them share nothing. A page whose bytes do not fit is a miss.

Start SGLang with

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config \
        '{"backend_name": "pagedkv", "module_path": "pagedkv.integrations.sglang", "class_name": "PagedStorage",
          "weights": "sha256 of the weights", "store": "redis:redis://127.0.0.1:6379/0"}'

`weights` names the weights: SGLang's own name of a model is free to choose. `key_file` names a file of 16 to 64 secret
bytes that all servers share; white space at its ends is left out.

This file knows the interface HiCacheStorage; it must not know frames or tiers.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedkv.errors import InvalidRequest
from pagedkv.tiers import Client, Records, client_of

if TYPE_CHECKING:
    Base = object
else:
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as Base
    except ImportError:
        Base = object

_LOG = logging.getLogger(__name__)


class PagedStorage(Base):
    """A storage backend of SGLang's HiCache. SGLang constructs it, and calls it from threads of its own.

    storage_config: HiCacheStorageConfig. Its extra_config has "weights", "store" (see tiers.client_of) and perhaps
                    "key_file".
    client:         the store, for programs that have one; None: the one that extra_config names.
    Raises:         InvalidRequest
    """

    def __init__(self, storage_config: Any, kwargs: Any = None, *, client: Client | None = None) -> None:
        extra = storage_config.extra_config or {}
        key = Path(extra["key_file"]).read_bytes().strip() if "key_file" in extra else None
        if client is None:
            if not isinstance(extra.get("store"), str):
                raise InvalidRequest(
                    "extra_config names no store; add one, such as 'store': 'redis:redis://HOST:6379/0'"
                )
            client = client_of(extra["store"])
        self._records = Records(client, key)
        ranks = ["pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size"]
        if not storage_config.is_mla_model:  # there all ranks of tensor parallelism keep the same latents
            ranks += ["tp_rank", "tp_size"]
        if not isinstance(extra.get("weights"), str) or not extra["weights"]:
            raise InvalidRequest("extra_config names no weights; add 'weights', such as the digest of the checkpoint")
        self._facts = {name: getattr(storage_config, name) for name in ranks} | {
            "weights": extra["weights"],
            "pages first": storage_config.is_page_first_layout,
            "mla": storage_config.is_mla_model,
        }
        self._salt: bytes | None = None  # until SGLang has told its pool

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take dtype, layout and shape of the pages from SGLang's host pool, as SGLang does before all else."""
        self.mem_pool_host: Any = mem_pool_host
        page = mem_pool_host.get_dummy_flat_data_page()
        pool = {name: str(getattr(mem_pool_host, name, None)) for name in ("dtype", "layout", "page_size", "layer_num")}
        facts = self._facts | {"pool": pool, "page": [str(page.dtype), *page.shape]}
        self._salt = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32).digest()

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        if self._salt is None:
            raise InvalidRequest("SGLang has registered no host pool; call register_mem_pool_host first")
        return [hashlib.blake2b(key.encode(), digest_size=32, key=self._salt).digest() for key in keys]

    def exists(self, key: str) -> bool:
        """Return whether the store has a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many pages the store has, from the first on. 0 if it does not answer."""
        names = self._names(keys)
        try:
            found = self._records.find(names)
        except Exception as error:  # each vendor has errors of its own
            _LOG.warning("the store does not answer: %s", error)
            return 0
        return found.index(False) if False in found else len(found)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read a page into the tensor `target_location`, and return it. None: a miss, and the tensor is as before."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """`get` of each page. Behind a page that is a miss all are misses: SGLang uses a prefix."""
        targets: list[torch.Tensor] = list(target_locations or [])
        if len(targets) != len(keys) or any(not isinstance(target, torch.Tensor) for target in targets):
            raise InvalidRequest(f"{len(keys)} pages and {len(targets)} tensors; give a tensor for each page")
        pages: list[torch.Tensor | None] = [None] * len(keys)
        names = self._names(keys)
        try:
            for at, (key, target) in enumerate(zip(keys, targets, strict=True)):
                num_bytes = target.numel() * target.element_size()
                [content] = self._records.get(names[at : at + 1], num_bytes)
                if isinstance(content, str):
                    _LOG.warning("a page of the store is %s: %s", content, key)
                    break
                page = torch.from_numpy(np.array(content)).view(target.dtype).view(target.shape)
                pages[at] = target.copy_(page)
        except Exception as error:  # each vendor has errors of its own
            _LOG.warning("the store does not answer: %s", error)
        return pages

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store the tensor `value` under `key`. Return whether the store has it now."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """`set` of each page. Return whether the store has all of them now."""
        names = self._names(keys)
        contents = [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for value in values]
        try:
            there = self._records.find(names)
            new = [
                (name, content) for name, content, is_there in zip(names, contents, there, strict=True) if not is_there
            ]
            refusals = self._records.put([name for name, _ in new], [content for _, content in new])
        except Exception as error:  # each vendor has errors of its own
            _LOG.warning("the store does not answer: %s", error)
            return False
        return not any(refusals)

    def close(self) -> None:
        """End the connections, as SGLang asks for when it detaches the storage."""
        self._records.close()

    def clear(self) -> None:
        """Do nothing: other servers may use these pages. The store drops old ones by its own rules."""
