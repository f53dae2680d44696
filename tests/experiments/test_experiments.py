"""The experiments still run and pass, and the reports in the checkout agree with the results beside them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.experiments.experiments_process import EXPERIMENTS, ExperimentsProcess
from tests.server_fixture import require_server_program

SCRIPTS = {
    "exp_003_cache_injection.py": {
        "first_run_equals_reference",
        "same_prompt_from_cache_equals_reference",
        "continued_from_cache_equals_reference",
        "everything_saved_was_restored",
        "loading_under_500_ms",
    },
}

BENCHMARKS = {
    "exp_006_cache_reconstruction.py": {
        "every_restored_byte_is_the_saved_one",
        "p95_under_5_ms_at_32_blocks_48_layers",
        "latency_is_linear_in_bytes",
        "no_leak",
        "at_most_1_5_copies_at_32_blocks_30_layers",
    },
}
"""Experiments whose verdict depends on the machine's speed."""

BUSY = "one busy agent's"
QUEUE_COSTS = {
    "exp_013_queue_costs.py": {
        "a_claim_takes_under_5_ms",
        "the_queues_length_stays_true",
        "half_as_many_jobs_again_as_simple_worker",
        "steps_delayed_at_most_5_ms_at_p99",
    },
}

STORE_AT_SCALE = {
    "exp_016_store_at_scale.py": {
        "at_least_200_jobs_per_s_with_memory",
        "memory_grows_by_at_most_50_mb",
        "the_store_adds_at_most_1_s_to_a_start",
        "ls_takes_under_1_s",
        "the_usage_is_within_1_percent_of_du",
        "ten_thousand_turns_open_within_2_times_ten_as_long",
    },
}

WITHOUT_MODEL = {
    "exp_001_cache_specifications.py": {
        "every_specification_is_read_right",
        "every_turn_equals_the_uncached_run",
        "everything_saved_was_restored",
        "stores_verify_clean",
    },
    "exp_002_allocation.py": {
        "mean_p50_and_p99_under_1_ms",
        "at_most_twice_as_long_at_10000_blocks",
        "nothing_leaked",
    },
}
WITH_MODEL = {
    "exp_004_cache_extraction.py": {
        "every_row_equals_its_solo_run",
        "cache_handed_over_in_the_step_the_row_ends",
        "rows_end_at_different_steps",
        "others_go_on_undisturbed",
        "handed_over_bytes_never_change",
        "all_restored_after_reopening",
        "continued_equals_uncached",
        "handing_over_under_5_percent_of_decode_time",
    },
    "exp_010_throughput.py": {
        "engine_097_at_every_batch_size",
        "pipeline_095_at_every_batch_size",
        "engine_097_with_steady_rows",
        "engine_097_with_churning_rows",
        "all_texts_equal",
    },
    "exp_017_rows.py": {
        "unequal_rows_2_5_times_as_fast",
        "restored_rows_come_and_go_1_4_times_as_fast",
        "short_rows_come_and_go_1_1_times_as_fast",
        "rows_of_similar_length_as_fast",
        "none_of_them_under_0_97",
        "longest_step_at_most_1_5_quiet_ones",
        "a_join_takes_at_most_1_3_quiet_steps",
        "peak_memory_at_most_1_15_times_the_rows",
        "all_tokens_equal",
    },
    "exp_021_day.py": {
        "every_job_has_its_answer",
        "each_agents_turns_are_in_order",
        "no_stored_token_is_prefilled_again_but_the_last",
        "memory_grows_by_at_most_50_mb_per_1000_jobs",
        "speed_changes_by_at_most_10_percent_per_1000_jobs",
    },
    "exp_022_shared_prefix.py": {
        "never_slower_by_more_than_3_percent",
        "half_the_memory_of_1024_tokens_or_more",
        "all_tokens_equal",
    },
    "exp_020_drafts.py": {
        "quoting_answers_1_2_times_as_fast",
        "others_lose_under_3_percent",
        "all_tokens_equal",
    },
    "exp_012_store_dtype.py": {
        "native_changes_nothing",
        "q8_changes_perplexity_by_under_1_percent",
        "q4_changes_perplexity_by_under_10_percent",
        "stores_verify_clean",
    },
    "exp_018_kv_bits.py": {
        "perplexity_changes_by_under_1_percent",
        "1_8_times_the_sequences_of_a_16_bit_cache",
        "every_answer_in_a_batch_is_the_one_alone",
    },
}
TIMED_AGAINST_THE_CLOCK = {  # their quick runs would only repeat tests of the worker and the engine
    "exp_009_peers.py": {
        "a_later_round_takes_at_most_0_9_of_mlx_lm_servers",
        "the_backlog_at_1_3_of_its_rate",
        "all_answers_equal",
    },
    "exp_014_restart.py": {
        "a_round_after_a_restart_takes_at_most_1.15_times_one_from_ram",
        "no_stored_token_is_prefilled_again_but_the_last",
        "no_step_takes_twice_its_time_while_a_memory_is_read",
    },
    "exp_023_guides.py": {
        "every_whole_answer_is_valid",
        "at_most_5_percent_of_the_speed_lost",
        "rows_beside_a_guided_one_are_as_alone",
    },
    "exp_015_long_prompt.py": {"rows_keep_half_their_speed", "a_cancel_takes_effect_within_2_s"},
}
HOLDS_ON_ANY_MACHINE = {
    "every_specification_is_read_right",
    "every_turn_equals_the_uncached_run",
    "everything_saved_was_restored",
    "stores_verify_clean",
    "nothing_leaked",
    "all_texts_equal",
    "all_tokens_equal",
    "native_changes_nothing",
    "every_row_equals_its_solo_run",
    "cache_handed_over_in_the_step_the_row_ends",
    "rows_end_at_different_steps",
    "others_go_on_undisturbed",
    "handed_over_bytes_never_change",
    "all_restored_after_reopening",
    "continued_equals_uncached",
    "every_job_has_its_answer",
    "each_agents_turns_are_in_order",
}

