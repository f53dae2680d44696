"""`stoker batch export-training` as a user runs it: the folder it makes of a batch's two files, and what it refuses."""

import json
import tracemalloc
from pathlib import Path

import pytest
from tests.producer.batch.taught_lines import answered, asked, failed, user, write

from stoker.cli import main


@pytest.fixture
def export(capsys, monkeypatch, tmp_path):
    """Runs the command in the test's folder, without any server; returns the exit code, stdout and stderr."""
    monkeypatch.setenv("STOKER_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments, to="training"):
        with pytest.raises(SystemExit) as left:
            main(["batch", "export-training", "in.jsonl", "out.jsonl", "--to", to, *arguments])
        out, err = capsys.readouterr()
        return left.value.code, json.loads(out) if out.startswith("{") else out.strip(), err

    return run


def taught(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """By file: the last message asked, and the answer."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        rows = [json.loads(raw)["messages"] for raw in path.read_text("ascii").splitlines()]
        found[path.relative_to(folder).as_posix()] = [(row[-2]["content"], row[-1]["content"]) for row in rows]
    return found


def test_the_accepted_answers_are_written_by_class_and_each_prompt_once(export, tmp_path):
    prompts = ["a", "b", "c", "A ", "d", "e", "é"]
    write(tmp_path / "in.jsonl", [asked(n, text) for n, text in enumerate(prompts, 1)])
    ends = [
        answered(3, "3", task="sums"), answered(1, "1", task="sums"), answered(4, "4", task="sums"), failed(5),
        answered(2, "2", task="names"), answered(6, "6", task="names", finish_reason="length"),
        answered(7, "ü", task="names"),
    ]  # fmt: skip
    write(tmp_path / "out.jsonl", ends)
    code, found, _ = export("--held-out", "0", "--json")
    assert (code, found["folder"]) == (0, "training")
    assert taught(tmp_path / "training") == {
        "sums/train.jsonl": [("c", "3"), ("a", "1")], "names/train.jsonl": [("b", "2"), ("é", "ü")]
    }  # fmt: skip
    assert found["tasks"]["sums"] == {"train": 2, "valid": 0, "test": 0}
    assert found["left_out"] == {"with a prompt that came before": 1, "failed": 1, "cut off": 1}
    assert [path.name for path in tmp_path.glob(".training*")] == []


def test_a_prompt_is_in_the_same_part_in_every_nights_export(export, tmp_path):
    prompts = [f"Where is order {n}?" for n in range(200)]

    def parts_of(to, texts):
        write(tmp_path / "in.jsonl", [asked(n, text) for n, text in enumerate(texts, 1)])
        write(tmp_path / "out.jsonl", [answered(n) for n in range(1, len(texts) + 1)])
        assert export("--held-out", "0.4", to=to)[0] == 0
        return {part: {" ".join(prompt.lower().split()) for prompt, _ in rows}
                for part, rows in taught(tmp_path / to).items()}  # fmt: skip

    first = parts_of("first", prompts)
    again = parts_of("again", [f"{text.upper()}\n" for text in reversed(prompts)])
    assert first == again
    assert [f"short+latin/{part}.jsonl" for part in ("test", "train", "valid")] == list(first)


def test_the_answers_of_several_models_are_not_mixed_unasked(export, tmp_path):
    write(tmp_path / "in.jsonl", [asked(n, f"{n}") for n in range(1, 4)])
    write(tmp_path / "out.jsonl", [answered(1, "s", model="small"), *(answered(n, "l") for n in (2, 3))])
    code, _, err = export()
    assert code == 2
    assert "several models answered: 1 small, 2 large; choose the teacher with --model" in err
    assert not (tmp_path / "training").exists()
    assert export("--model", "large", "--held-out", "0")[0] == 0
    assert taught(tmp_path / "training") == {"short/train.jsonl": [("2", "l"), ("3", "l")]}
    code, _, err = export("--model", "larger", to="other")
    assert (code, "nothing to export: 1 by the model small, 2 by the model large" in err) == (2, True)
    assert export("--model", "large", "--model", "small", to="both")[0] == 0


def test_one_class_can_be_exported_alone_and_any_class_is_a_folder_in_the_folder(export, tmp_path):
    names = ["../../up", "/", "..", ".", "a/b"]
    write(tmp_path / "in.jsonl", [asked(n, f"{n}") for n in range(1, 6)])
    write(tmp_path / "out.jsonl", [answered(n, task=name) for n, name in enumerate(names, 1)])
    assert export("--held-out", "0")[0] == 0
    folders = [path.parent.name for path in (tmp_path / "training").glob("*/train.jsonl")]
    assert sorted(folders) == ["%2E", "%2E.", "%2E.+..+up", "+", "a+b"]
    assert export("--task", "a/b", "--held-out", "0", to="one")[0] == 0
    assert list(taught(tmp_path / "one").values()) == [[("5", "Yes.")]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "one", "out.jsonl", "training"]


def test_a_folder_that_holds_anything_is_left_as_it_is(export, tmp_path):
    write(tmp_path / "in.jsonl", [asked(1, "1")])
    write(tmp_path / "out.jsonl", [answered(1)])
    (tmp_path / "training").mkdir()
    assert export()[0] == 0
    before = taught(tmp_path / "training")
    code, _, err = export()
    assert (code, "training exists already" in err) == (2, True)
    assert taught(tmp_path / "training") == before
    code, _, err = export(to="no/such")
    assert (code, "there is no folder no" in err) == (2, True)


def test_files_that_do_not_belong_together_are_refused(export, tmp_path):
    write(tmp_path / "in.jsonl", [asked(1, "1"), {**asked(2, "2"), "custom_id": "other"}])
    for wrong in (answered(2), answered(3), {"no": "answer"}):
        write(tmp_path / "out.jsonl", [answered(1), wrong])
        code, _, err = export()
        assert (code, "line 2 of out.jsonl is no" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_the_answers_of_a_batch_that_is_still_running_are_exported(export, tmp_path):
    write(tmp_path / "in.jsonl", [asked(1, "1"), asked(2, "2")])
    write(tmp_path / "out.jsonl", [answered(1)])
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write(json.dumps(answered(2))[:-20])
    assert export("--held-out", "0")[0] == 0
    assert taught(tmp_path / "training") == {"short/train.jsonl": [("1", "Yes.")]}


def test_the_command_tells_what_was_left_out_and_that_a_part_is_too_short_for_the_trainer(export, tmp_path):
    write(tmp_path / "in.jsonl", [asked(n, f"{n}") for n in range(1, 5)])
    write(tmp_path / "out.jsonl", [*(answered(n) for n in range(1, 4)), failed(4)])
    code, out, err = export("--held-out", "0")
    assert (code, out) == (0, "short: 3 train, 0 valid, 0 test\nleft out: 1 failed")
    assert "fewer than 4 in train.jsonl: give" in err


def test_an_export_holds_neither_file_in_memory(export, tmp_path):
    n_lines, text = 500, "word " * 4000
    write(tmp_path / "in.jsonl", [asked(n, user(f"{n} {text}")) for n in range(1, n_lines + 1)])
    write(tmp_path / "out.jsonl", [answered(n, text) for n in range(1, n_lines + 1)])
    tracemalloc.start()
    try:
        assert export()[0] == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (tmp_path / "in.jsonl").stat().st_size / 2
