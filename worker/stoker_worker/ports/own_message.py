"""A message that the model made, with the text as it was generated. No I/O.

Templates get the parts of an answer: its content, its thinking, its calls. The token ids in the agent's transcript have
the text itself, whose white space and notation a template may write otherwise. Producers cannot send this text.
"""

from typing import Any

from stoker_shared.message import Message


class OwnMessage(Message):
    """An answer with thinking or calls. Equal to a producer's copy of it (see `continues`).

    Attributes:
        generated: the answer's text.
        opened: the end of the prompt, from the marker on with which the template opened the thinking; else empty.
    """

    generated: str
    opened: str = ""

    def as_template_input(self) -> dict[str, Any]:
        """Its parts; never the generated text."""
        return self.model_dump(exclude_none=True, mode="json", exclude={"generated", "opened"})

    def as_generated(self) -> Message:
        """The message with the whole text as its content."""
        return Message(role=self.role, content=self.opened + self.generated)


StoredMessage = Message | OwnMessage
"""A message of a transcript."""


def is_stored_alike(left: Message, right: Message) -> bool:
    """Whether a store writes the same for both: an answer's generated text belongs to it."""
    texts, others = ((m.generated, m.opened) if isinstance(m, OwnMessage) else None for m in (left, right))
    return texts == others and left.is_exactly(right)


def continues(sent: Message, stored: Message) -> bool:
    """Whether `sent` is the message `stored`, as a producer sends it back: without the thinking, or as the raw text."""
    if sent.is_exactly(stored):
        return True
    if not isinstance(stored, OwnMessage):
        return False
    without = stored.model_copy(update={"reasoning_content": sent.reasoning_content})
    in_raw_form = sent.content in (stored.generated, stored.opened + stored.generated) and not sent.tool_calls
    return sent.role == stored.role and (in_raw_form or sent.is_exactly(without))
