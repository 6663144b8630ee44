"""Which test runs when: `make test` on every change, `make test-all` at night and in parts, campaigns by hand.

A test of tests/integration starts engines, trainers or whole runs. It runs in `make test` if its node id begins with
an entry of DAILY, and is marked `nightly` otherwise: a new one costs nobody minutes until somebody adds it here. What
README and docs claim of the core should have one in DAILY; what they claim of an extension may be nightly. All other
tests run in `make test`, unless they begin with an entry of NIGHTLY. CI runs a sixth of the nightly tests, by file,
which its commit chooses (--part=2/6); where the tests of a file share nothing, by test.
"""

from __future__ import annotations

import zlib

INTEGRATION = "tests/integration/"
DAILY = (
    # whole runs: over two engines, synchronous, replayed, resumed; and some that lose processes
    "layouts::test_engine_and_trainer_agree_before_and_after_publishes[tp2",
    "replay::test_replay_repeats_a_run_to_the_last_bit",
    "replay::test_other_losses_and_repeated_batches_are_trained",
    "replay::test_too_many_bad_steps_end_the_run_and_say_so",
    "resume::test_run_that_is_asked_to_stop_goes_on_from_there",
    "recovery::test_trainers_that",
    "recovery::test_trainers_in_turns",
    "recovery::test_killed_rollout_process",
    "synchronous::test_recorded_answers_train_the_same_weights",
    # runs over stub engines, with faults
    "hangs::test_agent",
    "hangs::test_hanging_agent",
    "rollout_faults",
    # refusals, checks, programs beside a run
    "isolation",
    "sft::test_loss_and_gradients_are_those_of_transformers[single",
    "sft::test_beginnings",
    "preflight",
    "tutorials",
    "prometheus",
    "slurm_tools",
    "router",
    # engines
    "fleet",
    "continuation",
    "weight_faults",
    "weights::test_what_is_served_is_what_was_sent[one-tensor-full",
    "weights::test_what_is_served_is_what_was_sent[one-distributed-stream",
    "weights::test_what_is_served_is_what_was_sent[one-disk",
    "weights::test_request_across_five_publishes_tells_its_versions",
    "weights::test_engine_with_other_weights_is_out_and_may_rejoin",
    # ranks of Megatron
    "step",
    "policy",
    "trainer::test_loss_gradient_and_weights_ignore_the_layout[unshared",
    "trainer::test_loss_gradient_and_weights_ignore_the_layout[tp2-pp2",
    "trainer::test_every_weight_is_trained",
    "trainer::test_the_loss_is_that_of_transformers_and_plain_autograd",
    "trainer_gpu::test_two_updates",
    "trainer_gpu::test_a_rank_finds",
    "losses::test_every_loss_and_correction_has_a_case",
    "losses::test_figures_and_gradients_do_not_depend_on_the_layout[unshared",
    "losses::test_figures_and_gradients_do_not_depend_on_the_layout[micro-batches",
    "losses::test_figures_and_gradients_do_not_depend_on_the_layout[shuffled",
    "losses::test_figures_and_gradients_do_not_depend_on_the_layout[tp2-loss",
    "losses::test_figures_and_gradients_do_not_depend_on_the_layout[tp2-weight",
    "losses::test_figures_and_gradients_do_not_depend_on_the_layout[tp2-mask",
    "reshard::test_folder_comes_back_from_exporting_ranks_alone[4-tp2-pp2",
    "reshard::test_folder_comes_back_from_exporting_ranks_alone[4-ep2-",
    "reshard::test_stream_holds_one_parameter_at_a_time",
    "families::test_logits_and_gradients_are_those_of_transformers[single",
    "families::test_transformers_loads_the_export_as_the_same_model[single",
    "families::test_engines_compute_what_transformers_computes[smollm3",
    "vision::test_logprobs_and_gradients_are_those_of_transformers[single",
    "checkpoint::test_training_goes_on_as_if_nothing_had_happened[llama-tied",
    "checkpoint::test_disk_that_is_full",
    "variants::test_recomputation_changes_no_bit_of_an_update[pp2-vpp2",
    "variants::test_overlapped_communication_updates_to_the_bit[dp2",
    "algorithms",
    "distillation",
    "head",
    "publish::test_rank_whose_publish_fails_beside_training_ends[0",
)
"""Beginnings of node ids, without tests/integration/test_ and .py."""

NIGHTLY = (
    # simulations of the planner, and the figures of its pages
    "tests/extensions/plan/test_elastic.py::",
    "tests/extensions/plan/test_search.py::",
    "tests/extensions/plan/test_laws.py::",
    "tests/extensions/plan/test_published.py::",
    "tests/extensions/plan/test_documented.py::",
    "tests/test_sizes.py::",
    "tests/extensions/plan/test_concurrency.py::test_limiter_is_as_fast",
    # draws thousands of samples
    "tests/extensions/evaluate/test_figures.py::test_intervals_hold",
    "tests/extensions/evaluate/test_figures.py::test_equal_models_differ",
    # composes the settings of a hundred commands
    "tests/test_docs.py::test_settings_of_commands_that_are_shown_are_accepted",
    # imports in new processes, wheels
    "tests/test_packaging.py::test_wheel",
    "tests/test_packaging.py::test_sdist",
    "tests/test_packaging.py::test_experiments_compose_where_they_are_installed",
    "tests/models/test_catalog.py::test_concurrent_resolves",
    "tests/test_import_hooks.py::test_engine_",
    "tests/test_import_hooks.py::test_collector_rests",
    "tests/extensions/install/test_command.py::test_install_ends_with_a_torch_that_imports",
    "tests/extensions/cpu/test_compiler.py::",
    "tests/test_platforms.py::test_routers",
    "tests/test_platforms.py::test_broken_te",
    # downloads and compresses all packages of the trainer
    "tests/extensions/install/test_bundle.py::test_trainer_of_a_bundle",
    "tests/extensions/install/test_bundle.py::test_gpu_benchmark_plan",
    # each case waits out a limit
    "tests/launch/test_stalls.py::test_run_ends_and_says_what_each_was_doing[",
    "tests/extensions/mathematics/test_math_reward.py::test_no_answer_holds_it_up_or_fails_the_episode",
)
STRUCTURE = (
    "tests/test_imports.py::",
    "tests/test_names.py::",
    "tests/test_docs.py::",
)
"""Tests of the shape of code and documentation: `make check` runs them."""


def tier(nodeid: str) -> str | None:
    """Return the mark of a test's tier: nightly, structure, or none for `make test`."""
    if nodeid.startswith(NIGHTLY):
        return "nightly"
    if nodeid.startswith(STRUCTURE):
        return "structure"
    return None if not nodeid.startswith(INTEGRATION) or daily(nodeid) else "nightly"


def daily(nodeid: str) -> bool:
    """Return whether `make test` has a test of tests/integration."""
    name = nodeid.removeprefix(f"{INTEGRATION}test_").replace(".py", "", 1)
    return any(name.startswith(entry if "::" in entry else f"{entry}::") for entry in DAILY)


def chosen(name: str, part: str) -> bool:
    """Return whether a file, or a test, belongs to a part of all tests: chosen("tests/x.py", "2/6")."""
    number, _, parts = part.partition("/")
    return zlib.crc32(name.encode()) % int(parts) == int(number) % int(parts)
