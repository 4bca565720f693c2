"""Loggers of the device, whose lines have words of a coordinator in them."""

from __future__ import annotations

import logging

from federation.printable import MOST_LINE, printable, printable_lines


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose messages are one printable line each, whatever the handlers are."""
    found = logging.getLogger(name)
    found.addFilter(_render)
    return found


def _render(record: logging.LogRecord) -> bool:
    record.msg = printable(record.getMessage(), MOST_LINE)
    record.args = ()
    if record.exc_info:
        record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
    return True
