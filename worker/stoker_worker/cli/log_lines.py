"""The form of the log: lines of text, or a JSON object on each. Set up on the main thread; any thread writes."""

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from stoker_shared.text import printable
from stoker_worker.events import FIELDS

if TYPE_CHECKING:
    from stoker_worker.settings import WorkerSettings

CHATTY = ("rq", "stoker_worker.rq", "httpx", "transformers")


def configure_logging(settings: "WorkerSettings") -> None:
    handler = logging.StreamHandler(sys.stderr)
    is_json = settings.log_format == "json"
    handler.setFormatter(
        _JsonLine() if is_json else _TextLine("%(asctime)s %(levelname).1s %(threadName)-10s %(message)s")
    )
    level = logging.DEBUG if settings.verbose else logging.WARNING if settings.quiet else logging.INFO
    logging.basicConfig(level=level, handlers=[handler])
    if not settings.verbose:
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)


class _TextLine(logging.Formatter):
    """Keeps a message on one line, whatever names are in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return printable(super().formatException(ei), lines=True)


class _JsonLine(logging.Formatter):
    """Fields: ``time`` (UTC), ``level``, ``thread``, ``message``, those of a job's event, ``traceback`` of an error."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "thread": record.threadName,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
