"""Bound calls: a layer and its options are checked once, each call checks only the arguments that change.

    bind_attention(layer, options)   checks layer and options, asks the registry, makes a Binding of the C++ extension
    attend(q, batch)                 Binding.attend(...) reads the tensors, compares them with the contract, and returns
        results                      if the contract is kept and a kernel is registered: in a few microseconds,
                                     without torch's dispatcher
        the kind of the call, an int if only a kernel for this dtype and number of heads is missing: the registry is
                                     asked, the kernel is registered, and the call is repeated
        None                         else: the call takes torch's operator, whose checks say in words what is wrong

**Who states the contract.** checks.py, in words. The extension has the same rules as a predicate without words
(keeps_contract in csrc/cpu/python). A call that the predicate refuses goes to the operator, so a predicate that is too
strict costs time and changes no result. tests/kernels/bound/test_bound_attention.py draws calls and compares the two.

**When torch must see a call.** Dynamo traces the operator. The extension asks torch in each call for dispatch modes,
function modes, functorch transforms, tracing, the profiler, gradients that are wanted, and negative views, and returns
None if there is one. Subclasses of Tensor and tensors without memory also go to the operator. PAGEDKV_DEBUG >= 1 sends
every call there, because values are checked there.

**What a binding may not miss.** The tensors of the layer are kept alive and described anew in each call. If their
memory moved (set_, resize_), the operator serves. PAGEDKV_KERNELS, PAGEDKV_CPU_ISA and PAGEDKV_NUM_THREADS are read
when a kernel is chosen: at binding, and at the first call of a kind. torch.set_num_threads acts at once.

**Functional calls** of ops.py use bound calls too: `cached` keeps those of a layer in the KVLayer object, by options
and environment. The first functional call of a key takes the operator, so a KVLayer that is made for one call costs no
binding.

Without the extension, or with a torch that does not tell who observes operators, every call takes the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pagedkv import debug
from pagedkv.kernels import checks, cpu, operators, quant, registry
from pagedkv.kernels.args import AttentionCall, AttentionOptions, KVLayer, PagedBatch, RotaryTable, WriteCall
from pagedkv.kernels.case import attention_case, write_case

if TYPE_CHECKING:
    from pagedkv.kernels.case import Backend, Kernel

assert operators  # importing it defines torch.ops.pagedkv

MOST_BOUND: Final = 32
"""Bound calls that a KVLayer keeps for functional calls.

