"""Seeded faults of pagedkv/integrations; tests/mutants.py says what a fault is, and how to run this table."""

from __future__ import annotations

from tests.mutants import Fault

FOLDER = "pagedkv/integrations"
FAULTS = (
    Fault(
        "a prompt finds no pages that some layers have not stored: it does",
        "transformers/cache.py",
        "step.ids = None if self._lacking else step.ids",
        "pass",
        "transformers/test_identity.py::test_pages_of_a_call_with_fewer_layers_are_not_found",
    ),
    Fault(
        "no salt reads like other fields: fields are joined without their lengths",
        "transformers/identity.py",
        "return _joined([salt, autocast.encode(), packed])",
        "return salt + autocast.encode() + packed",
        "transformers/test_identity.py::test_no_salt_names_what_another_salt_and_the_model_name_together",
    ),
    Fault(
        "weights set through parameter.data are other weights: only versions count",
        "transformers/identity.py",
        "return marks, contents, hooks",
        "return marks, hooks",
        "transformers/test_identity.py::test_pages_of_a_model_that_changed_are_not_found",
    ),
    Fault(
        "rows with an adapter for each share no pages: they do",
        "transformers/identity.py",
        'return not is_random and ("peft"',
        'return not is_random or ("peft"',
        "transformers/test_adapters.py::test_rows_of_equal_tokens_with_other_adapters_share_no_pages",
    ),
    Fault(
        "pages serve a window only if it holds the same tokens as columns: always",
        "transformers/padding.py",
        "if bool((new & (inside != seen",
        "if False and bool((new & (inside != seen",
        "transformers/test_padding.py::test_the_rules_of_padding_are_what_they_say_of_each_token",
    ),
    Fault(
        "a lack of frames undoes no step of another thread: it does",
        "transformers/pool.py",
        "other.settle_ended()",
        "other.settle()",
        "transformers/test_patch.py::test_threads_in_a_full_pool_undo_no_step_of_another",
    ),
    Fault(
        "a forward pass that raises is undone: its tokens count",
        "transformers/cache.py",
        "step.done = is_done and bool(step.stored or (step.states and step.states.touched))",
        "step.done = True",
        "transformers/test_padding.py::test_a_padded_step_after_an_interrupted_one_is_the_hosts",
    ),
    Fault(
        "cache=None names no cache: prompts then find nothing",
        "transformers/patching.py",
        "if name not in (CACHE, _OLD_NAME)}  # None, if given",
        "}",
        "transformers/test_patch.py::test_a_cache_is_taken_by_its_old_name_and_by_its_new_one",
    ),
    Fault(
        "copies of layers are torch's: they are ours",
        "transformers/linears.py",
        "tuple(torch.nn.Linear if x is PagedLinear else x for x in arguments)",
        "arguments",
        "transformers/test_linears.py::test_copies_of_layers_are_torchs",
    ),
    Fault(
        "a forward that is replaced for all linear layers runs: ours does",
        "transformers/linears.py",
        " or torch.nn.Linear.forward is not _FORWARD",
        "",
        "transformers/test_linears.py::test_a_forward_that_is_replaced_for_all_linear_layers_is_theirs_too",
    ),
    Fault(
        "sinks that change are read again: bound calls keep the first",
        "vllm/pages.py",
        "if self._sinks != version:",
        "if False:",
        "vllm/test_pages.py::test_sinks_that_change_are_read_anew",
    ),
    Fault(
        "a chunk that could not be loaded counts as missing: vLLM asks for it in each step",
        "vllm/chunks.py",
        "if job.op is Op.STORE:",
        "if True:",
        "vllm/test_chunks.py::test_a_chunk_that_cannot_be_loaded_is_not_asked_for_again_at_once",
    ),
    Fault(
        "blocks that are put in front are taken in their order: in the opposite one",
        "vllm/frame_queue.py",
        "self._spare += reversed(blocks)",
        "self._spare += blocks",
        "vllm/test_frame_queue.py::test_blocks_are_taken_in_the_order_of_vllm",
    ),
    Fault(
        "SGLang gets no page behind a missing one: it does",
        "sglang.py",
        "                    break\n",
        "                    continue\n",
        "test_sglang.py::test_a_flipped_bit_and_a_page_of_another_size_are_misses",
    ),
    Fault(
        "a replay begins with the message that was asked for: with the next",
        "zmq_events.py",
        "if kept[0] >= first",
        "if kept[0] > first",
        "test_zmq_events.py::test_a_replay_has_the_messages_that_are_kept",
    ),
    Fault(
        "a call that is refused has stored nothing: K and V are stored",
        "flash_attn.py",
        "stand_in.check_call(q.flatten(0, 1), layer, **options)",
        "pass",
        "test_flash_attn.py::test_refused_before_anything_is_written",
    ),
    Fault(
        "a plan keeps no tensor of the caller: it keeps the starts of queries",
        "flashinfer/wrappers.py",
        'queries = queries.to("cpu", torch.int32, copy=True)',
        "pass",
        "test_flashinfer.py::test_a_plan_keeps_no_tensor_of_the_caller",
    ),
)
