"""The registry: an ordered tuple of kernels, the fastest first. The first that does not object serves a call.

This file knows names and reasons. It imports no backend: a backend is imported when it is asked, so a machine without
Triton, CuPy or a compiler pays nothing for their entries. To add a backend, write a module with the functions of
`Backend` (case.py) and add one `Kernel` to KERNELS. The package pagedkv.kernels.triton is the folder triton_kernels/ at
the root of the repository; setup.py maps it.

    name given ("numba", or PAGEDKV_KERNELS)   that kernel, or KernelUnavailable if it objects: no silent fallback
    None or "auto"                             the first kernel of `in_order` that does not object; the last,
                                               "reference", never does
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from pagedkv import debug
from pagedkv.errors import InvalidRequest, KernelUnavailable
from pagedkv.kernels.case import Case, Kernel

if TYPE_CHECKING:
    from pagedkv.spec import KVSpec

KERNELS: tuple[Kernel, ...] = (
    Kernel("cpu", ("cpu",), "pagedkv.kernels.cpu"),
    Kernel("numba", ("cpu",), "pagedkv.kernels.numba"),
    Kernel("cuda", ("cuda",), "pagedkv.kernels.cuda.backend"),
    Kernel("triton", ("cuda", "cpu"), "pagedkv.kernels.triton.backend", "pagedkv.kernels.triton.availability"),
    Kernel("library", ("cuda", "cpu"), "pagedkv.kernels.library.backend"),
    Kernel("reference", None, "pagedkv.kernels.reference"),
)
"""In the order of preference, but for prefills and `gather_kv` (`in_order`).

On an H200 the time of "triton" over that of "cuda" is 0.99 to 1.2 in decode with keys of 16 bits, and 1.1 to 1.5 with
narrow keys (27 cells of `make gpu`). With pages of 128 it is 0.95.
"""

PREFILL_RANKS: Final = {"library": -1, "cuda": 1, "reference": 2}
"""The ranks of kernels in the order for prefills; 0 for the others.

Such a call is bound by products, and "cuda" has only those of sm_80. On an H200, "library" did 565 TFLOP/s of a prompt
of 8192 tokens and 601 of 2048 tokens behind a prefix of 30720, "triton" 294 and 278, "cuda" 117 and 175.

It is also the order for latents (MLA) with more than 32 query heads: "cuda" has 32 of them in a CTA, and reads the keys
again for the next 32. By a count of instructions, not measured.
"""

GATHER_RANKS: Final = {"cuda": 1, "reference": 2}
"""The same for `gather_kv`, for which "cuda" has no kernel."""

AUTO: Final = "auto"


def resolve(case: Case, backend: str | None = None) -> Kernel:
    """Return the kernel that serves `case`.

    Raises: KernelUnavailable with every reason if the named kernel objects; InvalidRequest if no kernel has that name.
    """
    if backend is None or backend == AUTO:
        backend = debug.forced_backend() or AUTO
    return _resolve(case, backend, KERNELS)


def in_order(case: Case, kernels: tuple[Kernel, ...] | None = None) -> list[Kernel]:
    """Return the kernels that "auto" asks about `case`, by preference.

    "library" is asked about long prefills, and about prefills that it reads in their pages: a copy of all keys would
    cost any other call more than it gains.
    """
    kernels = KERNELS if kernels is None else kernels
    if "long_prefill" not in case.features:
        in_pages = case._replace(features=case.features | {"in_pages"})
        is_asked = "prefill" in case.features
        kernels = tuple(k for k in kernels if k.name != "library" or (is_asked and not k.refuse(in_pages)))
    ranks: dict[str, int] = {}
    if case.op == "gather_kv":
        ranks = GATHER_RANKS
    elif not case.features.isdisjoint(("prefill", "long_prefill")) or _has_many_latent_heads(case):
        ranks = PREFILL_RANKS
    return sorted(kernels, key=lambda kernel: ranks.get(kernel.name, 0))


def _has_many_latent_heads(case: Case) -> bool:
    return (case.head_dim or 0) > 256 and (case.num_heads or 0) > 32 * (case.num_kv_heads or 1)


def other_than(name: str, case: Case) -> Kernel:
    """Return the kernel that "auto" chooses for `case` among all but `name`. Raises: as `resolve`."""
    return _resolve(case, AUTO, tuple(kernel for kernel in KERNELS if kernel.name != name))


@lru_cache(maxsize=1024)
def _resolve(case: Case, backend: str, kernels: tuple[Kernel, ...]) -> Kernel:
    candidates = in_order(case, kernels) if backend == AUTO else [x for x in kernels if x.name == backend]
    if not candidates:
        raise InvalidRequest(
            f"there is no kernel {backend!r}; there are: {', '.join(k.name for k in kernels)}, or 'auto' to choose"
        )
    reasons = {}
    for kernel in candidates:
        reasons[kernel.name] = kernel.refuse(case)
        if not reasons[kernel.name]:
            return kernel
    raise KernelUnavailable(str(case), reasons)


def choose(spec: KVSpec, device: str = "cpu", name: str | None = AUTO) -> Kernel:
    """Return the kernel for a cache of this geometry, resolved when the cache is built. Raises: as `resolve`."""
    return resolve(Case.of_spec(spec, device), name)