A layer is called with few options: beyond this number all are dropped.
"""


def _observers() -> tuple[Any, ...]:
    """Return C functions, each truthy while its part of torch observes operators; () if torch lacks one."""
    modes = ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_functorch.peek_interpreter_stack")
    try:
        return tuple(attrgetter(name)(torch._C) for name in (*modes, "_is_tracing", "_autograd._profiler_enabled"))
    except AttributeError:
        return ()


_OBSERVERS: Final = _observers()


def register_torch(*, by_table: bool = True) -> None:
    """Register torch's types and callbacks with the extension.

    by_table: read tensors through DLPack's C functions where torch has them.
    """
    cpu._cpu.register_torch(
        torch.Tensor, torch.float32, by_table, torch.get_num_threads, torch.is_grad_enabled, _OBSERVERS
    )


_extension: Final[Any] = cpu._cpu if _OBSERVERS else None
if _extension is not None:
    register_torch()


class BoundAttention:
    """`paged_attention` of one layer with fixed options: the result of `bind_attention`.

    A call checks q, the batch's tensors, tree_mask and out: dtype, shape, strides, device. Values are checked with
    PAGEDKV_DEBUG >= 1.

    Shapes:   q [T, H, D]; tree_mask bool [T, >= max_seqlen_q]; out [T, H, Dv] of q's dtype
              returns out [T, H, Dv]; with return_lse also float32 [T, H], natural logarithm
    Modifies: out, if given, and returns it.
    Raises:   InvalidRequest if an argument breaks the contract of `paged_attention`; KernelUnavailable if q's dtype or
              number of heads, or a tree mask, is one that the named kernel does not take.
    """

    __slots__ = ("_attend", "_backend", "_binding", "_layer", "_options", "kernel")  # fewer cold lines than a dict

    def __init__(self, layer: KVLayer, options: AttentionOptions, backend: str | None) -> None:
        self._layer, self._options, self._backend = replace(layer), options, backend or registry.AUTO
        self._binding: Any = None
        self._attend: Callable[..., Any] | None = None
        self.kernel: Kernel | None = None
        """The kernel that serves, as far as layer and options decide; None while Dynamo traces."""
        if not is_dynamo_compiling():
            checks.layer(layer)
            checks.numbers(options)
            self.kernel = registry.resolve(attention_case(layer, options, None, None), backend)
            self._bind()

    def _bind(self) -> None:
        x, on = self._layer, self._options
        tensors = (x.k, x.v, x.k_scale, x.v_scale, on.sinks, on.alibi_slopes)
        rules = (on.scale, on.causal, on.window, on.softcap, on.split_tokens)
        self._binding = _binding("bind_attention", tensors, rules)
        self._attend = getattr(self._binding, "attend", None)

    @overload
    def __call__(
        self, q_THD: Tensor, batch: PagedBatch, *, tree_mask: Tensor | None = None, out: Tensor | None = None,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, q_THD: Tensor, batch: PagedBatch, *, tree_mask: Tensor | None = None, out: Tensor | None = None,
        return_lse: bool,
    ) -> Any: ...  # fmt: skip
    def __call__(
        self,
        q_THD: Tensor,
        batch: PagedBatch,
        *,
        tree_mask: Tensor | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from the new tokens of a batch to the cached tokens of their sequences. See `paged_attention`."""
        if not is_dynamo_compiling() and self._attend is not None:
            results: Any = self._attend(
                q_THD, batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens_q,
                batch.max_seqlen_q, batch.max_seqlen_k, tree_mask, out, return_lse,
            )  # fmt: skip
            if type(results) is int:
                self._choose(results, q_THD, tree_mask)
                results = self(q_THD, batch, tree_mask=tree_mask, out=out, return_lse=return_lse)
            if results is not None:
                return cast(Tensor, results)
        arguments = (tree_mask, out, return_lse, self._backend)
        return cast(Tensor, attend_by_operator(q_THD, self._layer, batch, self._options, *arguments))

    def _choose(self, kind: int, q: Tensor, tree_mask: Tensor | None) -> None:
        """Register the kernel that serves calls like one with `q` and `tree_mask`."""
        kernel = registry.resolve(attention_case(self._layer, self._options, q, tree_mask), self._backend)
        _register(self._binding, kind, kernel, lambda backend: _attention_server(backend, self._layer, self._options))

    def __repr__(self) -> str:
        name = None if self.kernel is None else self.kernel.name
        return f"BoundAttention({_layer_text(self._layer)}, kernel={name!r}, options={_options_text(self._options)})"


