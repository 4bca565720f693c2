"""The link with which a browser joins, and the same as a QR code for a phone's camera."""

from __future__ import annotations

import io


def join_link(url: str, token: str) -> str:
    """Make the link; the token is its fragment, which browsers do not send."""
    return f"{url}/join#{token}"


def describe_link(url: str, token: str) -> str:
    """Describe it in one line."""
    from coordinator.api.pages import is_built

    unless = "" if is_built() else " (once the page is built: make web)"
    return f"a browser joins with{unless}: {join_link(url, token)}"


def qr_code(text: str) -> str:
    """Draw a QR code for a terminal; empty if the package for it is not installed."""
    try:
        import segno
    except ModuleNotFoundError:
        return ""
    drawn = io.StringIO()
    segno.make(text, error="l", micro=False).terminal(drawn, border=2, compact=True)
    return drawn.getvalue()
