"""The YAML files that come along with KAMUI, and how a path finds them.

In an installed wheel they lie in `kamui/configs`; in an editable install they are the repository's own.
"""

from __future__ import annotations

from pathlib import Path, PurePath

from kamui.errors import ConfigError, did_you_mean

_PACKAGE = Path(__file__).parent


def folder() -> Path:
    """Return the folder of the configs that come along."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "configs"


def names() -> list[str]:
    """Return the configs that come along as one writes them, such as `configs/small.yaml`."""
    root = folder()
    return sorted(f"configs/{file.relative_to(root).as_posix()}" for file in root.rglob("*.yaml"))


def find(path: str | Path) -> Path:
    """Return `path` if it exists, else the config of that name that comes along.

    Raises:
        ConfigError: There is neither; the message lists what comes along.
    """
    if Path(path).exists():
        return Path(path)
    known = names()
    wanted = PurePath(path).as_posix()
    if wanted in known:
        return folder() / PurePath(wanted).relative_to("configs")
    raise ConfigError(f"no file {str(path)!r}{did_you_mean(wanted, known)} (these come along: {', '.join(known)})")
