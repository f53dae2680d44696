"""The experiments still run, and what does not depend on the machine's speed holds in a quick run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.experiments.experiments_process import EXPERIMENTS, ExperimentsProcess
from tests.support.server_fixture import require_server_program

MLX, SERVER, SLOW = pytest.mark.mlx, pytest.mark.server, pytest.mark.slow
MODEL = (pytest.mark.model, pytest.mark.fast_blas, SERVER)
QUICK = {
    "exp_001_cache_specifications.py": (MLX,),
    "exp_002_allocation.py": (MLX,),
    "exp_003_cache_injection.py": MODEL,
    "exp_004_cache_extraction.py": MODEL,
    "exp_006_cache_reconstruction.py": MODEL,
    "exp_007_whole_answer.py": MODEL,
    "exp_008_first_token.py": MODEL,
    "exp_010_throughput.py": MODEL,
    "exp_011_arrival_order.py": MODEL,
    "exp_012_store_dtype.py": MODEL,
    "exp_013_queue_costs.py": (SERVER,),
    "exp_016_store_at_scale.py": (SERVER, SLOW),
    "exp_017_rows.py": MODEL,
    "exp_018_kv_bits.py": MODEL,
    "exp_019_cheaper_first.py": (SERVER, SLOW),
    "exp_020_drafts.py": MODEL,
    "exp_021_day.py": MODEL,
    "exp_022_shared_prefix.py": MODEL,
}
NOT_RUN = {
    "exp_009_peers.py",
    "exp_014_restart.py",
    "exp_015_long_prompt.py",
    "exp_023_guides.py",
    "exp_024_soak.py",
    "exp_025_several_workers.py",
    "exp_026_scale_out.py",
    "exp_027_checkpoints.py",
}
"""Their quick runs would only repeat tests of the worker and the engine, or other experiments; EXP-026 cannot run."""

HOLDS_ON_ANY_MACHINE = {
    "the_counts_are_the_same_in_every_round",
    "a_token_of_qwen2_0_5b_takes_12_kb",
    "the_same_answer_with_and_without_cache",
    "greedy_answers_are_mlx_lms",
    "every_specification_is_read_right",
    "every_turn_equals_the_uncached_run",
    "everything_saved_was_restored",
    "stores_verify_clean",
    "nothing_leaked",
    "first_run_equals_reference",
    "same_prompt_from_cache_equals_reference",
    "continued_from_cache_equals_reference",
    "every_restored_byte_is_the_saved_one",
    "every_answer_is_the_one_without_cache",
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
    "the_queues_length_stays_true",
    "memory_grows_by_at_most_50_mb",
    "the_usage_is_within_1_percent_of_du",
    "every_job_has_its_answer",
    "each_agents_turns_are_in_order",
    "every_line_has_its_result",
}


def results(script: str, folder: Path = EXPERIMENTS) -> dict:
    return json.loads((folder / "results" / f"{script[:7]}_results.json").read_text())


def test_every_experiment_is_run_or_named_as_not_run() -> None:
    scripts = {path.name for path in EXPERIMENTS.glob("exp_*.py")}
    assert scripts == set(QUICK) | NOT_RUN


@pytest.mark.scheduled
@pytest.mark.parametrize("script", [pytest.param(script, marks=marks) for script, marks in QUICK.items()])
def test_a_quick_run_is_right_and_writes_results_report_index_and_plots(
    experiments: ExperimentsProcess, script: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if SERVER in QUICK[script]:
        require_server_program()
    model = ["--model", str(request.getfixturevalue("smollm2"))] if QUICK[script] == MODEL else []
    experiments.run(script, "--quick", "--out", str(tmp_path), *model)
    content = results(script, tmp_path)
    verdict = content["verdict"]
    assert content["quick"] is True
    if (EXPERIMENTS / "results" / f"{script[:7]}_results.json").exists():  # not yet run in full: nothing to compare
        assert set(verdict) == set(results(script)["verdict"])
    assert {name for name in HOLDS_ON_ANY_MACHINE & set(verdict) if not verdict[name]} == set()
    (report,) = tmp_path.glob("EXP-*.md")
    assert report.read_text().startswith(f"# {content['experiment']}, ")
    assert f"[{content['experiment']}]({report.name}) | {content['date']} |" in (tmp_path / "README.md").read_text()
    plots = set(re.findall(r"\(results/(.*\.png)\)", report.read_text()))
    assert plots == {path.name for path in (tmp_path / "results").glob("*.png")}


def test_no_script_imports_mlx_before_its_blas_library_is_loaded() -> None:
    """A script that does ends at once when it runs by itself; the tests' own process has the library already."""
    names = sorted(path.stem for path in EXPERIMENTS.glob("exp_*.py"))
    one = "importlib.import_module(name); assert 'mlx' not in sys.modules, name"
    code = f"import importlib, sys\nfor name in {names}: {one}"
    subprocess.run([sys.executable, "-c", code], cwd=EXPERIMENTS, check=True)
