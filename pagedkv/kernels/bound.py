"""Bound calls: a layer and its options are checked once, each call checks only the arguments that change.

    bind_attention(layer, **options)   checks layer and options, asks the registry, makes a binding of the C++ extension
    attend(q, batch)                   the extension reads the tensors, compares them with the contract, and returns
        results                        if the contract is kept and the kernel is set: in a few microseconds, without
                                       torch's dispatcher
        the kind of the call, an int   if the kernel was chosen for another dtype, number of heads, or use of a tree
                                       mask: the registry is asked, the kernel is set, and the call is repeated
        None                           else: the call takes torch's operator, whose checks say in words what is wrong

**Who states the contract.** checks.py, in one table for the extension and for itself. The extension says yes or
no. A call that it refuses goes to the operator, whose checks say why.

**When torch must see a call.** Dynamo traces the operator. The extension asks torch in each call for dispatch modes,
function modes, functorch transforms, tracing, the profiler, gradients that are wanted, and negative views, and returns
None if there is one. Subclasses of Tensor and tensors without memory also go to the operator. PAGEDKV_DEBUG >= 1 sends
every call there, because values are checked there.

**What a binding may not miss.** The tensors of the layer are kept alive and described anew in each call. A tensor whose
storage was shrunk beneath it (`untyped_storage().resize_`) is not seen unless PAGEDKV_DEBUG >= 1. If their
memory moved (set_, resize_), the operator serves. PAGEDKV_KERNELS, PAGEDKV_CPU_ISA and PAGEDKV_NUM_THREADS are read
when a kernel is chosen: at binding, and at the first call of a kind. torch.set_num_threads acts at once.

**Functional calls** of ops.py use bound calls too: `cached` keeps those of a layer in the KVLayer object.

Without the extension, or with a torch that does not tell who observes operators, every call takes the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Unpack, overload

from torch import Tensor, float32
from torch.compiler import is_dynamo_compiling

from pagedkv import debug
from pagedkv.kernels import checks, cpu, quant, registry
from pagedkv.kernels.args import (
    AttentionCall,
    AttentionOptions,
    KVLayer,
    Options,
    PagedBatch,
    RotaryTable,
    WriteCall,
    bound_fields,
)
from pagedkv.kernels.case import MOST_DRAFTS, Case, prefill_of
from pagedkv.kernels.operators import attend_by_operator, slots_of, write_by_operator

if TYPE_CHECKING:
    from pagedkv.kernels.case import Case, Kernel

MOST_BOUND: Final = 32
"""Bound calls that a KVLayer keeps for functional calls.

A layer is called with few options: beyond this number all are dropped.
"""


_extension: Final[Any] = cpu._cpu if cpu.OBSERVERS else None


class _BoundCall:
    """A layer and what else is fixed, a binding of the extension to them, and the kernel for each kind of call.

    _rest:  the options, or the rotary tables
    _CALL:  makes the call that a backend takes
    _NAMES: the function of the extension that binds, and the function of a backend that runs
    """

    # Slots are on fewer cold lines than a dict.
    __slots__ = ("__weakref__", "_backend", "_binding", "_layer", "_rest", "_servers", "kernel")
    _CALL: ClassVar[Any]
    _NAMES: ClassVar[tuple[str, str]]

    def __init__(self, layer: KVLayer, rest: Any, backend: str | None) -> None:
        checks.is_layer(layer)
        self._layer, self._rest, self._backend = replace(layer), rest, backend or registry.AUTO
        self._binding: Any = None
        self._servers: dict[int, tuple[str, int, Callable[..., None] | None]] = {}
        self.kernel: Kernel | None = None
        """The kernel that serves, as far as layer and options decide; None while Dynamo traces."""
        if not is_dynamo_compiling():
            checks.layer(layer)
            self._check()
            self.kernel = registry.resolve(self._case(), self._backend)
            self._bind()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._layer, self._rest, self._backend)

    def rebinding(self, layer: KVLayer) -> list[tuple[object, str, object]]:
        """Return (self, attribute, value) for each attribute that changes if `layer` is served, with the same options.

        Raises: as when the call was bound
        """
        new = type(self)(layer, self._rest, self._backend)
        return [(self, name, getattr(new, name)) for name in _BoundCall.__slots__[1:]]

    def rebind(self, layer: KVLayer) -> None:
        """Serve `layer` from now on, with the same options.

        Raises: as when the call was bound; nothing was changed then
        """
        for _, name, value in self.rebinding(layer):
            setattr(self, name, value)

    def _check(self) -> None:
        """Raise InvalidRequest if the layer does not go with `_rest`."""

    def _case(self, *arguments: Any) -> Case:
        """Return the case of a call; without arguments, of all calls."""
        raise NotImplementedError

    def _bind(self) -> None:
        """Make the binding, unless the operator must serve each call."""
        fixed = bound_fields(self._layer, self._rest)
        if _extension is not None and not any(isinstance(x, Tensor) and x.is_neg() for x in fixed):
            with suppress(TypeError):  # an option has a type that torch may convert
                self._binding = getattr(_extension, self._NAMES[0])(*fixed)

    def _set_kernel(self, kind: int, *arguments: Any) -> None:
        """Let the kernel for calls like this one serve calls of a kind, until another kind is called."""
        if kind not in self._servers:
            case = self._case(*arguments)
            kernel = registry.resolve(case, self._backend)
            if kernel.backend == cpu.__name__:
                self._servers[kind] = (cpu.isa(), debug.forced_num_threads() or 0, None)
            else:
                self._servers[kind] = ("", 0, self._server(case, kernel))
        _extension.set_kernel(self._binding, kind, *self._servers[kind])

    def _server(self, case: Case, kernel: Kernel) -> Callable[..., None]:
        """Return the function that serves calls of `case`, for which `kernel` is the first."""
        return self._serve(kernel)

    def _serve(self, kernel: Kernel) -> Callable[..., None]:
        """Return a backend's own function for bound calls, or one that makes an object of a call each time."""
        backend: Any = kernel.load()
        if hasattr(backend, self._NAMES[0]):
            return getattr(backend, self._NAMES[0])(self._layer, self._rest)  # type: ignore[no-any-return]
        run, make = getattr(backend, self._NAMES[1]), partial(self._CALL, *bound_fields(self._layer, self._rest))
        return lambda *arguments: run(make(*arguments))

    def __repr__(self) -> str:
        k, name = self._layer.k, None if self.kernel is None else self.kernel.name
        return f"{type(self).__name__}(k {list(k.shape)} {k.dtype} on {k.device}, kernel={name!r})"


