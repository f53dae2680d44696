"""How much of a tool conversation comes from the cache, by template; docs/tool-calls.md has these numbers."""

from pathlib import Path

import pytest
from tests.worker.models.tool_templates import FAMILIES, Conversation

pytestmark = pytest.mark.mlx

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tool-calls.md"
WAYS = (("append", True), ("full", True), ("full", False))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_documented_part_of_a_conversation_is_cached(name: str) -> None:
    cells = []
    for context, keeps_thinking in WAYS:
        conversation = Conversation(FAMILIES[name], context, keeps_thinking).run()
        cells += [f"{cached} of {len(prompt.ids)}" for prompt, cached in conversation.prompts[1:]]
        assert all(prompt.rendered_anew is None for prompt, _ in conversation.prompts) or context == "append"
    assert f"| {name} | {' | '.join(cells)} |" in PAGE.read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_append_renders_what_full_renders_and_keeps_the_models_own_tokens(name: str) -> None:
    appended = Conversation(FAMILIES[name], "append").run()
    sent = Conversation(FAMILIES[name], "full").run()
    for (ours, cached), (theirs, cached_of_theirs) in zip(appended.prompts, sent.prompts, strict=True):
        if ours.rendered_anew:
            assert ours.ids == theirs.ids
        assert len(ours.ids) - cached <= len(theirs.ids) - cached_of_theirs
        assert theirs.messages is not None
        assert ours.messages is not None
        assert len(ours.messages) == len(theirs.messages)
