"""The static files of the pages: styles, scripts, htmx, and plotly.js from its installed package.

Their address has a version that changes with their content, so that browsers may keep them for
ever. Nothing is loaded from another host.
"""

import functools
import gzip
import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import FileResponse

from autotune.reporting.rendering import FIGURES_SCRIPT, SHARED_STYLE

_FOLDER = Path(__file__).parent / "static"
_MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
PLOTLY = "plotly.min.js"
_CACHED = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}

router = APIRouter(include_in_schema=False)


def _plotly_file() -> Path:
    """Returns the file of plotly.js. The package itself is not imported, which would take 0.2 s."""
    found = importlib.util.find_spec("plotly")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "package_data" / PLOTLY


def _files() -> dict[str, Path]:
    """Returns the files that are served, by name; no other can be asked for."""
    own = {file.name: file for file in sorted(_FOLDER.iterdir()) if file.suffix in _MEDIA_TYPES}
    return {
        **own,
        SHARED_STYLE.name: SHARED_STYLE,
        FIGURES_SCRIPT.name: FIGURES_SCRIPT,
        PLOTLY: _plotly_file(),
    }


def _version() -> str:
    digest = hashlib.sha256()
    for name, file in FILES.items():
        # plotly.js has 5 MB; its size changes with its version.
        content = str(file.stat().st_size).encode() if name == PLOTLY else file.read_bytes()
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:12]


FILES: Mapping[str, Path] = _files()
VERSION = _version()


def address(name: str) -> str:
    """Returns the path of a static file, such as /static/1f2e3d4c5b6a/page.css."""
    return f"/static/{VERSION}/{name}"


@router.get("/static/{version}/{name}")
def static_file(request: Request, version: str, name: str) -> Response:
    """Returns a file. One of an older version is not there: its page has to be loaded again."""
    if name not in FILES or version != VERSION:
        raise HTTPException(404)
    media_type = _MEDIA_TYPES[FILES[name].suffix]
    if name == PLOTLY and "gzip" in request.headers.get("accept-encoding", ""):
        headers = {**_CACHED, "Content-Encoding": "gzip"}
        return Response(_compressed_plotly(), media_type=media_type, headers=headers)
    return FileResponse(FILES[name], media_type=media_type, headers=_CACHED)


@functools.cache
def _compressed_plotly() -> bytes:
    """Returns plotly.js in 1.4 MB instead of 5, for a team whose server is not next to them."""
    return gzip.compress(FILES[PLOTLY].read_bytes(), compresslevel=6)