def _attention_call(*fields: Any) -> AttentionCall:
    """Return the call of these fields. A caller who wants no LSE gives None; a backend always stores one."""
    call = AttentionCall(*fields)
    return call if fields[-1] is not None else call._replace(lse=call.q.new_empty(call.q.shape[:2], dtype=float32))


class BoundAttention(_BoundCall):
    """`paged_attention` of one layer with fixed options: the result of `bind_attention`.

    A call may say which sequences of its batch are causal: causal bool [>= B]; None: as when the call was bound.
    A call checks q, the batch's tensors, tree_mask, causal and out: dtype, shape, strides, device. Values are checked
    with PAGEDKV_DEBUG >= 1. Shapes, what is modified and what is raised are as in `paged_attention`.
    """

    __slots__ = ()
    _CALL, _NAMES = staticmethod(_attention_call), ("bind_attention", "paged_attention")
    _rest: AttentionOptions

    def __init__(self, layer: KVLayer, options: AttentionOptions, backend: str | None) -> None:
        checks.is_layer(layer)
        if options.scale is None:
            options = options._replace(scale=max(1, quant.head_dim(layer.k)) ** -0.5)
        super().__init__(layer, options.in_float32(), backend)

    def _check(self) -> None:
        checks.numbers(self._rest)
        checks.per_head(self._rest)

    def _case(self, *arguments: Any) -> Case:
        return Case.of_attention(self._layer, self._rest, *arguments)

    def _server(self, case: Case, kernel: Kernel) -> Callable[..., None]:
        """Return the function that serves calls of `case`; on a GPU, prefills go to the first kernel for prefills.

        With split_tokens they do not: which kernel serves a sequence must not depend on the rest of its batch.
        """
        serve = super()._server(case, kernel)
        if case.device != "cuda" or self._rest.split_tokens is not None:
            return serve
        known = {kernel: serve}
        by_prefill = {"": serve}
        for prefill in ("prefill", "long_prefill"):
            other = registry.resolve(case._replace(features=case.features | {prefill}), self._backend)
            by_prefill[prefill] = known[other] = known.get(other) or self._serve(other)
        if len(known) == 1:
            return serve

        def route(*arguments: Any) -> None:
            q, _, _, seq_lens, _, max_seqlen_q, max_seqlen_k, *_ = arguments
            if max_seqlen_q <= MOST_DRAFTS:
                serve(*arguments)
            else:
                by_prefill[prefill_of(q, seq_lens, max_seqlen_k)](*arguments)

        return route

    @overload
    def __call__(
        self, q_THD: Tensor, batch: PagedBatch, *, causal: Tensor | None = None, tree_mask: Tensor | None = None,
        out: Tensor | None = None, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, q_THD: Tensor, batch: PagedBatch, *, causal: Tensor | None = None, tree_mask: Tensor | None = None,
        out: Tensor | None = None, return_lse: bool,
    ) -> Any: ...  # fmt: skip
    def __call__(
        self, q_THD: Tensor, batch: PagedBatch, *, causal: Tensor | None = None, tree_mask: Tensor | None = None,
        out: Tensor | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Attend from the new tokens of a batch to the cached tokens of their sequences. See `paged_attention`."""
        if not is_dynamo_compiling() and self._binding is not None and isinstance(batch, PagedBatch):
            while True:
                results = _extension.attend(
                    self._binding, q_THD, batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens_q,
                    batch.max_seqlen_q, batch.max_seqlen_k, tree_mask, causal, out, return_lse,
                )  # fmt: skip
                if type(results) is not int:
                    break
                self._set_kernel(results, q_THD, (tree_mask, causal))
            if results is not None:
                return results
        masks = (tree_mask, causal)
        return attend_by_operator(q_THD, self._layer, batch, self._rest, masks, out, return_lse, self._backend)


class BoundWrite(_BoundCall):
    """`write_kv` into one layer: the result of `bind_write`.

    A call checks k, v, slots and positions: dtype, shape, strides, device. Values are checked with
    PAGEDKV_DEBUG >= 1. Shapes, what is modified and what is raised are as in `write_kv`.
    """

    __slots__ = ()
    _CALL, _NAMES = WriteCall, ("bind_write", "write_kv")
    _rest: RotaryTable | None

    def _check(self) -> None:
        checks.writable(self._layer)
        checks.rotary(self._rest, quant.head_dim(self._layer.k))

    def _case(self, *arguments: Any) -> Case:
        return Case.of_write(self._layer, self._rest is not None, arguments or None)  # type: ignore[arg-type]

    def _bind(self) -> None:
        if checks.scales_of_two(self._layer):  # else the operator refuses values
            super()._bind()

    def __call__(
        self, k_TKD: Tensor, v_TKD: Tensor | None, slots: Tensor | PagedBatch, positions: Tensor | None = None
    ) -> None:
        """Store the keys and values of the new tokens at `slots`, or at those of a batch. See `write_kv`."""
        if not is_dynamo_compiling() and self._binding is not None and v_TKD is not None:
            at, places = slots_of(slots, positions)
            if self._rest is None:
                places = None
            while True:
                done = _extension.write(self._binding, k_TKD, v_TKD, at, places, False)
                if done is True:
                    return
                if done is None:
                    break
                self._set_kernel(done, k_TKD, v_TKD)
        write_by_operator(k_TKD, v_TKD, self._layer, slots, positions, self._rest, self._backend)


def bind_attention(layer: KVLayer, *, backend: str | None = None, **options: Unpack[Options]) -> BoundAttention:
    """Return `paged_attention` of `layer` with these options.

    The result is called as `attend(q, batch, *, causal, tree_mask, out, return_lse)`.
    The layer and the options are checked here, once; a call checks its own arguments. The options are those of
    `paged_attention`: scale, causal, window, softcap, sinks, alibi_slopes, split_tokens, backend. The bound call keeps
    the layer's tensors alive. `attend.rebind(layer)` gives it the tensors of another layer of the same model.

    Raises: InvalidRequest; KernelUnavailable if the named kernel cannot serve the layer or the options.
    """
    return BoundAttention(layer, AttentionOptions.of(**options), backend)


def bind_write(layer: KVLayer, *, rope: RotaryTable | None = None, backend: str | None = None) -> BoundWrite:
    """Return `write_kv` into `layer`: `store(k, v, slots, positions=None)`; `slots` may be a PagedBatch.

    The layer and the rotary tables are checked here, once; a call checks its own arguments. The bound call keeps the
    layer's tensors alive. `store.rebind(layer)` gives it the tensors of another layer of the same model.

    Raises: InvalidRequest; KernelUnavailable if the named kernel cannot serve the layer.
    """
    return BoundWrite(layer, rope, backend)


def cached(layer: KVLayer, key: tuple[Any, ...], bind: Callable[..., Any], *arguments: Any) -> Any:
    """Return the bound call of `layer` for `key` and the environment; None if a functional call takes the operator.

    The first call with `key` takes the operator, so a KVLayer that is made for one call costs no binding.
    bind(layer, *arguments): makes the bound call, at the second call with `key`.
    """
    if is_dynamo_compiling() or _extension is None:
        return None
    calls = getattr(layer, "_bound", None)
    if calls is None:
        checks.is_layer(layer)
        object.__setattr__(layer, "_bound", calls := {})
    key = key, _extension.kernel_choices()
    try:
        found = calls.get(key, 0)
    except TypeError:  # an option of a wrong type cannot be hashed: the operator refuses it
        return None
    if found == 0:
        if len(calls) >= MOST_BOUND:
            calls.clear()
        found = calls[key] = None
    elif found is None:
        found = calls[key] = bind(layer, *arguments)
    return found
