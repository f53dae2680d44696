"""The endpoints by their paths. Pure."""

from collections.abc import Mapping
from typing import Final

from stoker.api.chat import CHAT, TEXT
from stoker.api.endpoint import Endpoint
from stoker.api.messages import MESSAGES, TOKEN_COUNT
from stoker.api.responses import RESPONSES
from stoker.api.tokenize import DETOKENIZE, TOKENIZE

ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    endpoint.url: endpoint for endpoint in (CHAT, TEXT, RESPONSES, MESSAGES, TOKEN_COUNT, TOKENIZE, DETOKENIZE)
}

BATCH_URLS: Final = (CHAT.url, TEXT.url, RESPONSES.url)
"""The URLs that a batch's lines may have."""