ALL = SCRIPTS | BENCHMARKS | WITHOUT_MODEL | WITH_MODEL | QUEUE_COSTS | STORE_AT_SCALE | TIMED_AGAINST_THE_CLOCK


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExperimentsProcess]:
    process = ExperimentsProcess(tmp_path_factory.mktemp("experiments") / "log")
    yield process
    process.close()


def results_file(folder: Path, script: str) -> Path:
    return folder / "results" / f"{script[:7]}_results.json"


def report_file(folder: Path, script: str) -> Path:
    (report,) = folder.glob(f"EXP-{script[4:7]}-*.md")
    return report


@pytest.mark.model
@pytest.mark.fast_blas
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_run_passes_and_writes_results_report_and_plot(
    experiments: ExperimentsProcess, script: str, smollm2: Path, tmp_path: Path
) -> None:
    experiments.run(script, "--quick", "--out", str(tmp_path), "--model", str(smollm2))
    content = json.loads(results_file(tmp_path, script).read_text())
    assert content["verdict"] == {"passed": True} | dict.fromkeys(SCRIPTS[script], True)
    assert content["quick"] is True
    assert "PASSED" in report_file(tmp_path, script).read_text().splitlines()[0]
    assert list((tmp_path / "results").glob(f"{script[:7]}_*.png"))


@pytest.mark.model
@pytest.mark.fast_blas
@pytest.mark.parametrize("script", BENCHMARKS)
def test_a_quick_benchmark_restores_exactly_and_writes_results_report_and_plot(
    experiments: ExperimentsProcess, script: str, smollm2: Path, tmp_path: Path
) -> None:
    experiments.run(script, "--quick", "--out", str(tmp_path), "--model", str(smollm2))
    content = json.loads(results_file(tmp_path, script).read_text())
    assert set(content["verdict"]) == BENCHMARKS[script] | {"passed"}
    assert content["verdict"]["every_restored_byte_is_the_saved_one"]
    assert all(row["same_token"] for row in content["direct"])
    assert content["quick"] is True
    assert ": FAILED" in report_file(tmp_path, script).read_text().splitlines()[0], "a quick run leaves out 32 blocks"
    assert list((tmp_path / "results").glob(f"{script[:7]}_*.png"))


