"""How many cases of the longest tests `make test` runs, evenly spread over all of them; the others are `slow`.

`make test` is to end within ten minutes on two cores; `make test-all` leaves nothing out.
"""

from __future__ import annotations

CASES = {
    "tests/model/test_kept_state.py::test_every_offset_in_a_page": 1,
    "tests/model/test_kept_state.py::test_a_prompts_end_is_a_base_whatever_chunk_it_ended_with": 1,
    "tests/model/test_kept_state.py::test_trees_of_prompts_many_in_a_step": 2,
    "tests/model/test_grammars.py::test_texts_that_end_are_valid_and_are_the_same_alone_together_and_with_drafts": 1,
    "tests/model/test_speculation.py::test_drafts_that_hold_up_to_any_place_change_no_text": 1,
    "tests/model/test_speculation.py::test_the_models_own_drafts_change_no_text": 0,
    "tests/model/test_speculation.py::test_as_many_tokens_come_as_are_right": 2,
    "tests/model/test_speculation.py::test_a_row_past_its_end_computes_nothing_and_brings_nothing": 2,
    "tests/model/test_speculation.py::test_places_and_numbers_that_nobody_can_mean_are_refused": 2,
    "tests/model/test_speculation.py::test_a_fresh_sequence_on_a_used_slab_has_no_drafts": 2,
    "tests/model/test_speculation.py::test_steps_without_drafts_say_what_they_always_said": 2,
    "tests/model/test_rejection_served.py::test_greedy_texts_are_as_ever_and_drawn_ones_the_same_twice": 1,
    "tests/model/test_rejection_served.py::test_without_drafts_texts_are_those_of_the_other_rule": 1,
    "tests/model/test_group_drafts.py::test_members_draft_each_for_its_own_rows": 1,
    "tests/model/test_paged_rows.py::test_chunks_of_any_size_give_the_same_bits": 5,
    "tests/model/test_paged_rows.py::test_state_moved_to_another_arena_continues_with_the_same_bits": 2,
    "tests/model/test_paged_rows.py::test_rejected_drafts_are_overwritten_without_rollback": 8,
    "tests/model/test_paged_rows.py::test_prompts_in_one_pass_have_the_bits_that_they_have_alone": 6,
    "tests/model/test_paged_drafts.py::test_drafts_have_the_same_bits_in_any_company_and_however_the_context_came": 1,
    "tests/model/test_rejection_served.py::test_texts_follow_the_chain_rule_where_steps_draft_and_do_not": 2,
    "tests/model/test_rejection.py::test_served_tokens_come_as_often_as_they_should": 1,
    "tests/model/test_device.py::test_pages_and_slab_moved_by_address_continue_the_text": 3,
    "tests/model/test_group.py::test_a_group_computes_what_single_ranks_do": 1,
    "tests/batch/test_chaos.py::test_no_line_is_lost_doubled_or_wrong": 3,
    "tests/actors/test_rank_faults.py::test_failing_and_late_writes_never_reach_a_client": 1,
    "tests/actors/test_rank.py::test_requests_survive_the_death_of_any_rank": 2,
    "tests/actors/test_rank.py::test_aborts_at_any_moment_are_acknowledged_by_both_ranks": 4,
    "tests/actors/test_drafting.py::test_aborts_and_deaths_at_any_moment": 2,
    "tests/actors/test_groups.py::test_requests_moves_and_deaths_at_any_moment": 3,
    "tests/sim/test_drafting.py::test_groups_that_draft_keep_every_promise": 2,
    "tests/core/test_sides.py::test_with_caches_and_faults_memory_is_accounted_for_on_every_way_out": 10,
    "tests/core/test_sides.py::test_with_faults_no_write_hits_the_wrong_memory_and_only_burnt_epochs_keep_any": 10,
    "tests/core/test_sides.py::test_with_caches_and_without_faults_nothing_waits_for_ever_or_goes_on_from_other_ids": 15,  # noqa: E501
    "tests/core/test_sides.py::test_with_turns_and_faults_memory_is_accounted_for_on_every_way_out": 10,
    "tests/core/test_sides.py::test_turns_come_back_and_nothing_waits_for_them": 15,
    "tests/model/test_group_drafts.py::test_a_step_that_breaks_anywhere_finds_the_same_drafts": 1,
    "tests/model/test_group.py::test_a_step_that_breaks_anywhere_runs_again": 1,
    "tests/model/test_group_kept.py::test_a_step_on_kept_state_breaks_and_runs_again": 1,
    "tests/model/test_nano_drafts.py::test_what_is_measured_adds_up": 0,
    "tests/model/test_paged_drafts.py::test_golden_blocks": 2,
    "tests/model/test_paged_drafts.py::test_golden_drafts_of_the_layer_that_predicts_ahead": 8,
    "tests/actors/test_groups.py::test_a_lost_member_breaks_the_group_which_goes_on_and_takes_it_back": 2,
    "tests/sim/test_planted_groups.py::test_a_planted_bug_is_found": 3,
    "tests/sim/test_planted.py::test_a_planted_bug_is_found": 10,
    "tests/sim/test_planted_turns.py::test_a_planted_bug_is_found": 1,
    "tests/sim/test_groups.py::test_auto_moves_experts_beside_requests_and_loses_less_to_skew": 0,
    "tests/e2e/test_handoff.py::test_pushed_prompts_go_on_as_one_device_would": 1,
    "tests/e2e/test_batch_chaos.py::test_a_killed_rank_changes_no_answer": 1,
    "tests/e2e/test_batch_chaos.py::test_a_run_that_is_ended_again_and_again_is_resumed_to_the_end": 0,
    "tests/e2e/test_prefix_cache.py::test_few_pages_cost_hits_and_no_text": 0,
    "tests/e2e/test_prefix_cache.py::test_what_could_be_spared_is_spared": 0,
    "tests/e2e/test_prefix_cache.py::test_turns_have_the_texts_that_they_have_without_a_cache": 0,
    "tests/e2e/test_hand_back.py::test_a_turn_computes_only_what_is_new": 1,
    "tests/e2e/test_drafting.py::test_texts_are_those_without_drafts": 0,
    "tests/e2e/test_handoff_chaos.py::test_a_write_of_a_cancelled_request_lands_in_quarantine": 0,
    "tests/e2e/test_sampling.py::test_a_killed_decode_rank_changes_no_text_and_no_number": 0,
    "tests/e2e/test_sampling.py::test_answers_to_one_prompt_differ_and_each_ends_at_its_own_stop": 0,
    "tests/e2e/test_sampling.py::test_log_probabilities_add_up": 0,
    "tests/e2e/test_processes.py::test_answers_of_real_processes_are_those_of_one_device": 0,
    "tests/sim/test_groups.py::test_fresh_seeds_of_groups_keep_every_promise": 0,
    "tests/sim/test_processes.py::test_a_rack_that_nobody_built_is_looked_at_planned_for_and_cured": 0,
    "tests/e2e/test_groups.py::test_a_group_gives_the_tokens_of_one_rank": 0,
    "tests/sim/test_corrupt.py::test_turns_with_flipped_bits_do_not_come_into_the_cache": 0,
    "tests/e2e/test_grammars.py::test_texts_are_valid_and_the_same_after_a_killed_decode_rank": 0,
    "tests/e2e/test_groups.py::test_experts_move_under_load_and_back": 0,
    "tests/e2e/test_sampling.py::test_a_request_has_its_text_alone_and_among_others": 0,
    "tests/nano/test_nano.py::test_a_run_in_miniature_lowers_the_loss_resumes_and_exports_a_loadable_checkpoint": 0,
    "tests/sim/test_seeds.py::test_a_crash_at_every_kth_step_of_turns_that_are_handed_back": 1,
    "tests/model/test_nano_rows.py::test_chunks_and_single_rows_of_any_size_give_the_bits_of_one_pass": 1,
}


def choose(count: int, wanted: int) -> set[int]:
    """`wanted` numbers below `count`, the first and the last among them where there is room for both."""
    if wanted >= count:
        return set(range(count))
    return {round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)}
