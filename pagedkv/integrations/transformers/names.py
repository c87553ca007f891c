"""Names: put the name of our attention function into a model's config, and later the model's own name again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class NameInConfig:
    """A name of ours, in the configs of the models that use it now. Models may share a config, and threads a model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._users: dict[int, set[Any]] = {}  # id(config) → users that need our name there
        self._own: dict[int, str] = {}  # id(config) → the name before the first user

    def put(self, config: Any, user: Any) -> None:
        """Put our name into `config` until its last user is taken out. user: any key."""
        with self._lock:
            users = self._users.setdefault(id(config), set())
            if not users:
                self._own[id(config)] = config._attn_implementation
                config._attn_implementation = self.name
            users.add(user)

    def take(self, config: Any, is_one: Callable[[Any], bool]) -> None:
        """Take out the users of `config` for which `is_one` is true. After the last, its own name is put back."""
        with self._lock:
            users = self._users.get(id(config))
            if users is None:
                return
            users -= {user for user in users if is_one(user)}
            if not users:
                del self._users[id(config)]
                config._attn_implementation = self._own.pop(id(config))

    def own(self, config: Any) -> str:
        """Return the name that `config` has without us."""
        name = config._attn_implementation
        return self._own.get(id(config), "sdpa") if name == self.name else str(name)
