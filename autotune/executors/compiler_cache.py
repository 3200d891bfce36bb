"""Where what a trial compiles is kept: with its study."""

import hashlib
from pathlib import Path
from tempfile import gettempdir


def compiler_cache(folder: Path) -> dict[str, str]:
    """inductor's and Triton's disk caches, so that compilation times never come from another study's cache."""
    cache = (folder / "inductor").absolute()
    if any(character.isspace() for character in str(cache)):
        # inductor hands the path to the C++ compiler unquoted.
        cache = Path(gettempdir()) / f"autotune-inductor-{hashlib.sha256(str(cache).encode()).hexdigest()[:16]}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
