"""The choice of a kernel: the first that does not object, or the one that was named, or an error with every reason.

Never a silent fallback.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedkv import KernelUnavailable, KVSpec, explain, paged_attention
from pagedkv.kernels import registry
from pagedkv.kernels.registry import Case, Kernel, choose, resolve
from tests.cases import Case as GridCase

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32")


def small_heads(case: Case) -> list[str]:
    return [f"head_dim is {case.head_dim}; it takes at most 64"] if (case.head_dim or 0) > 64 else []


FAST = Kernel("fast", ("cpu",), "pagedkv.kernels.reference", small_heads)
FAR = Kernel("far", ("cuda",), "no.such.module", lambda case: ["CuPy is not installed"])


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up kernels before those of the registry."""
    monkeypatch.setattr(registry, "KERNELS", (FAR, FAST, *registry.KERNELS))
    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)


@pytest.mark.usefixtures("three")
def test_auto_takes_the_first_that_does_not_object() -> None:
    assert choose(SPEC) is FAST
    assert choose(KVSpec(1, 2, 128)).name not in ("far", "fast")
    assert choose(SPEC, "cuda:1").name not in ("far", "fast")


@pytest.mark.usefixtures("three")
def test_a_named_kernel_that_objects_raises_with_every_reason() -> None:
    with pytest.raises(KernelUnavailable) as refused:
        choose(SPEC, "cpu", "far")
    assert refused.value.reasons == {"far": ["it runs on cuda, the tensors are on cpu", "CuPy is not installed"]}
    with pytest.raises(KernelUnavailable, match="head_dim is 128; it takes at most 64"):
        resolve(Case(head_dim=128), "fast")
    built = GridCase(dims=(128, 128)).build()
    with pytest.raises(KernelUnavailable, match="paged_attention on cpu .* head_dim=128 .*\n  fast: head_dim is 128"):
        paged_attention(built.q, built.layer, built.batch, backend="fast")


@pytest.mark.usefixtures("three")
def test_the_environment_names_the_kernel_where_the_caller_says_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    assert choose(SPEC).name == choose(SPEC, "cpu", None).name == "reference"
    assert choose(SPEC, "cpu", "fast") is FAST
    monkeypatch.setenv("PAGEDKV_KERNELS", "far")
    with pytest.raises(KernelUnavailable, match="CuPy is not installed"):
        choose(SPEC)


@pytest.mark.usefixtures("three")
def test_explain_names_every_kernel_its_reasons_and_the_choice() -> None:
    explained = explain(KVSpec(1, 2, 128), device="cpu")
    assert list(explained.objections) == [kernel.name for kernel in registry.KERNELS]
    assert explained.objections["fast"] == ["head_dim is 128; it takes at most 64"]
    assert explained.chosen == choose(KVSpec(1, 2, 128)).name
    assert f"> {explained.chosen}" in repr(explained)
    assert "CuPy is not installed" in repr(explained)
    assert explain(Case(head_dim=32)).chosen == "fast"
    assert explain(device="cpu").chosen == "fast"


def test_a_registry_that_is_imported_has_imported_no_kernel() -> None:
    modules = [kernel.backend.split(":")[0] for kernel in registry.KERNELS]
    code = f"import sys, pagedkv.kernels.registry; assert not set({modules} + ['triton', 'cupy']) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extension_numba_serves_and_is_not_imported() -> None:
    code = """
import sys
sys.modules["pagedkv.kernels._cpu"] = None
from pagedkv.kernels.registry import KERNELS, Case, resolve
print(resolve(Case()).name, "numba" in sys.modules, KERNELS[0].refuse(Case())[0])
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.startswith("numba False the extension is not built: ")
