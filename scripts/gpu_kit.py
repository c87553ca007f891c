"""`make gpu-kit`: pack what `make gpu CALL=2` and `CALL=3` measure next to us, from the package registry.

    build/gpu-kit/peers.tar.xz   FlashAttention 3 and FlashMLA out of vLLM's wheel, and FlashInfer with two modules
    build/gpu-kit/vllm.tar.xz    vLLM, the packages that it imports, and the entry points of pagedkv

They are for a machine without a network: Linux on x86-64 with Python 3.12, torch 2.11 or later for CUDA 13, and a GPU
of compute capability 9.0 (H100, H200). vLLM's libraries use only torch's stable C interface, so they load into that
torch; of their device code that of 9.0 is packed. FlashInfer's modules are compiled here, which needs nvcc 13 and no
GPU; without nvcc FlashInfer is left out.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
KIT: Final = ROOT / "build/gpu-kit"
WHEELS, HOST = KIT / "wheels", KIT / "host"
VLLM: Final = "vllm==0.33.0"
PEERS: Final = ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/_flashmla_C.abi3.so")
LEFT_OUT: Final = (".so", "fused_moe/configs", "third_party/deep_gemm", "third_party/fmha_sm100", "vllm-rs", "/static/")
FLASHINFER: Final = ("flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.15.post2")
NEEDED: Final = """annotated-types==0.8.0 astor blake3 cachetools==8.0.2 cbor2==6.3.0 compressed-tensors==0.17.0
depyf==0.20.0 dill==0.4.1 distro fastapi==0.136.3 googleapis-common-protos==1.76.0 httpcore2==2.16.2 httpx2==2.16.2
jiter llguidance==1.7.6 msgspec==0.22.0 openai==3.57.0 opentelemetry-api==1.45.2
opentelemetry-exporter-http-transport==0.66b2 opentelemetry-exporter-otlp-common==0.66b2
opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-proto-grpc==1.45.2
opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-exporter-otlp==1.45.2 opentelemetry-proto==1.45.2
opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions-ai==0.5.1 opentelemetry-semantic-conventions==0.66b2
oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic-core==2.50.5
pydantic-extra-types==2.11.1 pydantic==2.14.4 python-multipart==0.0.34 pyzmq==27.3.0 setproctitle sniffio==1.3.1
starlette==1.10.0 truststore==0.10.5 typing-inspection xgrammar==0.2.8""".split()
"""The packages that vLLM imports and a Python with torch, transformers and a usual set of tools lacks."""

OF_HOST: Final = "ninja click tabulate tqdm nvidia-ml-py einops packaging requests nvidia-cuda-runtime==13.0.*".split()
PLATFORMS: Final = (*(f"manylinux_2_{n}_x86_64" for n in range(5, 40)), *(f"manylinux{n}_x86_64" for n in (1, 2014)))
COMPILE: Final = """
import pathlib, shutil, sys, torch
from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module as module_of
for kv in (torch.bfloat16, torch.float8_e4m3fn):
    types = torch.bfloat16, kv, torch.bfloat16, torch.int32
    spec = module_of("fa2", *types, 128, 128, 0, False, False, False)
    spec.build()
    shutil.copy(spec.get_library_path(), pathlib.Path(sys.argv[1], f"{spec.name}.so"))
"""
"""Paged attention over keys of 128 in bfloat16 and in e4m3. FlashInfer decodes with it, too."""

ARCHITECTURE, CONTAINER = 90, struct.pack("<IHH", 0xBA55ED50, 1, 16)

Files = Iterator[tuple[str, bytes]]
"""Paths below the folder that is unpacked, with their contents."""


def pip(*arguments: str) -> None:
    """Run pip of this Python, without what packages ask for. Raises: CalledProcessError"""
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments, "--no-deps"], check=True)


def thinned(library: bytes) -> bytes:
    """Return a library without the device code of other architectures; zeros, which pack to nothing, fill its place.

    Device code lies in containers: a header of 16 bytes that ends in the size of the entries behind it. The header of
    an entry has its kind (uint16 at 0; 2 for machine code), its own size (uint32 at 4), the size of the code behind it
    (uint64 at 8) and the architecture (uint32 at 28). The entries of 9.0 move to the front of their container. In one
    without 9.0 the headers stay, so that CUDA still finds that nothing there is for this GPU.
    """
    found, at = bytearray(library), library.find(CONTAINER)
    while at >= 0:
        begin, kept = at + 16, b""
        end = begin + struct.unpack_from("<Q", library, at + 8)[0]
        while begin < end:
            here = begin
            kind, _, header, size = struct.unpack_from("<HHIQ", library, here)
            begin += header + size
            if (kind, *struct.unpack_from("<I", library, here + 28)) == (2, ARCHITECTURE):
                kept += library[here:begin]
            found[here + header : begin] = bytes(size)
        if kept:
            found[at + 8 : end] = struct.pack("<Q", len(kept)) + kept.ljust(end - at - 16, b"\0")
        at = library.find(CONTAINER, end)
    return bytes(found)


def files_of(name: str, *left_out: str) -> Files:
    """Yield the files of a wheel but those with one of these texts in their path. name: the begin of the wheel's."""
    with zipfile.ZipFile(next(WHEELS.glob(f"{name}*.whl"))) as held:
        for path in held.namelist():
            if not path.endswith("/") and not any(part in path for part in left_out):
                yield path, held.read(path)


