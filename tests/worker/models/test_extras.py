"""Adapters, chat templates and trusted code on tiny models: mlx-lm's own answers are the measure."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.worker.models.tiny_gguf import HEAD_DIM, HIDDEN, KV_HEADS, metadata, random_weights, write_gguf

from stoker_shared.errors import ModelNotLoadable
from stoker_shared.message import Message
from stoker_worker.models.extras import ModelExtras
from stoker_worker.models.gguf import import_gguf
from stoker_worker.models.loading import load_model
from stoker_worker.ports import LoadedModel

pytestmark = pytest.mark.mlx

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random model with a tokenizer and a chat template, in float32."""
    ours, _ = random_weights(tied=True)
    template = {"tokenizer__chat_template": "{{ messages[0].content }}"}
    import_gguf(write_gguf(tmp_path / "tiny.gguf", metadata(**template), ours), tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def quantised(folder: Path) -> Path:
    from mlx_lm import convert

    convert(str(folder), str(folder.parent / "packed"), quantize=True, q_group_size=32, q_bits=4)
    return folder.parent / "packed"


def write_adapter(folder: Path, *, kind: str = "lora", seed: int = 0, beside: dict[str, Any] | None = None) -> Path:
    """An adapter as mlx-lm's trainer writes it, with random weights large enough to change every answer."""
    import mlx.core as mx

    mx.random.seed(seed)
    weights = dict(beside or {})
    outputs = {"q_proj": HIDDEN, "v_proj": KV_HEADS * HEAD_DIM}
    for name, size in outputs.items():
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_a"] = mx.random.normal((HIDDEN, 2))
            weights[f"{prefix}.lora_b"] = mx.random.normal((2, size))
            if kind == "dora":
                weights[f"{prefix}.m"] = mx.random.uniform(0.5, 2.0, (size,))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.5, "keys": [f"self_attn.{name}" for name in outputs]}
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def greedy(model: Any) -> list[int]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(IDS), model, max_tokens=24)
    return [int(token) for token, _ in steps]


def loaded(folder: Path, dtype: Any = "native", **extras: Any) -> tuple[Any, LoadedModel]:
    return load_model(str(folder), dtype, extras=ModelExtras(**extras))


def refusal(folder: Path, **extras: Any) -> str:
    with pytest.raises(ModelNotLoadable) as refused:
        loaded(folder, **extras)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("base", ["folder", "quantised"])
def test_an_adapter_answers_as_in_mlx_lm(request: pytest.FixtureRequest, tmp_path: Path, kind: str, base: str) -> None:
    from mlx_lm import load

    folder = request.getfixturevalue(base)
    adapter = write_adapter(tmp_path / "sql", kind=kind)
    reference: Any = load(str(folder), adapter_path=str(adapter))[0]

    model, description = loaded(folder, adapter=adapter)

    assert greedy(model) == greedy(reference) != greedy(loaded(folder)[0])
    assert greedy(loaded(folder, "float32", adapter=adapter)[0]) == greedy(reference)
    assert description.name == f"{folder.name}+sql"


def test_caches_of_another_adapter_are_another_models(folder: Path, tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / f"{seed}", seed=seed) for seed in (1, 2)]
    again = write_adapter(tmp_path / "elsewhere", seed=1)
    louder = write_adapter(tmp_path / "louder", seed=1)
    config = louder / "adapter_config.json"
    config.write_text(config.read_text().replace('"scale": 1.0', '"scale": 2.0'))

    bare, *others = (loaded(folder, adapter=x)[1] for x in (None, *adapters, louder))

    assert len({x.fingerprint for x in (bare, *others)}) == 4
    assert len({x.tokenizer_fingerprint for x in (bare, *others)}) == 1
    assert loaded(folder, adapter=again)[1].fingerprint == others[0].fingerprint


def test_an_adapter_that_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    import mlx.core as mx

    assert "it has no adapter_config.json" in refusal(folder, adapter=tmp_path / "nowhere")
    foreign = write_adapter(
        tmp_path / "foreign", beside={"model.layers.7.self_attn.q_proj.lora_a": mx.zeros((HIDDEN, 2))}
    )
    assert "does not fit this model" in refusal(folder, adapter=foreign)
    peft = write_adapter(tmp_path / "peft")
    (peft / "adapters.safetensors").rename(peft / "adapter_model.safetensors")
    assert "it has no adapters.safetensors" in refusal(folder, adapter=peft)


def test_a_template_from_a_file_replaces_the_models_own_and_its_identity(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    (folder / "chat_template.jinja").write_text("a file of the model's own")
    config = folder / "tokenizer_config.json"  # mlx-lm has Python code for this type of template
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template_type": "deepseek_v32"}))
    own = loaded(folder)[1]

    mine = loaded(folder, chat_template=file)[1]

    hello = [Message(role="user", content="hello")]
    rendered = mine.tokenizer.fork().render(hello, add_generation_prompt=True, tools=None, template_kwargs=None)
    assert rendered == "[user] hello"
    assert mine.tokenizer_fingerprint != own.tokenizer_fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"\xff\xfe", "cannot read"), (b"{% if %}", "does not compile: line 1")],
)
def test_a_template_that_cannot_be_used_is_refused_at_start(
    folder: Path, tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    told = refusal(folder, chat_template=file)
    assert said in told
    assert "mine.jinja" in told


def test_a_template_that_refuses_some_conversations_is_served(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "strict.jinja"
    file.write_text("{{ raise_exception('system first') }}")
    loaded(folder, chat_template=file)


def ran(folder: Path) -> str:
    """Code that leaves a trace in the folder."""
    return f"import pathlib; pathlib.Path({str(folder / 'ran')!r}).touch()"


def test_code_in_the_models_folder_runs_only_with_trust_and_is_part_of_its_identity(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "mine.py"}))
    code = folder / "mine.py"
    code.write_text(f"{ran(folder)}\nfrom mlx_lm.models.llama import Model, ModelArgs")

    assert "'mine.py' in its folder: give --trust-remote-code" in refusal(folder)
    assert not (folder / "ran").exists()

    before = loaded(folder, trust_remote_code=True)[1]
    assert (folder / "ran").exists()
    code.write_text(code.read_text() + "\n# changed")
    assert loaded(folder, trust_remote_code=True)[1].fingerprint != before.fingerprint


def test_a_tokenizer_with_code_of_its_own_is_refused_with_the_options_name(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "MineTokenizer", "auto_map": {"AutoTokenizer": ["mine.MineTokenizer", None]}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    (folder / "mine.py").write_text(ran(folder))
    assert "--trust-remote-code" in refusal(folder)
    assert not (folder / "ran").exists()
