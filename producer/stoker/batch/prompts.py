"""Rows of a text file with one prompt on each line. Implements `Rows`."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from stoker.api.chat import CHAT_URL
from stoker.batch.input_file import BLANK, BadLine, fingerprint_of
from stoker.batch.json_lines import JsonLines

MAX_TOKENS: Final = 1024
"""For prompts without another limit. Greedy decoding of a small model may never end by itself."""

PLACE: Final = "{}"
"""The place of the prompt in a template."""


@dataclass(frozen=True)
class Prompts:
    """How to ask prompts.

    Attributes:
        template: the message for a prompt that is a text; `PLACE` in it becomes the prompt.
        model: ``None`` for the loaded one.
    """

    template: str = PLACE
    temperature: float = 0.0
    model: str | None = None

    def line(self, custom_id: str | None, prompt: object) -> bytes:
        """The line of a batch that asks this prompt, a text or the messages of a conversation. Raises `TypeError`,
        `ValueError`: it is neither, or cannot be JSON."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": self.template.replace(PLACE, prompt)}]
        elif not isinstance(prompt, list):
            raise ValueError("neither a text nor a list of messages")
        body = {"model": self.model, "messages": prompt, "temperature": self.temperature}
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body}).encode()


class PromptLines:
    """A line's number is its `custom_id`. The lines need not be JSON."""

    def __init__(self, lines: JsonLines, prompts: Prompts) -> None:
        self._lines = lines
        self._prompts = prompts

    @property
    def digest(self) -> str:
        return fingerprint_of(self._lines.digest, asdict(self._prompts))

    def close(self) -> None:
        self._lines.close()

    def read_through(self) -> Iterator[str | None]:
        for number, custom_id in enumerate(self._lines.read_through(), start=1):
            yield BLANK if custom_id == BLANK else str(number)

    def row(self, number: int) -> bytes:
        try:
            raw = self._lines.row(number)
        except BadLine as error:
            error.custom_id = str(number)
            raise
        try:
            prompt = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise BadLine(number, str(number), "invalid_value", "not UTF-8 text") from None
        return self._prompts.line(str(number), prompt.rstrip("\r\n"))