@pytest.mark.server
@pytest.mark.parametrize("script", QUEUE_COSTS)
def test_a_quick_run_beside_rqs_worker_writes_results_report_and_plot(
    experiments: ExperimentsProcess, script: str, tmp_path: Path
) -> None:
    require_server_program()
    experiments.run(script, "--quick", "--out", str(tmp_path))
    content = json.loads(results_file(tmp_path, script).read_text())
    assert set(content["verdict"]) == QUEUE_COSTS[script] | {"passed"}
    assert content["verdict"]["the_queues_length_stays_true"]
    assert content["steps"]["busy_ms"]["n"] > 100
    assert "queue costs" in report_file(tmp_path, script).read_text().splitlines()[0]
    assert list((tmp_path / "results").glob(f"{script[:7]}_*.png"))


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("script", STORE_AT_SCALE)
def test_a_quick_run_on_a_store_is_right_and_writes_results_report_and_plot(
    experiments: ExperimentsProcess, script: str, tmp_path: Path
) -> None:
    require_server_program()
    experiments.run(script, "--quick", "--out", str(tmp_path))
    content = json.loads(results_file(tmp_path, script).read_text())
    assert set(content["verdict"]) == STORE_AT_SCALE[script] | {"passed"}
    assert content["verdict"]["memory_grows_by_at_most_50_mb"]
    assert content["verdict"]["the_usage_is_within_1_percent_of_du"]
    assert "a store at scale" in report_file(tmp_path, script).read_text().splitlines()[0]
    assert list((tmp_path / "results").glob(f"{script[:7]}_*.png"))


def check_quick_run(script: str, criteria: set[str], folder: Path) -> None:
    content = json.loads(results_file(folder, script).read_text())
    assert set(content["verdict"]) == criteria | {"passed"}
    assert {name for name in criteria & HOLDS_ON_ANY_MACHINE if not content["verdict"][name]} == set()
    assert content["quick"] is True
    assert content["experiment"] in report_file(folder, script).read_text().splitlines()[0]
    assert list((folder / "results").glob(f"{script[:7]}_*.png"))


@pytest.mark.mlx
@pytest.mark.parametrize("script", WITHOUT_MODEL)
def test_a_quick_run_without_a_model_is_right_and_writes_results_report_and_plot(
    experiments: ExperimentsProcess, script: str, tmp_path: Path
) -> None:
    experiments.run(script, "--quick", "--out", str(tmp_path))
    check_quick_run(script, WITHOUT_MODEL[script], tmp_path)


@pytest.mark.model
@pytest.mark.fast_blas
@pytest.mark.server
@pytest.mark.parametrize("script", WITH_MODEL)
def test_a_quick_run_with_the_model_is_right_and_writes_results_report_and_plot(
    experiments: ExperimentsProcess, script: str, smollm2: Path, tmp_path: Path
) -> None:
    require_server_program()
    experiments.run(script, "--quick", "--out", str(tmp_path), "--model", str(smollm2))
    check_quick_run(script, WITH_MODEL[script], tmp_path)


@pytest.mark.parametrize("script", sorted(ALL))
def test_the_reports_figures_match_the_results(experiments: ExperimentsProcess, script: str, tmp_path: Path) -> None:
    kept = results_file(EXPERIMENTS, script)
    made = results_file(tmp_path, script)
    made.parent.mkdir()
    shutil.copy(kept, made)
    experiments.run(script, "--render", "--out", str(tmp_path))
    assert report_file(tmp_path, script).read_text() == report_file(EXPERIMENTS, script).read_text()


@pytest.mark.parametrize("script", sorted(ALL))
def test_the_results_come_from_a_full_run_with_every_criterion(script: str) -> None:
    content = json.loads(results_file(EXPERIMENTS, script).read_text())
    assert content["quick"] is False
    assert set(content["verdict"]) == ALL[script] | {"passed"}
    assert content["verdict"]["passed"] == all(content["verdict"].values())


