"""Which build this process runs: the installed distribution's version, told to peers in Hello and to logs."""

from importlib.metadata import PackageNotFoundError, version


def build_id() -> str:
    """`0.1.0`, or `source` in a checkout that is not installed."""
    try:
        return version("v4mesh")
    except PackageNotFoundError:
        return "source"
