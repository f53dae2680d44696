"""Makes a training set of a batch's input file and output file: chooses the answers, drops repeated prompts, splits.

Reads both files line by line. Of an example, only 8 bytes of its prompt's digest stay in memory. No Redis.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stoker.batch.answers import is_success
from stoker.batch.input_file import InputFile
from stoker.batch.lines import BadLine
from stoker.batch.naming import line_of_answer
from stoker.batch.training_example import NoExample, Part, TrainingExample, example_of
from stoker.batch.training_folder import TrainingFolder
from stoker.openai.rule import BodyOptions

_ANY_MODEL: Final = BodyOptions(any_model=True)


@dataclass
class TrainingExport:
    """
    Attributes:
        models: the models whose answers are wanted; if it is empty, those of the only model that answered.
        tasks: the classes that are wanted; if it is empty, all.
        held_out: the share that is not trained on, from 0 to 1.
        written: examples by class and part.
        left_out: answers that were not exported, by reason.
        accepted: accepted answers by model.
    """

    models: Collection[str] = ()
    tasks: Collection[str] = ()
    held_out: float = 0.1
    written: dict[str, Counter[Part]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    _prompts: set[int] = field(default_factory=set)

    def run(self, lines: InputFile, answers: Path, folder: TrainingFolder) -> None:
        """Write the examples to `folder`, and publish it.

        Raises:
            ValueError: the files do not belong together, several models answered and none was chosen, or there is
                nothing to export; nothing is published.
            InputChanged: the input file was changed.
            OSError: a file cannot be read or written.
        """
        for at, number, answer in answers_in(answers):
            try:
                example = _example(lines, number, answer)
                self._require_wanted(example)
            except NoExample as reason:
                self.left_out[str(reason)] += 1
            except (BadLine, LookupError, TypeError, ValueError):
                raise ValueError(f"line {at} of {answers} is no answer to line {number} of the input file") from None
            else:
                part = example.part(self.held_out)
                folder.add(example.task, part, example.row)
                self.written.setdefault(example.task, Counter())[part] += 1
        if not self.models and len(self.accepted) > 1:
            raise ValueError(f"several models answered: {listed(self.accepted)}; choose the teacher with --model")
        if not self.written:
            raise ValueError(f"there is nothing to export: {listed(self.left_out) or 'no answers'}")
        folder.publish()

    def _require_wanted(self, example: TrainingExample) -> None:
        self.accepted[example.model] += 1
        if self.models and example.model not in self.models:
            raise NoExample(f"by the model {example.model}")
        if self.tasks and example.task not in self.tasks:
            raise NoExample(f"of the task {example.task}")
        if example.prompt_key in self._prompts:
            raise NoExample("with a prompt that came before")
        self._prompts.add(example.prompt_key)


def answers_in(path: Path) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """The answers in an output file: the number of each line there, the number of the line that it answers, and the
    answer. Half a last line is left out, because the batch may still be running.

    Raises:
        ValueError: a line is not an answer of a batch.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for at, raw in enumerate(file, start=1):
            try:
                answer = json.loads(raw)
                found = line_of_answer(answer["id"])
            except (ValueError, TypeError, KeyError, RecursionError):
                if not raw.endswith(b"\n"):
                    return
                found = None
            if found is None:
                raise ValueError(f"line {at} of {path} is no answer of a batch")
            yield at, found[1], answer


def listed(counts: Mapping[str, int]) -> str:
    """For example ``1,200 failed, 40 cut off``."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _example(lines: InputFile, number: int, answer: Mapping[str, Any]) -> TrainingExample:
    """
    Raises:
        NoExample: the answer teaches nothing.
        BadLine, LookupError, TypeError, ValueError: it is no answer to this line.
    """
    if not is_success(answer):
        raise NoExample("failed")
    line = lines.line(number, _ANY_MODEL)
    if line.custom_id != answer["custom_id"]:
        raise ValueError(number)
    return example_of(line, answer["response"]["body"])
