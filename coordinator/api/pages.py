"""Serve the pages of browser/, as `make web` built them into coordinator/web.

The names of the files are listed once: no request chooses a path. Files that are large come compressed only, since no
browser that can train asks for less. The policy lets a page load nothing from elsewhere and talk to this origin alone;
the isolation is what threads of WebAssembly need.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse

FOLDER = Path(__file__).resolve().parents[1] / "web"
NOT_BUILT = "The page is not part of this installation: run `make web` in a clone (needs Node), or install a wheel.\n"
AUTHORITY_PATH = "/authority.crt"
COMPRESSED = ".gz"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'wasm-unsafe-eval'",
        "worker-src 'self'",
        "connect-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), screen-wake-lock=(self), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FOR_EVER = "public, max-age=31536000, immutable"  # the name of an asset has a hash of what is in it


def is_built(folder: Path = FOLDER) -> bool:
    """Whether this installation has the pages."""
    return (folder / "join.html").is_file()


def install(app: FastAPI, folder: Path = FOLDER) -> None:
    """Add the pages to an application."""
    found = (path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path for path in found}
    router = APIRouter(include_in_schema=False)

    def page(name: str, request: Request) -> Response:
        if name not in files:
            return PlainTextResponse(NOT_BUILT, 503, HEADERS)
        return _file(files[name], request, "no-cache")

    @router.get("/")
    def dashboard(request: Request) -> Response:
        return page("index.html", request)

    @router.get("/join")
    def join(request: Request) -> Response:
        return page("join.html", request)

    @router.get("/web/{name:path}")
    def asset(name: str, request: Request) -> Response:
        path = files.get(name) or files.get(name + COMPRESSED)
        if path is None or not name.startswith("assets/"):
            return PlainTextResponse("There is no such file.\n", 404, HEADERS)
        return _file(path, request, _FOR_EVER)

    app.include_router(router)


def offer_authority(app: FastAPI, file: Path) -> None:
    """Let phones fetch the certificate of the coordinator's own authority, under the name that they know to install."""

    @app.get(AUTHORITY_PATH, include_in_schema=False)
    def authority() -> Response:
        return Response(file.read_bytes(), media_type="application/x-x509-ca-cert", headers=HEADERS)


def _file(path: Path, request: Request, caching: str) -> Response:
    headers = {**HEADERS, "Cache-Control": caching}
    name = path.name
    if name.endswith(COMPRESSED):
        name = name.removesuffix(COMPRESSED)
        headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return PlainTextResponse("This file comes compressed; expected Accept-Encoding: gzip.\n", 406, HEADERS)
    media_type = MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream")
    return FileResponse(path, media_type=media_type, headers=headers)