def libraries(*paths: str) -> Files:
    """Yield libraries of vLLM's wheel, thinned."""
    with zipfile.ZipFile(next(WHEELS.glob("vllm-*.whl"))) as held:
        yield from ((path, thinned(held.read(path))) for path in paths)


def peers() -> Files:
    """Yield the libraries of other kernels, each at the top of Python's path, and FlashInfer."""
    if shutil.which("nvcc"):
        yield from flashinfer()
        yield from files_of("apache_tvm_ffi-")
    else:
        print("FlashInfer is left out: there is no nvcc on the PATH; install CUDA 13 to have it", flush=True)
    yield from ((Path(path).name, library) for path, library in libraries(*PEERS))


def flashinfer() -> Files:
    """Compile FlashInfer's modules, in the folder HOST, and yield them with its Python."""
    if not (HOST / "modules").exists():  # else what was compiled stays newer than its sources
        pip("install", f"--target={HOST}", *FLASHINFER, *OF_HOST)
        (HOST / "modules").mkdir()
    shutil.copy(next(HOST.glob("nvidia/*/lib/libcudart.so.13")), HOST / "libcudart.so")  # a small CUDA has none
    # The modules are linked against a driver, and nothing calls it here.
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o"]
    for name in ("libcuda.so", "libcuda.so.1"):
        subprocess.run([*command, HOST / name], input=b"int cuGetErrorString(void) { return 999; }", check=True)
    env = dict.fromkeys(("PYTHONPATH", "LIBRARY_PATH", "LD_LIBRARY_PATH", "FLASHINFER_WORKSPACE_BASE"), str(HOST))
    env |= {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "MAX_JOBS": "2", "PATH": f"{HOST}/bin:{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", COMPILE, HOST / "modules"], env=os.environ | env, check=True)
    for path in (HOST / "modules").iterdir():
        yield f"flashinfer/data/aot/{path.stem}/{path.name}", path.read_bytes()
    for path in (HOST / "flashinfer").rglob("*.*"):
        home = path.relative_to(HOST)
        is_python = path.suffix in (".py", ".json", ".txt") and home.parts[1] != "data"
        if path.is_file() and (is_python or home.match("data/csrc/batch_prefill*") or home.match("data/csrc/*.jinja")):
            yield str(home), path.read_bytes()


def vllm() -> Files:
    """Yield vLLM's Python and three of its libraries, the packages that it imports, and our entry points."""
    for wheel in WHEELS.glob("*.whl"):
        yield from files_of(wheel.stem, *LEFT_OUT if wheel.match("vllm-*") else ())
    yield from libraries("vllm/_C_stable_libtorch.abi3.so", *PEERS)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [line for group, names in points.items() for line in (f"[{group}]", *map(" = ".join, names.items()))]
    yield "pagedkv-0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: pagedkv\nVersion: 0\n"
    yield "pagedkv-0.dist-info/entry_points.txt", "\n".join(lines).encode()


def pack(name: str, files: Files) -> None:
    """Write an archive whole or not at all, and print its size."""
    target, new = KIT / f"{name}.tar.xz", KIT / f"{name}.new"
    KIT.mkdir(parents=True, exist_ok=True)
    with tarfile.open(new, "w:xz", preset=9) as archive:
        for path, content in files:
            about = tarfile.TarInfo(path)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    new.replace(target)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / (1 << 20):.1f} MiB", flush=True)


def main() -> None:
    """Download the wheels for Python 3.12, and write both archives."""
    for wheel in WHEELS.glob("vllm-*.whl"):
        if not wheel.name.startswith(VLLM.replace("==", "-") + "-"):
            wheel.unlink()  # of an earlier version: both would be packed
    platforms = [f"--platform={name}" for name in PLATFORMS]
    wanted = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms, f"--dest={WHEELS}"]
    pip("download", *wanted, VLLM, FLASHINFER[1], *NEEDED)
    pack("vllm", vllm())
    pack("peers", peers())


if __name__ == "__main__":
    main()