def test_no_script_imports_mlx_before_its_blas_library_is_loaded() -> None:
    """A script that does ends at once when it runs by itself; the tests' own process has the library already."""
    names = sorted(path.stem for path in EXPERIMENTS.glob("exp_*.py"))
    one = "importlib.import_module(name); assert 'mlx' not in sys.modules, name"
    code = f"import importlib, sys\nfor name in {names}: {one}"
    subprocess.run([sys.executable, "-c", code], cwd=EXPERIMENTS, check=True)


def test_the_index_has_every_report() -> None:
    index = (EXPERIMENTS / "README.md").read_text()
    for report in EXPERIMENTS.glob("EXP-*.md"):
        assert f"({report.name})" in index


@pytest.mark.parametrize(
    ("script", "number"),
    [
        (
            "exp_001_cache_specifications.py",
            lambda content: f"{content['models'][0]['sizes']['bytes_at_8k'] / 2**20:.0f} MiB",
        ),
        (
            "exp_002_allocation.py",
            lambda content: f"{content['kinds']['join']['sizes']['10000']['p99']:.3f} ms",
        ),
        (
            "exp_009_peers.py",
            lambda content: (
                f"a later round {content['turns']['later_ratio']['median']} times as long (asked: 0.9); the backlog at "
                f"{content['backlog']['rate']['median']} times its rate"
            ),
        ),
        (
            "exp_010_throughput.py",
            lambda content: (
                f"engine {content['worst_engine_ratio']}, pipeline {content['worst_pipeline_ratio']} of a bare loop"
            ),
        ),
        (
            "exp_012_store_dtype.py",
            lambda content: (
                f"{100 * content['sizes']['modes']['q8']['block_bytes_per_token_ratio']:.1f} % of the bytes at "
                f"{100 * (content['perplexity_ratios']['q8'] - 1):+.2f} % perplexity"
            ),
        ),
        (
            "exp_021_day.py",
            lambda content: (
                f"{content['growth_mb_per_1000_jobs']['rss']:+.1f} MB of memory and "
                f"{100 * content['slower_per_1000_jobs']:+.1f} % of time per 1,000 jobs"
            ),
        ),
        (
            "exp_018_kv_bits.py",
            lambda content: (
                f"{content['capacity'][-1]['ratio']} times the sequences at "
                f"{100 * (content['perplexity_ratio'] - 1):+.2f} % perplexity"
            ),
        ),
        (
            "exp_014_restart.py",
            lambda content: f"{content['rounds']['ratio']['SIGTERM']['median']} times a round without one",
        ),
        (
            "exp_016_store_at_scale.py",
            lambda content: (
                f"{content['direct']['rss_growth_mb']:+.0f} MB; "
                f"{content['worker']['with_memory_per_s']['median']:.0f} jobs"
            ),
        ),
        (
            "exp_017_rows.py",
            lambda content: (
                f"with restored caches {content['loads'][1]['ratio']['median']} times mlx-lm's speed; the longest step "
                f"{content['joins']['in rows']['longest']['median']} quiet ones"
            ),
        ),
        (
            "exp_022_shared_prefix.py",
            lambda content: (
                f"{content['cells'][-1]['shared']['cache_mb']:.0f} MB of cache instead of "
                f"{content['cells'][-1]['a copy each']['cache_mb']:.0f}; "
                f"{content['cells'][-1]['speed']['median']} times as fast"
            ),
        ),
        (
            "exp_020_drafts.py",
            lambda content: (
                f"{content['loads'][0]['ratio']['median']} times the speed where an answer quotes its context; "
                f"{content['loads'][1]['ratio']['median']} elsewhere"
            ),
        ),
        (
            "exp_023_guides.py",
            lambda content: (
                f"{sum(one['whole'] for one in content['validity'])} whole answers, all valid; "
                f"{min(one['speed']['median'] for one in content['costs'])} of the speed"
            ),
        ),
        ("exp_015_long_prompt.py", lambda content: f"{content['found']['speed']['median']} of their speed"),
        ("exp_003_cache_injection.py", lambda content: f"{content['timing'][-1]['speedup']} times"),
        ("exp_004_cache_extraction.py", lambda content: f"{content['costs'][-2]['copy_ms']['median']:.1f} ms"),
        (
            "exp_013_queue_costs.py",
            lambda content: (
                f"{content['claims'][BUSY]['claim_ms']['p50']} ms; {content['rates']['ratio']['median']} times the jobs"
            ),
        ),
        (
            "exp_006_cache_reconstruction.py",
            lambda content: (
                f"{content['cells'][-1]['reconstruct_ms']['p95']:.0f} ms for 604 MB; one copy of them "
                f"{content['cells'][-1]['used_copy_ms']['p50']:.0f} ms"
            ),
        ),
    ],
)
def test_the_index_matches_the_results(script: str, number: Callable[[Any], str]) -> None:
    content = json.loads(results_file(EXPERIMENTS, script).read_text())
    (line,) = [
        line for line in (EXPERIMENTS / "README.md").read_text().splitlines() if f"[{content['experiment']}]" in line
    ]
    assert f"| {content['date']} |" in line
    assert f"| {'passed' if content['verdict']['passed'] else 'failed'} |" in line
    assert number(content) in line


