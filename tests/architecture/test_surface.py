"""The public surface is as it was agreed: a change of it shows in the diff of `surface.txt`.

To agree to a change, run `python -m tests.architecture.test_surface`, which writes that file.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distwindow

SNAPSHOT = Path(__file__).with_name("surface.txt")


def surface() -> Iterator[str]:
    """One line for each name, and one for each member of a class."""
    for name in sorted(distwindow.__all__):
        thing = getattr(distwindow, name)
        if not inspect.isclass(thing):
            yield f"{name}: {type(thing).__name__}"
            continue
        bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
        yield f"class {name}({bases})"
        yield from (f"    {line}" for line in sorted(members(thing)))


def members(thing: type) -> Iterator[str]:
    """What the class itself offers, and what it has from bases that are not public."""
    if issubclass(thing, enum.Enum):
        yield from (f"{name} = {value.value}" for name, value in thing.__members__.items())
        return
    if "__init__" in vars(thing) or dataclasses.is_dataclass(thing):
        yield f"__init__{signature(thing.__init__)}"
    bases = reversed(thing.__mro__)
    annotations = {n: a for base in bases for n, a in inspect.get_annotations(base).items()}
    for name in fields(thing):
        annotation = annotations[name]
        yield f"{name}: {getattr(annotation, '__forward_arg__', annotation)}"
    own = {name: value for base in reversed(private(thing)) for name, value in vars(base).items()}
    for name, value in own.items():
        if name.startswith("_") or name in fields(thing):
            continue
        if isinstance(value, property):
            yield f"{name}: property{signature(value.fget)}"
        elif isinstance(value, (staticmethod, classmethod)):
            yield f"{type(value).__name__} {name}{signature(value.__func__)}"
        elif inspect.isfunction(value):
            word = "async def" if inspect.iscoroutinefunction(value) else "def"
            yield f"{word} {name}{signature(value)}"
        elif not inspect.isdatadescriptor(value):
            yield f"{name} = {value!r}"


def private(thing: type) -> list[type]:
    """The class, and its bases of this package that users do not see."""
    ours = (base for base in thing.__mro__ if base.__module__.startswith("distwindow"))
    return [base for base in ours if base is thing or base.__name__ not in distwindow.__all__]


def fields(thing: type) -> tuple[str, ...]:
    """The fields of a dataclass or a named tuple, in its own order."""
    if dataclasses.is_dataclass(thing):
        return tuple(field.name for field in dataclasses.fields(thing))
    return getattr(thing, "_fields", ())


def signature(function: Any) -> str:
    """As it is written; of a default that is an object, its type."""
    text = str(inspect.signature(function))
    text = re.sub(r"((?:: |-> ))'([^']*)'", r"\1\2", text)
    return re.sub(r"<(?:class ')?([\w.]+)(?: object at 0x[0-9a-f]+|')>", r"\1", text)


def test_the_surface_is_as_agreed() -> None:
    agreed = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    assert list(surface()) == agreed, "see above for how to agree to a change"


def test_everything_named_is_there_and_nothing_is_named_twice() -> None:
    assert len(distwindow.__all__) == len(set(distwindow.__all__))
    assert list(distwindow.__all__) == sorted(distwindow.__all__)
    assert all(hasattr(distwindow, name) for name in distwindow.__all__)


def test_what_the_contract_names_is_public() -> None:
    contract = """
        Limiter AsyncLimiter Limit Decision Stats Key RateLimitExceeded DistwindowError
        ConfigurationError StoreError StoreTimeout StoreUnavailable
        LeapArray BucketLeapArray OccupiableLeapArray RollingWindow SlidingWindowMetric
    """
    assert set(contract.split()) <= set(distwindow.__all__)


def test_the_tree_of_errors() -> None:
    d = distwindow
    assert issubclass(d.ConfigurationError, (d.DistwindowError, ValueError))
    assert issubclass(d.ConfigurationError, ValueError)
    assert issubclass(d.RateLimitExceeded, d.DistwindowError)
    for refusal in (
        d.RateLimitExceeded,
        d.ConcurrencyExceeded,
        d.BreakerOpen,
        d.AuthorityDenied,
        d.SystemOverloaded,
    ):
        assert issubclass(refusal, d.Blocked)
    assert issubclass(d.Blocked, d.DistwindowError)
    assert issubclass(d.StoreError, d.DistwindowError)
    assert issubclass(d.StoreTimeout, d.StoreError)
    assert issubclass(d.StoreUnavailable, d.StoreError)
    assert not issubclass(d.RateLimitExceeded, d.StoreError)


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in surface()), encoding="utf-8")
