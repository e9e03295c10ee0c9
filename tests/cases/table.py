"""Which test holds which reported fault.

An entry names tests as ``file::function`` below ``tests/``; a test of this table checks that each exists. What cannot be
tested on the machines at hand says so instead, with what stands for it.
"""

from __future__ import annotations

A, V, B, C, D, E, F, N = (
    f"cases/test_{name}.py"
    for name in (
        "a_masks", "a_values", "b_rejections", "c_slow", "d_composition", "e_cache", "f_multihead", "n_own",
    )
)  # fmt: skip
GA, GB, FACTS = "cases/gpu/test_a_gpu.py", "cases/gpu/test_bcd_gpu.py", "gpu/test_cuda_facts.py"
GUARDS, COMPILE, COMPOSITION = "test_guards.py", "test_compile.py", "test_composition.py"
CAPTURE, CHECKPOINT, STORE = "test_capture.py", "test_checkpointing.py", "test_store.py"
FAILURES, SELECTOR, TUNER, LOCKS = "test_runtime_failures.py", "test_selector.py", "test_tuner.py", "test_locks.py"

TESTS: dict[str, tuple[str, ...]] = {
    "R01": (f"{V}::test_very_negative_scores_keep_gradients", f"{GA}::test_very_negative_scores_keep_gradients"),
    "R02": (f"{V}::test_a_float32_mask_beside_halves", f"{GA}::test_a_float32_mask_beside_halves"),
    "R04": (f"{GA}::test_mask_offsets_beyond_32_bits", f"{GUARDS}::test_mask_offsets_of_efficient_end_at_2_to_the_32"),
    "R05": (f"{V}::test_keys_broadcast_over_heads", f"{GA}::test_keys_broadcast_over_heads"),
    "R07": (f"{A}::test_blocks_of_packed_sequences_match_the_sequences",),
    "R08": (f"{A}::test_a_row_that_sees_no_key_is_zero", f"{GA}::test_a_row_that_sees_no_key_is_zero"),
    "R10": (
        f"{A}::test_columns_of_the_smallest_number_give_finite_gradients",
        f"{GA}::test_columns_of_the_smallest_number",
    ),
    "R11": (f"{V}::test_nan_inputs_are_not_judged_and_not_hidden_by_math",),
    "R13": (f"{A}::test_sliding_windows_are_finite",),
    "R14": (f"{A}::test_left_padding_stays_finite_over_two_layers",),
    "R16": (
        f"{V}::test_gradients_do_not_depend_on_the_layout_of_grad_out",
        f"{GB}::test_gradients_do_not_depend_on_the_layout_of_grad_out",
    ),
    "R17": (f"{V}::test_any_layout_of_the_inputs", f"{GA}::test_views_are_read_where_they_lie"),
    "R20": (f"{V}::test_a_packed_projection_split_over_heads", f"{GA}::test_a_packed_projection_split_over_heads"),
    "R22": (f"{V}::test_odd_head_dims_have_right_gradients", f"{GA}::test_odd_head_dims_have_right_gradients"),
    "R23": (f"{V}::test_very_negative_scores_at_one_query", f"{GA}::test_very_negative_scores_at_one_query"),
    "R25": (f"{V}::test_large_values_do_not_overflow", f"{GA}::test_large_values_do_not_overflow"),
    "R26": (f"{A}::test_a_mask_that_alone_wants_a_gradient_gets_it", f"{GA}::test_a_mask_that_alone_wants_a_gradient"),
    "R27": (f"{A}::test_mask_and_triangle_both_apply", f"{GA}::test_mask_and_triangle_both_apply"),
    "R28": (
        f"{A}::test_the_triangle_is_top_left",
        f"{D}::test_mask_objects_of_pytorch_are_taken",
        f"{GA}::test_mask_and_triangle_both_apply",
    ),
    "R29": (
        f"{A}::test_a_mask_of_three_axes_is_per_head",
        f"{A}::test_a_mask_of_three_axes_that_fits_no_heads_is_refused",
    ),
    "R31": (
        f"{GA}::test_index_ranges_that_would_end_the_process_are_closed",
        f"{GUARDS}::test_flash_backward_buffers_end_at_2_to_the_31",
    ),
    "R32": (
        f"{GA}::test_a_mask_between_31_and_32_bits_trains",
        f"{GA}::test_index_ranges_that_would_end_the_process_are_closed",
    ),
    "R34": (f"{V}::test_views_that_start_between", f"{GA}::test_views_that_start_between"),
    "R37": (
        f"{GA}::test_decoding_with_few_key_heads_and_left_padding",
        f"{GA}::test_the_reported_sm100_fault_is_denied_there",
    ),
    "R38": (
        f"{B}::test_more_batches_or_heads_than_a_launch_grid",
        f"{GB}::test_more_batches_or_heads_than_a_launch_grid",
    ),
    "R39": (
        f"{GB}::test_65536_batches_with_a_key_mask",
        f"{FAILURES}::test_a_synchronous_error_is_answered_by_the_safe_default",
    ),
    "R40": (f"{B}::test_empty_sizes_are_answered_and_never_tuned", f"{GB}::test_empty_sizes"),
    "R41": (
        f"{B}::test_all_sizes_of_zero_do_not_end_the_process",
        f"{B}::test_lengths_that_do_not_fit_are_named_before_anything_runs",
    ),
    "R43": (
        f"{FAILURES}::test_a_route_that_fails_in_its_trials_is_never_run",
        f"{GB}::test_a_small_call_in_inference_mode",
    ),
    "R44": (
        f"{FAILURES}::test_a_synchronous_error_is_answered_by_the_safe_default",
        f"{GB}::test_a_stream_of_changing_lengths",
    ),
    "R46": (
        f"{V}::test_gradients_do_not_depend_on_the_layout_of_grad_out",
        f"{GB}::test_gradients_do_not_depend_on_the_layout_of_grad_out",
    ),
    "R47": (f"{B}::test_mask_rows_of_any_length", f"{GB}::test_mask_rows_of_any_length"),
    "R49": (f"{V}::test_odd_head_dims_have_right_gradients", f"{GA}::test_odd_head_dims_have_right_gradients"),
    "R50": (
        f"{B}::test_value_dims_that_differ",
        f"{B}::test_a_backend_that_cannot_serve_says_why",
        f"{GB}::test_value_dims_that_differ",
    ),
    "R52": (f"{B}::test_autocast_casts_the_mask_too", f"{GB}::test_autocast"),
    "R53": (f"{V}::test_a_float32_mask_beside_halves", f"{V}::test_other_mask_dtypes_are_refused_by_name"),
    "R55": (f"{FAILURES}::test_a_route_that_fails_at_its_first_real_call",),
    "R56": (
        f"{C}::test_any_route_that_is_faster_wins",
        f"{GB}::test_tuned_is_not_slower_than_stock_by_its_own_measurements",
    ),
    "R58": (
        f"{C}::test_plan_cost_is_part_of_the_record",
        f"{SELECTOR}::test_a_decode_loop_pays_no_plan_per_step_and_few_tunings",
    ),
    "R59": (
        f"{C}::test_a_length_that_grows_pays_no_plan_and_few_tunings",
        f"{GB}::test_decoding_pays_no_plan_per_step",
    ),
    "R61": (f"{C}::test_grouped_heads_reach_fused_backends", f"{GB}::test_grouped_heads"),
    "R62": (f"{C}::test_grouped_heads_reach_fused_backends", f"{GB}::test_grouped_heads"),
    "R63": (f"{C}::test_other_ranks_reach_fused_backends", f"{GB}::test_other_ranks_reach_fused_backends"),
    "R64": (f"{C}::test_other_ranks_reach_fused_backends", f"{GB}::test_other_ranks_reach_fused_backends"),
    "R65": (f"{C}::test_half_math_is_measured_like_any_other",),
    "R67": (
        f"{C}::test_masks_are_not_spread_over_axes_they_broadcast",
        f"{GB}::test_broadcast_masks_take_no_memory_per_head",
    ),
    "R68": (f"{C}::test_any_route_that_is_faster_wins",),
    "R70": (
        f"{D}::test_a_call_never_touches_the_switches_of_the_process",
        f"{D}::test_what_another_thread_switched_off_is_respected_and_no_error",
    ),
    "R71": (f"{COMPILE}::test_compile_caches_of_other_processes",),
    "R73": (f"{COMPILE}::test_an_explicit_backend_stands_in_the_graph",),
    "R74": (f"{COMPILE}::test_is_causal_from_a_symbolic_length",),
    "R76": (f"{COMPILE}::test_autocast_and_gradient_modes_inside_a_graph",),
    "R77": (
        f"{COMPOSITION}::test_export_holds_sdpa",
        f"{COMPOSITION}::test_jit_trace_holds_sdpa",
        f"{COMPOSITION}::test_jit_script_holds_sdpa",
    ),
    "R79": (
        f"{CAPTURE}::test_a_miss_runs_the_safe_default_and_is_noted",
        f"{CAPTURE}::test_a_miss_of_another_thread_does_not_break_a_capture",
    ),
    "R80": (f"{CHECKPOINT}::test_gradients_are_right", "test_traces.py::test_tuning_inside_a_checkpoint"),
    "R82": (f"{COMPOSITION}::test_forward_mode_runs_where_sdpa_refuses",),
    "R83": (f"{D}::test_second_derivatives", f"{COMPOSITION}::test_double_backward_when_asked_for"),
    "R85": (f"{COMPOSITION}::test_nested_jagged", f"{COMPOSITION}::test_nested_strided"),
    "R86": (f"{D}::test_strict_mode_repeats_bit_for_bit", f"{GA}::test_strict_mode_repeats_bit_for_bit"),
    "R88": (f"{D}::test_module_has_no_dropout_of_its_own",),
    "R89": (f"{B}::test_autocast_brings_unequal_dtypes_together", f"{GB}::test_autocast"),
    "R91": (f"{D}::test_the_memory_order_is_that_of_pytorch", f"{GB}::test_the_memory_order_is_that_of_pytorch"),
    "R92": (
        f"{COMPILE}::test_varying_lengths_take_two_graphs",
        f"{COMPILE}::test_the_operator_runs_stock_where_a_route_cannot",
    ),
    "R94": (
        f"{STORE}::test_bad_content_is_a_miss_told_once",
        f"{STORE}::test_a_full_folder_in_the_place_of_a_file_stays",
    ),
    "R95": ("test_store_processes.py::test_killed_writers_lose_and_tear_nothing",),
    "R97": (
        f"{STORE}::test_a_folder_deleted_between_is_made_again",
        f"{STORE}::test_an_unwritable_folder_is_told_once",
    ),
    "R98": (
        f"{LOCKS}::test_a_lock_held_by_another_process_is_waited_for_no_longer_than_asked",
        f"{LOCKS}::test_a_refused_lock_does_not_stop_tuning",
    ),
    "R100": (
        f"{STORE}::test_without_a_home_a_private_folder_serves",
        f"{STORE}::test_a_home_that_does_not_exist_is_not_made",
    ),
    "R101": (
        f"{STORE}::test_a_copied_environment_folder_is_a_miss",
        f"{STORE}::test_environments_do_not_share_records",
    ),
    "R103": (f"{STORE}::test_bad_content_is_a_miss_told_once", "test_record.py::test_malformed_forms_are_refused"),
    "R104": (f"{E}::test_one_option_more_is_another_choice", f"{E}::test_each_switch_of_the_process_is_another_choice"),
    "R106": (f"{E}::test_a_bucket_is_no_permission",),
    "R107": (f"{E}::test_each_shape_has_its_own_key",),
    "R109": (
        f"{V}::test_the_answer_stays_the_same_when_it_is_chosen_again",
        "test_verify.py::test_wrong_values_are_found_and_quarantined",
    ),
    "R110": (
        f"{E}::test_stored_names_are_hints",
        f"{E}::test_a_stored_winner_that_the_process_switched_off_is_not_run",
    ),
    "R112": (
        f"{E}::test_a_thousand_lengths_tune_a_bounded_number_of_times",
        f"{SELECTOR}::test_wild_lengths_cost_bounded_tunings",
    ),
    "R113": (
        f"{E}::test_random_sizes_stay_within_the_budget_of_the_process",
        f"{E}::test_a_signature_may_be_tuned_only_when_it_comes_back",
    ),
    "R116": (
        f"{E}::test_random_sizes_stay_within_the_budget_of_the_process",
        "test_timing.py::test_the_budget_ends_the_race_but_everyone_is_timed",
    ),
    "R118": (
        "test_clocks.py::test_device_time_holds_no_gaps_of_the_host",
        f"{COMPILE}::test_host_time_is_no_part_of_a_graphs_cost",
    ),
    "R119": (f"{E}::test_the_order_of_routes_does_not_rank_them", "test_timing.py::test_rounds_interleave"),
    "R121": (
        f"{FAILURES}::test_out_of_memory_in_a_trial_rejects_and_goes_on",
        f"{FAILURES}::test_a_route_that_wants_too_much_memory_is_not_tried",
    ),
    "R122": ("test_threads.py::test_tables_are_bounded", f"{STORE}::test_the_number_of_records_is_bounded"),
    "R124": (f"{F}::test_r124_one_masked_query_leaves_gradients_finite",),
    "R125": (f"{F}::test_r125_one_head_fully_masked",),
    "R127": (f"{F}::test_r127_is_causal_means_causal",),
    "R128": (f"{F}::test_r128_masks_of_each_rank", f"{F}::test_r128_wrong_rank_is_refused"),
    "R130": (f"{F}::test_r130_odd_heads_and_no_bias",),
    "R131": (f"{F}::test_r131_padding_as_bool_and_as_float", f"{F}::test_r131_float_padding_of_ones_is_told"),
    "R133": (f"{F}::test_r133_out_proj_is_called",),
    "R134": (f"{F}::test_r134_state_dict_and_start_values",),
    "R136": (f"{F}::test_r136_output_is_contiguous",),
    "R137": (f"{F}::test_r137_nested_inputs_in_training",),
    "R139": (f"{F}::test_r139_scripting_and_tracing",),
    "R140": (f"{F}::test_r140_returned_weights", f"{F}::test_r140_weights_need_no_choice"),
    "N1": (f"{N}::test_masks_of_fewer_than_two_axes_end_as_in_pytorch_and_say_why",),
    "N2": (f"{F}::test_n2_appended_positions_stay_visible",),
    "N3": (
        f"{N}::test_the_safe_default_never_leans_on_a_priority_list",
        f"{D}::test_a_pinned_backend_is_honoured_or_refused_as_by_pytorch",
    ),
    "N4": (f"{N}::test_unequal_key_and_value_heads_are_pytorchs_to_answer",),
    "N5": (
        "test_traces.py::test_a_tuned_answer_can_be_used_in_later_autograd",
        f"{N}::test_inputs_from_inference_mode_and_out_of_it_do_not_mix",
    ),
    "N6": (f"{A}::test_a_mask_that_alone_wants_a_gradient_gets_it",),
    "N7": (f"{N}::test_a_head_dim_of_zero_gives_the_mean_of_values",),
}