class BoundWrite:
    """`write_kv` into one layer: the result of `bind_write`.

    A call checks k, v and the batch's slots and positions: dtype, shape, strides, device. Values are checked with
    PAGEDKV_DEBUG >= 1.

    Shapes:   k [T, K, D], v [T, K, Dv], any float dtype
    Modifies: the layer's k and v at `batch.slots`, and per-(token, head) scales there. A slot < 0 is skipped.
    Raises:   InvalidRequest if an argument breaks the contract of `write_kv`; KernelUnavailable if the dtype of k or v
              is one that the named kernel does not take.
    """

    __slots__ = ("_backend", "_binding", "_layer", "_rope", "_write", "kernel")

    def __init__(self, layer: KVLayer, rope: RotaryTable | None, backend: str | None) -> None:
        self._layer, self._rope, self._backend = replace(layer), rope, backend or registry.AUTO
        self._binding: Any = None
        self._write: Callable[..., Any] | None = None
        self.kernel: Kernel | None = None
        """The kernel that serves, as far as the layer decides; None while Dynamo traces."""
        if not is_dynamo_compiling():
            checks.layer(layer)
            checks.writable(layer)
            if rope is not None:
                checks.angles(rope.cos, rope.sin, quant.head_dim(layer.k))
            self.kernel = registry.resolve(write_case(layer, rope is not None, None), backend)
            self._bind()

    def _bind(self) -> None:
        x, rope = self._layer, self._rope
        angles = (None, None) if rope is None else (rope.cos, rope.sin)
        tensors, flags = (x.k, x.v, x.k_scale, x.v_scale, *angles), (rope is not None and rope.interleaved,)
        self._binding = _binding("bind_write", tensors, flags)
        self._write = getattr(self._binding, "write", None)

    def __call__(self, k_TKD: Tensor, v_TKD: Tensor, batch: PagedBatch) -> None:
        """Store the keys and values of the new tokens of a batch. See `write_kv`."""
        if not is_dynamo_compiling() and self._write is not None:
            done = self._write(k_TKD, v_TKD, batch.slots, None if self._rope is None else batch.positions)
            if done is True:
                return
            if done is not None:
                self._choose(done, k_TKD, v_TKD)
                self(k_TKD, v_TKD, batch)
                return
        write_by_operator(k_TKD, v_TKD, self._layer, batch, self._rope, self._backend)

    def _choose(self, kind: int, k: Tensor, v: Tensor) -> None:
        """Register the kernel that serves writes like one of `k` and `v`."""
        kernel = registry.resolve(write_case(self._layer, self._rope is not None, (k, v)), self._backend)
        _register(self._binding, kind, kernel, lambda backend: _write_server(backend, self._layer, self._rope))

    def __repr__(self) -> str:
        name = None if self.kernel is None else self.kernel.name
        return f"BoundWrite({_layer_text(self._layer)}, kernel={name!r}, rope={self._rope is not None})"


def bind_attention(
    layer: KVLayer,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    split_tokens: int | None = None,
    backend: str | None = None,
) -> BoundAttention:
    """Return `paged_attention` of `layer` with these options: `attend(q, batch, *, tree_mask, out, return_lse)`.

    The layer and the options are checked here, once; a call checks its own arguments (see BoundAttention). The options
    have the meaning that they have in `paged_attention`. The bound call keeps the layer's tensors alive: bind again
    after `PagedKVCache.resize`.

    Shapes: sinks, alibi_slopes float32 [H]; layer as in KVLayer
    Raises: InvalidRequest; KernelUnavailable if the named kernel cannot serve the layer or the options.
    """
    options = _options_of(layer, scale, causal, window, softcap, sinks, alibi_slopes, split_tokens)
    return BoundAttention(layer, options, backend)


def bind_write(layer: KVLayer, *, rope: RotaryTable | None = None, backend: str | None = None) -> BoundWrite:
    """Return `write_kv` into `layer`: `store(k, v, batch)`.

    The layer and the rotary tables are checked here, once; a call checks its own arguments (see BoundWrite). The bound
    call keeps the layer's tensors alive: bind again after `PagedKVCache.resize`.

    rope:   turn each key by the angles of its token's position (`batch.positions`) before it is stored.
    Shapes: layer as in KVLayer; rope as in RotaryTable
    Raises: InvalidRequest; KernelUnavailable if the named kernel cannot serve the layer.
    """
    return BoundWrite(layer, rope, backend)


