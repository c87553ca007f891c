"""Seeded faults of pagedkv/tiers; tests/mutants.py says what a fault is, and how to run this table."""

from __future__ import annotations

from tests.mutants import Fault

FOLDER = "pagedkv/tiers"
FAULTS = (
    Fault(
        "a frame that is reused while it is stored is not kept: it is",
        "host.py",
        "            if is_whole:\n",
        "            if True:\n",
        "test_faults.py::test_a_frame_that_is_reused_while_it_is_stored_is_not_kept",
    ),
    Fault(
        "frames that a tier may write into are not used: an interrupt hides the loads",
        "fetch.py",
        "                page.under_way[group] = number\n",
        "                pass\n",
        "test_faults.py::test_frames_that_a_tier_writes_go_to_nobody_after_an_interrupt",
    ),
    Fault(
        "a fetch that was interrupted gives its frames back: a cycle keeps its handles alive",
        "fetch.py",
        "        fetch.look = partial(self._look, cache=cache, namer=namer, salt=salt)\n",
        "        fetch.look = lambda _: self._look(fetch, cache=cache, namer=namer, salt=salt)\n",
        "test_faults.py::test_pages_and_frames_of_an_interrupted_call_come_back_without_a_collection",
    ),
    Fault(
        "prompts with one prefix load it once: each loads it",
        "fetch.py",
        "        fetch.after = self._bringer(pages)\n",
        "        fetch.after = None\n",
        "test_faults.py::test_prompts_with_one_prefix_load_it_once",
    ),
    Fault(
        "a prompt is hashed once: each look hashes it again",
        "fetch.py",
        "findable, hashed = ids[: max(0, len(ids) - 1)], fetch.digests",
        "findable, hashed = ids[: max(0, len(ids) - 1)], list[bytes]()",
        "test_life.py::test_a_prompt_is_hashed_once_though_it_waits_for_another_one_and_looks_again",
    ),
    Fault(
        "a store is asked only for what faster tiers lack: for everything",
        "fetch.py",
        "lacking = [page for page in part if page.level is None and bool(page.end) == level.of_states]",
        "lacking = [page for page in part if bool(page.end) == level.of_states]",
        "test_shared.py::test_a_store_is_asked_only_for_pages_that_faster_tiers_lack",
    ),
    Fault(
        "pages of before forget() are not found: their names stay",
        "stack.py",
        "        self._namer = self._namer.renamed()\n",
        "",
        "test_faults.py::test_five_methods_make_a_tier_and_forget_hides_its_pages",
    ),
    Fault(
        "a tier that hung at the close gives its frames back later: never",
        "stack.py",
        "        if self._is_closed and not self.num_pending and not self.num_fetches:\n",
        "        if self._is_closed:\n",
        "test_faults.py::test_frames_that_a_load_still_writes_at_the_close_come_back_when_it_has_ended",
    ),
    Fault(
        "an exception of a tier reaches no caller: it does",
        "level.py",
        "        except Exception as error:  # also of",
        "        except ValueError as error:  # also of",
        "test_faults.py::test_an_exception_of_a_tier_reaches_no_caller_and_the_tier_is_skipped_for_a_while",
    ),
    Fault(
        "an interrupt of the owner stops no thread: a wake is lost",
        "mover.py",
        "        if queued and self._wakes.empty():\n",
        "        if False:\n",
        "test_mover.py::test_an_interrupted_owner_stops_no_thread",
    ),
    Fault(
        "a task that is cancelled uses nothing of the limit: its time is lost",
        "mover.py",
        "        if self._bytes_per_second is None or task.is_cancelled():\n",
        "        if self._bytes_per_second is None:\n",
        "test_mover.py::test_a_task_that_ends_late_is_made_up_for_up_to_the_time_of_one",
    ),
    Fault(
        "pages are stored again after a store was interrupted: they count as under way",
        "slots.py",
        "            self._storing.clear()  # of a call",
        "            pass  # of a call",
        "test_faults.py::test_pages_and_frames_of_an_interrupted_call_come_back_without_a_collection",
    ),
    Fault(
        "the first quota charges pages stored before: it does not",
        "slots.py",
        "            self._charge(tenant, hard)\n",
        "",
        "test_faults.py::test_the_first_quota_of_a_tenant_charges_what_it_has_stored_and_keeps_the_last_used",
    ),
    Fault(
        "a tier that could not begin leaves its folder to others: it keeps its lock",
        "slots.py",
        "            self._end()\n            raise\n",
        "            raise\n",
        "test_disk.py::test_a_tier_that_could_not_begin_leaves_its_folder_to_others",
    ),
    Fault(
        "seals that cannot be voided hide all pages: a later process finds them",
        "disk.py",
        "                with suppress(OSError):\n                    self._path",
        "                with suppress(OSError):\n                    0 and self._path",
        "test_disk.py::test_seals_that_cannot_be_written_hide_all_pages_from_later_processes",
    ),
    Fault(
        "a page that is written while the tiers forget is not sealed: it is",
        "disk.py",
        "            if move.job.is_dropped:  # `forget` has voided",
        "            if False:  # `forget` has voided",
        "test_disk.py::test_a_page_that_is_written_while_the_tiers_forget_is_not_sealed",
    ),
    Fault(
        "a damaged page is a miss: its checksum is not compared",
        "disk.py",
        "        if checksum(content[: self._frame_bytes], move.key.name, self._key) != seal",
        "        if False and checksum(content[: self._frame_bytes], move.key.name, self._key) != seal",
        "test_disk.py::test_pages_that_were_written_with_another_key_are_misses",
    ),
    Fault(
        "forget() deletes no record of another process: it does",
        "shared/tier.py",
        "            if why == THERE:\n",
        "            if False:\n",
        "test_shared.py::test_a_record_that_another_process_stored_first_is_not_deleted",
    ),
    Fault(
        "a store that cannot be asked costs no page of another process: names are noted first",
        "shared/tier.py",
        "        for move, is_there in zip(moves, self._records.find",
        "        for move in moves:\n            self._names[move.slot] = move.key.name\n"
        "        for move, is_there in zip(moves, self._records.find",
        "test_shared.py::test_a_store_that_cannot_be_asked_costs_no_page_of_another_process",
    ),
    Fault(
        "one unreadable object hides no later ones: the listing ends there",
        "shared/objects.py",
        "                    if len(failures) > MOST_FAILURES:\n",
        "                    if failures:\n",
        "test_shared.py::test_an_object_that_cannot_be_read_hides_no_later_one",
    ),
    Fault(
        "an interrupt of a question leaves a thread that answers: a question is noted and not put",
        "shared/tier.py",
        "        self._queries.put(query)\n        self._last = query  # now",
        "        self._last = query\n        self._queries.put(query)  # now",
        "test_shared.py::test_an_interrupt_of_a_question_leaves_a_thread_that_answers",
    ),
    Fault(
        "an error shows no secret of a URL: it is told as it came",
        "urls.py",
        "    return line if line and is_safe else type(error).__name__\n",
        "    return line or type(error).__name__\n",
        "trust/test_urls.py::test_an_exception_of_a_client_is_told_without_the_secrets_of_its_url",
    ),
)
