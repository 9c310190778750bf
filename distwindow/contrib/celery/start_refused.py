"""How a worker that cannot work ends: with one sentence, in its log and on its terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...core.errors import ConfigurationError
from .logger import logger


class StartRefused(ConfigurationError, SystemExit):
    """Ends the command `celery worker` with its sentence and the exit code 1.

    It is a `SystemExit`, so that Python shows the sentence without a traceback through Celery, and
    a `ConfigurationError` for an application that makes a worker itself.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = sentence


def ends_the_worker(create: Callable[..., None]) -> Callable[..., None]:
    """Make `create`, a boot step's, end the worker for a `ConfigurationError`, and log it."""

    @functools.wraps(create)
    def create_or_end(*args: Any) -> None:
        try:
            create(*args)
        except ConfigurationError as exc:
            sentence = f"the worker does not start: {exc}"
            logger.critical("%s", sentence)
            raise StartRefused(sentence) from exc

    return create_or_end
