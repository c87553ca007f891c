"""Stores for the tests of shared tiers: a dict, a Redis server of the test's own, and a folder of objects.

Each has `client()`, for a tier of its own, and reaches behind the clients: `records` and `write`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedkv.tiers.checksum import Bytes
from pagedkv.tiers.shared.records import Client, Record


class Memory:
    """A store in this process."""

    def __init__(self, folder: Path) -> None:
        self.contents: dict[bytes, bytes] = {}

    def client(self) -> Client:
        return MemoryClient(self.contents)

    def records(self) -> list[bytes]:
        return sorted(self.contents)

    def read(self, name: bytes) -> bytes:
        return self.contents[name]

    def write(self, name: bytes, record: bytes) -> None:
        self.contents[name] = record

    def close(self) -> None:
        """Do nothing: no server runs."""


class MemoryClient:
    """The client of a dict."""

    def __init__(self, contents: dict[bytes, bytes]) -> None:
        self.contents = contents

    def find(self, names: Sequence[bytes]) -> list[bool]:
        return [name in self.contents for name in names]

    def get(self, names: Sequence[bytes]) -> list[Record | None]:
        return [self.contents.get(name) for name in names]

    def put(self, names: Sequence[bytes], records: Sequence[tuple[bytes, Bytes]]) -> list[str]:
        for name, (header, content) in zip(names, records, strict=True):
            self.contents[name] = header + content.tobytes()
        return [""] * len(names)

    def delete(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.contents.pop(name, None)

    def close(self) -> None:
        """Do nothing: no connection is open."""


class Redis:
    """A Redis server on a free port of the loopback interface, which ends with the test."""

    def __init__(self, folder: Path, *options: str) -> None:
        redis = pytest.importorskip("redis")
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("no redis-server or valkey-server: apt-get install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process = subprocess.Popen(
            [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *options],
            cwd=folder, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._redis = redis.Redis.from_url(self.url)
        until = time.monotonic() + 300
        while True:
            try:
                self._redis.ping()
                break
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < until, "the Redis server did not start"
                time.sleep(0.02)

    def client(self) -> Client:
        from pagedkv.tiers.shared.redis import RedisClient

        return RedisClient(self.url, 2.0, None)

    def records(self) -> list[bytes]:
        return sorted(self._redis.keys(b"pagedkv:*"))

    def read(self, name: bytes) -> bytes:
        record: bytes = self._redis.get(name)
        return record

    def write(self, name: bytes, record: bytes) -> None:
        self._redis.set(name, record)

    def replace_by_list(self, name: bytes) -> None:
        """Put a list where a record was."""
        self._redis.delete(name)
        self._redis.rpush(name, b"no record")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Objects:
    """A folder as an object store. Its records are whole objects, damaged as such."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("obstore")
        self.folder = folder

    def client(self) -> Client:
        from pagedkv.tiers.shared.objects import ObjectClient

        return ObjectClient(f"file://{self.folder}", 2.0, {})

    def records(self) -> list[bytes]:
        return sorted(str(path).encode() for path in self.folder.rglob("pagedkv/*"))

    def read(self, name: bytes) -> bytes:
        return Path(name.decode()).read_bytes()

    def write(self, name: bytes, record: bytes) -> None:
        Path(name.decode()).write_bytes(record)

    def close(self) -> None:
        """Do nothing: no server runs."""


class S3:
    """An S3 server on a free port of the loopback interface (moto), which ends with the test."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("obstore")
        pytest.importorskip("moto.server", reason="no S3 server: pip install 'moto[server]'", exc_type=ImportError)
        import boto3

        self.port = free_port()
        secrets = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        with (folder / "moto.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                cwd=folder, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            self._create_bucket(boto3, secrets)
        except BaseException:
            self.close()
            raise

    def _create_bucket(self, boto3: Any, secrets: dict[str, str]) -> None:
        until = time.monotonic() + 300
        while not reachable(self.port):
            assert time.monotonic() < until, "the S3 server did not start"
            time.sleep(0.02)
        self.options = {"endpoint": f"http://127.0.0.1:{self.port}", "region": "us-east-1", **secrets}
        self._s3 = boto3.client("s3", endpoint_url=self.options["endpoint"], region_name="us-east-1", **secrets)
        self._s3.create_bucket(Bucket="pages")

    def client(self) -> Client:
        from pagedkv.tiers.shared.objects import ObjectClient

        return ObjectClient("s3://pages/a/prefix", 2.0, {**self.options, "client_options": {"allow_http": True}})

    def records(self) -> list[bytes]:
        listed = self._s3.list_objects_v2(Bucket="pages").get("Contents", [])
        return sorted(each["Key"].encode() for each in listed)

    def read(self, name: bytes) -> bytes:
        record: bytes = self._s3.get_object(Bucket="pages", Key=name.decode())["Body"].read()
        return record

    def write(self, name: bytes, record: bytes) -> None:
        self._s3.put_object(Bucket="pages", Key=name.decode(), Body=record)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Mooncake:
    """A Mooncake master on free ports of the loopback interface, and a process that lends it memory."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("mooncake.store", exc_type=ImportError)
        program = Path(sys.executable).with_name("mooncake_master")
        self.port, metrics = free_port(), free_port()
        with (folder / "master.log").open("w") as log:
            self.process = subprocess.Popen(
                [program, f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}",
                 "--metrics_host=127.0.0.1", "--default_kv_lease_ttl=5000"],
                cwd=folder, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until = time.monotonic() + 300
        while time.monotonic() < until and not reachable(self.port):
            time.sleep(0.02)
        self._lender = self.client(64 << 20)

    def client(self, lent: int = 0) -> Any:
        from pagedkv.tiers.shared.mooncake import MooncakeClient

        return MooncakeClient(f"127.0.0.1:{self.port}", "127.0.0.1", (lent, 16 << 20), "tcp", "")

    def close(self) -> None:
        self._lender.close()
        self.process.kill()
        self.process.wait()


_NUMBERS = itertools.count(211 * os.getpid())


def free_port() -> int:
    """Return a port that no other call returns soon, and that Linux gives to no socket by itself (from 32768 on).

    A process may take seconds until it listens there. Each worker of pytest has a thousand ports, and each process
    begins elsewhere among them.
    """
    worker = int("".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0) % 12
    for number in itertools.islice(_NUMBERS, 1000):
        port = 20_000 + 1000 * worker + number % 1000
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise OSError(f"no port is free from {20_000 + 1000 * worker} on")


def reachable(port: int) -> bool:
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", port)) == 0


Store = Memory | Redis | Objects
KINDS = {"memory": Memory, "redis": Redis, "objects": Objects}