def test_the_readmes_figures_match_the_committed_results() -> None:
    readme = (EXPERIMENTS.parent / "README.md").read_text()
    content = json.loads(results_file(EXPERIMENTS, "exp_003_cache_injection.py").read_text())
    rows = {
        f"| {row['prompt_tokens']} | {row['cold_first_token_s']['median']} | {row['warm_first_token_s']['median']} "
        f"| {row['speedup']} |"
        for row in content["timing"]
    }
    shown = [line for line in readme.splitlines() if line.startswith(("| 256 ", "| 512 ", "| 1024 "))]
    assert len(shown) == 3
    assert set(shown) <= rows
    assert f"{len(content['rows'])} of {len(content['rows'])} prompts" in readme


def test_the_readme_shows_the_failed_experiments_with_their_results() -> None:
    readme = (EXPERIMENTS.parent / "README.md").read_text()
    reconstruction, throughput, restart = (
        json.loads((EXPERIMENTS / "results" / f"exp_{number}_results.json").read_text())
        for number in ("006", "010", "014")
    )
    assert not any(content["verdict"]["passed"] for content in (reconstruction, throughput, restart))
    cell = reconstruction["cells"][-1]
    assert f"{cell['blocks']} blocks of {cell['layers']} layers ({cell['bytes'] / 1e6:.0f} MB)" in readme
    assert f"{cell['reconstruct_ms']['p95']:.0f} ms (p95). Copying these bytes once takes" in readme
    assert f"takes {cell['used_copy_ms']['p50']:.0f} ms here" in readme
    assert f"at worst {throughput['worst_engine_ratio']} and {throughput['worst_pipeline_ratio']}" in readme
    engine = [load["engine_ratio"]["median"] >= 0.97 for load in throughput["loads"]]
    pipeline = [load["pipeline_ratio"]["median"] >= 0.95 for load in throughput["loads"] if "pipeline_ratio" in load]
    assert f"in {sum(engine)} of {len(engine)} loads, the worker in {sum(pipeline)} of {len(pipeline)}" in readme
    ratio = restart["rounds"]["ratio"]
    assert f"**yes**: {ratio['SIGTERM']['median']} times, {ratio['SIGKILL']['median']} after a `kill -9`" in readme
    assert f"the longest took {restart['steps']['longest_over_quiet']['reading']} times a quiet one" in readme


def test_the_ram_cache_can_be_measured_against_the_disk() -> None:
    command = [sys.executable, str(EXPERIMENTS / "ram_cache_against_disk.py"), "--rounds", "1", "--blocks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert {"disk_ms", "ram_ms", "disk_take_over_ms", "ram_take_over_ms", "numpy_to_mlx_ms"} < set(
        json.loads(done.stdout)
    )
