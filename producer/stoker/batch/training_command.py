"""`stoker batch export-training`: a training set for a smaller model. Needs no server. Only command-line texts.

docs/distillation.md explains what is in it, and what to do with it.
"""

from pathlib import Path
from typing import Any, Final

import click

from stoker.batch.input_file import InputChanged, InputFile
from stoker.batch.training_example import PARTS
from stoker.batch.training_export import TrainingExport, listed
from stoker.batch.training_folder import TrainingFolder
from stoker.command_parts import json_option, or_usage_error, show
from stoker_shared.errors import StokerError
from stoker_shared.help_layout import LaidOutCommand, examples, options_under

_BATCH_EXAMPLES: Final = 4
"""`mlx_lm.lora`'s default for `--batch-size`; it refuses a file with fewer lines."""

_answers = options_under("Answers")
_set = options_under("Training set")
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    "export-training",
    cls=LaidOutCommand,
    epilog=examples(
        "stoker batch export-training IN.jsonl OUT.jsonl --to training",
        "stoker batch export-training IN.jsonl OUT.jsonl --to training --model Qwen3-32B-4bit --task summary",
    ),
)
@click.argument("source", metavar="IN.jsonl", type=_file)
@click.argument("answers", metavar="OUT.jsonl", type=_file)
@_answers("--model", "models", multiple=True, metavar="NAME",
          help="The model that teaches, as the answers name it; repeatable.  [the only one that answered]")  # fmt: skip
@_answers("--task", "tasks", multiple=True, metavar="NAME", help="Only lines of this class; repeatable.  [all]")
@_set("--to", "folder", required=True, metavar="DIR", type=click.Path(path_type=Path),
      help="New folder for TASK/train.jsonl, valid.jsonl and test.jsonl.")  # fmt: skip
@_set("--held-out", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True, metavar="SHARE",
      help="Not trained on: half is valid.jsonl, half test.jsonl.")  # fmt: skip
@json_option
def export_training(*, source: Path, answers: Path, folder: Path, as_json: bool, **wanted: Any) -> None:
    """Write the accepted answers as a training set for `mlx_lm.lora`."""
    export = TrainingExport(**wanted)
    with or_usage_error(lambda: InputFile(source)) as lines, or_usage_error(lambda: TrainingFolder(folder)) as made:
        try:
            or_usage_error(lambda: export.run(lines, answers, made))
        except InputChanged as error:
            raise StokerError(str(error)) from None
    counts: dict[str, dict[str, int]] = {
        task: {part: found[part] for part in PARTS} for task, found in sorted(export.written.items())
    }
    text = [f"{task}: {listed(found)}" for task, found in counts.items()]
    text += [f"left out: {listed(export.left_out)}"] if export.left_out else []
    show(as_json, {"folder": str(folder), "tasks": counts, "left_out": export.left_out}, "\n".join(text))
    for task, found in counts.items():
        if not as_json and (short := [f"{part}.jsonl" for part in PARTS if 0 < found[part] < _BATCH_EXAMPLES]):
            where = f"{task}: fewer than {_BATCH_EXAMPLES} in {' and '.join(short)}"
            click.echo(f"{where}: give mlx_lm.lora a smaller --batch-size", err=True)