def _binding(bind: str, tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
    """Return a Binding of the extension; None if the operator must serve, which negative views need."""
    if _extension is None or any(isinstance(x, Tensor) and x.is_neg() for x in tensors):
        return None
    return getattr(_extension, bind)(*tensors, *rest)


# --- the operators' way -----------------------------------------------------------------------------------------------


def attend_by_operator(
    q: Tensor, layer: KVLayer, batch: PagedBatch, options: AttentionOptions, tree_mask: Tensor | None,
    out: Tensor | None, return_lse: bool, backend: str,
) -> Any:  # fmt: skip
    """Attend through torch.ops.pagedkv. Raises InvalidRequest, KernelUnavailable."""
    rules: tuple[Any, ...] = (*options[:-1], tree_mask, options.split_tokens)
    call = (
        q, layer.k, layer.v, layer.k_scale, layer.v_scale, batch.block_table, batch.rows, batch.seq_lens,
        batch.cu_seqlens_q, batch.max_seqlen_q, batch.max_seqlen_k, *rules,
    )  # fmt: skip
    if out is None:
        out, lse = torch.ops.pagedkv.paged_attention.default(*call, backend)
    else:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        torch.ops.pagedkv.paged_attention_out.default(*call, out, lse, backend)
    return (out, lse) if return_lse else out


def write_by_operator(
    k: Tensor, v: Tensor, layer: KVLayer, batch: PagedBatch, rope: RotaryTable | None, backend: str
) -> None:
    """Store through torch.ops.pagedkv. Raises InvalidRequest, KernelUnavailable."""
    angles = (None, None, None, False) if rope is None else (batch.positions, rope.cos, rope.sin, rope.interleaved)
    pool = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    torch.ops.pagedkv.write_kv.default(k, v, *pool, batch.slots, *angles, backend)


# --- functional calls -------------------------------------------------------------------------------------------------


def cached(layer: KVLayer, key: tuple[Any, ...], bind: Callable[[], Any]) -> Any:
    """Return the bound call of `layer` for `key`; None if this is the first call with `key`, or nothing can be bound.

    bind: makes the bound call, at the second call with `key`.
    """
    if _extension is None:
        return None
    calls = layer._bound
    environment = _extension.environment()
    if environment is None:
        return None
    full_key = (*key, id(registry.KERNELS), environment)
    if calls is None:
        object.__setattr__(layer, "_bound", calls := {})
    try:
        found = calls.get(full_key)
    except TypeError:  # an option of a wrong type cannot be hashed: the operator refuses it
        return None
    if found is None:
        if len(calls) >= MOST_BOUND:
            calls.clear()
        # The first call leaves an entry without a bound call. It keeps the registry alive, so that no other registry
        # gets its id.
        found = calls[full_key] = (None, registry.KERNELS)
    elif found[0] is None:
        found = calls[full_key] = (bind(), registry.KERNELS)
    return found[0]


def _options_of(layer: KVLayer, scale: float | None, *others: Any) -> AttentionOptions:
    return AttentionOptions(max(1, quant.head_dim(layer.k)) ** -0.5 if scale is None else scale, *others)


# --- the kernels that serve -------------------------------------------------------------------------------------------


def _register(binding: Any, kind: int, kernel: Kernel, server_of: Callable[[Backend], Callable[..., None]]) -> None:
    if kernel.backend == cpu.__name__:
        binding.add_server(kind, cpu.isa(), debug.forced_num_threads() or 0, None)
    else:
        binding.add_server(kind, None, 0, server_of(kernel.load()))


def _attention_server(backend: Any, layer: KVLayer, options: AttentionOptions) -> Callable[..., None]:
    """Return the backend's own function for bound calls, or one that makes an AttentionCall each time."""
    if hasattr(backend, "bind_attention"):
        return cast("Callable[..., None]", backend.bind_attention(layer, options))
    pool = (layer.k, layer.v, layer.k_scale, layer.v_scale)

    def serve(q: Tensor, *others: Any) -> None:
        *tables, tree_mask, out, lse = others
        rules = (*options[:-1], tree_mask, options.split_tokens)
        fields: tuple[Any, ...] = (q, *pool, *tables, *rules, out, lse)
        backend.paged_attention(AttentionCall(*fields))

    return serve


def _write_server(backend: Any, layer: KVLayer, rope: RotaryTable | None) -> Callable[..., None]:
    """Return the backend's own function for bound writes, or one that makes a WriteCall each time."""
    if hasattr(backend, "bind_write"):
        return cast("Callable[..., None]", backend.bind_write(layer, rope))
    pool = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    angles: tuple[Any, ...] = (None, None, False) if rope is None else (rope.cos, rope.sin, rope.interleaved)

    def serve(k_new: Tensor, v_new: Tensor, slots: Tensor, positions: Tensor | None) -> None:
        backend.write_kv(WriteCall(k_new, v_new, *pool, slots, positions, *angles))

    return serve


def _layer_text(layer: KVLayer) -> str:
    return f"k {checks.named(layer.k, 'FSKD')} {str(layer.k.dtype).removeprefix('torch.')} on {layer.k.device}"


def _options_text(options: AttentionOptions) -> str:
    values = {name: list(x.shape) if isinstance(x, Tensor) else x for name, x in options._asdict().items()}
    return ", ".join(f"{name}={value}" for name, value in values.items())