NOT_TESTED: dict[str, str] = {
    "R19": "MPS only, and no such device at hand; MPS is never measured: its calls are handed to PyTorch untouched",
    "R35": "the flex backend is not part of this version; its block masks come with it",
}
OPEN: dict[str, str] = {
    "R114": "open: ranks that choose together (smartattn.distributed)",
    "R115": "open: as R114",
}
PARTLY: dict[str, str] = {
    "R17": "MPS only as reported; the kind (views made by permute) is tested on CPU and CUDA",
    "R22": "reported for an external package; the kind (odd head dims in training) is tested for PyTorch's own operators",
    "R37": "needs sm100; its entry of the deny-list is tested, and the decode cell on sm90",
    "R62": "needs an architecture before sm80; the routes that it needs are tested elsewhere",
}

IDS = tuple(
    (  # noqa: SIM905 - a hundred names are read more easily as words
        "R01 R02 R04 R05 R07 R08 R10 R11 R13 R14 R16 R17 R19 R20 R22 R23 R25 R26 R27 R28 R29 R31 R32 R34 R35 "
        "R37 R38 R39 R40 R41 R43 R44 R46 R47 R49 R50 R52 R53 R55 R56 R58 R59 R61 R62 R63 R64 R65 R67 R68 R70 "
        "R71 R73 R74 R76 R77 R79 R80 R82 R83 R85 R86 R88 R89 R91 R92 R94 R95 R97 R98 R100 R101 R103 R104 R106 "
        "R107 R109 R110 R112 R113 R114 R115 R116 R118 R119 R121 R122 R124 R125 R127 R128 R130 R131 R133 R134 "
        "R136 R137 R139 R140 N1 N2 N3 N4 N5 N6 N7 "
    ).split()
)
"""Every case of the collection of reported faults."""
