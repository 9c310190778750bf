"""Integrations: each module needs the library that it is named after, and nothing imports them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str, module: str | None = None) -> Iterator[None]:
    """Around the imports of a library: say with which extra it is installed, if it is missing.
    `module` is the name of the integration, where that is not the extra's.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        module = module or extra.replace("-", "_")
        raise ModuleNotFoundError(
            f"distwindow.contrib.{module} needs {exc.name}, which is not installed: "
            f"pip install 'distwindow[{extra}]'",
            name=exc.name,
        ) from None
