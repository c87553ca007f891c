"""Seeded faults of kernels and of Triton; tests/mutants.py says what a fault is, and how to run this table."""

from __future__ import annotations

from tests.mutants import Fault

FOLDER = "pagedkv/kernels"
FAULTS = (
    Fault(
        "out that shares memory is refused: its elements are not compared",
        "checks.py",
        "        if rule.is_written and not x.is_contiguous():\n",
        "        if False:\n",
        "test_checks.py::test_a_wrong_shape_dtype_device_or_value_is_named",
    ),
    Fault(
        "a tree mask has a column for each new token: any width will do",
        "checks.py",
        "(size >= known if is_least else size == known)",
        "(is_least or size == known)",
        "test_checks.py::test_a_wrong_shape_dtype_device_or_value_is_named",
    ),
    Fault(
        "a table of fewer rows than sequences is refused: its rows are not counted",
        "checks.py",
        '    if call.rows is None and sizes["A"] < sizes["B"]:\n',
        "    if False:\n",
        "test_checks.py::test_a_wrong_shape_dtype_device_or_value_is_named",
    ),
    Fault(
        "values never replace the scales of their keys: a bound store takes them",
        "bound.py",
        "        if checks.scales_of_two(self._layer):  # else",
        "        if True:  # else",
        "latents/test_latents.py::test_a_value_is_refused_where_it_would_replace_the_scale_of_its_key",
    ),
    Fault(
        "a layer that moved is served where it is: a rebound call keeps its kernel of the old layer",
        "bound.py",
        "        self._layer, self._rest, self._backend = replace(layer), rest, backend or registry.AUTO\n",
        "        self._layer, self._rest, self._backend = layer, rest, backend or registry.AUTO\n",
        "bound/test_bound_attention.py::test_bound_calls_neither_grow_without_bound_nor_keep_a_layer_alive",
    ),
    Fault(
        "a kernel that was named serves or objects: another one serves silently",
        "registry.py",
        "else [x for x in kernels if x.name == backend]",
        "else [*(x for x in kernels if x.name == backend), kernels[-1]]",
        "test_registry.py::test_a_named_kernel_that_objects_raises_with_every_reason",
    ),
    Fault(
        "a soft cap below every score leaves equal weights: float32 holds 0 in its place",
        "cuda/attention.py",
        "max(softcap, LEAST_CAP)",
        "softcap",
        "test_laws.py::test_a_soft_cap_below_every_score_leaves_equal_weights",
    ),
    Fault(
        "an infinite state takes the whole weight: it becomes NaN",
        "reference.py",
        "(torch.where(lse.isinf(), 0.0, x.sigmoid())[..., None]",
        "(x.sigmoid()[..., None]",
        "partition/test_merge.py::test_infinity_leaves_zeros_and_nan_is_not_hidden",
    ),
    Fault(
        "FlashAttention 2 never gets a bound of one query: it does",
        "library/backend.py",
        "(max(2, call.max_seqlen_q), call.max_seqlen_k)",
        "(call.max_seqlen_q, call.max_seqlen_k)",
        "library/test_products.py::test_flash_attention_2_serves_decode_with_padding_and_sequences_without_queries",
    ),
    Fault(
        "chunks of several sequences have several lengths: cuDNN gets them",
        "library/products.py",
        "or (prefix and B > 1)",
        "",
        "library/test_products.py::test_chunks_of_several_sequences_never_go_to_cudnn",
    ),
    Fault(
        "copies are as wide as the worse aligned pool allows: only K is looked at",
        "cuda/attention.py",
        "else (call.k,)), call.v):",
        "else (call.k,)),):",
        "cuda/test_launch.py::test_the_worse_aligned_of_both_pools_decides_the_bytes_of_a_copy",
    ),
    Fault(
        "launches follow from all strides: the strides of `out` are left out of the key",
        "cuda/attention.py",
        "q.stride(), out.stride(), table.shape",
        "q.stride(), table.shape",
        "cuda/test_launchers.py::test_launches_follow_each_fact_that_they_depend_on",
    ),
    Fault(
        "values in rows of keys are stored after them: in one launch",
        "cuda/moves.py",
        "((0, 1), (1, 1)) if _overlap(call.k, call.v) else",
        "((0, 2),) if _overlap(call.k, call.v) else",
        "cuda/test_launchers.py::test_rows_of_values_that_lie_in_rows_of_keys_are_written_after_them",
    ),
    Fault(
        "each capture keeps its own memory: two graphs share tickets",
        "cuda/driver.py",
        "            return streams.capture_of(stream), stream\n",
        "            return 1, stream\n",
        "cuda/test_driver.py::test_launches_are_in_order_within_a_capture_or_within_a_stream_whatever_its_handle",
    ),
    Fault(
        "a damaged cubin is compiled again: its checksum is not compared",
        "cuda/compiler.py",
        "return cubin if hashlib.sha256(cubin).digest() == digest else None",
        "return cubin",
        "cuda/test_cubins.py::test_a_damaged_file_is_compiled_again",
    ),
    Fault(
        "a window hides what lies before it: only the last tiles of a prefill are masked",
        "../../triton_kernels/prefill.py",
        "edges = not (spec.window or (spec.tree and not spec.split))",
        "edges = not (spec.tree and not spec.split)",
        "test_conformance.py::test_out_and_lse_are_as_right_as_plain_torch -k triton-cpu",
    ),
)
