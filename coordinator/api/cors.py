"""Let pages of other origins call the API: those on a list, and none by default.

A page has to bring a token: cookies are never accepted from another origin. A browser that asks beforehand is answered
before anything is looked up; errors have the same headers, so that a page can read why it was refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

METHODS = ("GET", "PUT", "POST", "DELETE")
TAKEN = ("Authorization", "Content-Digest", "Content-Type", "Embrace-Report", "Range")  # that a page may send
TOLD = ("Content-Range", "Embrace-Lease", "Embrace-Unfit", "Embrace-Waiting", "ETag", "Retry-After")  # ... may read
REMEMBERED = 600  # seconds for which a browser need not ask again


def install(app: FastAPI, origins: Sequence[str]) -> None:
    """Answer pages of these origins."""
    if not origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=METHODS,
        allow_headers=TAKEN,
        expose_headers=TOLD,
        allow_credentials=False,
        max_age=REMEMBERED,
    )
