"""What the demo shows: who was told what, now and in total, and how full the windows were."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich.text import Text

from distwindow import Limit

from ..render import bar
from ..table import Cell, Column, Table
from .verify import Book
from .workers import Report

_BAR = 16


def interval(limit: Limit) -> str:
    """`1 second`, `5 minutes`: the interval as its limit says it."""
    _, _, said = str(Limit(1, limit.per)).partition("/")
    return said if said[0].isdigit() else f"1 {said}"


class Scene:
    """Who was told what."""

    def __init__(self, limits: Sequence[Limit], pids: Sequence[int]) -> None:
        self.books = [Book(limit) for limit in limits]
        self.failed, self.trouble = 0, ""
        self._limit = limits[0]
        self._pids = pids
        self._admitted = [0] * len(pids)
        self._refused = [0] * len(pids)
        self._own = [Book(limits[0]) for _ in pids]
        self._recent: deque[tuple[float, int]] = deque()

    def learn(self, number: int, report: Report) -> None:
        """Take in what the worker of this number reports."""
        admitted = len(report.admitted_ms)
        self._admitted[number] += admitted
        self._refused[number] += report.refused
        self.failed += report.failed
        self.trouble = report.trouble or self.trouble
        for book in [*self.books, self._own[number]]:
            book.add(report.admitted_ms)
        self._recent.append((time.monotonic(), report.refused))

    def picture(self, width: int) -> list[Text]:
        """The latest window, worker by worker, and the totals: for a terminal."""
        now = self._window()
        rows = [self._row(number, count, sum(now)) for number, count in enumerate(now)]
        rows.append(self._sum(sum(now)))
        columns = [Column("WORKER"), Column("LAST WINDOW", right=True), Column("", drop=1)]
        columns += [Column("ADMITTED", right=True, drop=2), Column("REFUSED", right=True, drop=3)]
        return [*Table(columns, rows, width).texts(), Text(), *self._windows()]

    def totals(self, width: int) -> list[Text]:
        """The whole time, worker by worker: for the end."""
        total = sum(self._admitted)
        rows = []
        for number, count in enumerate(self._admitted):
            worker, _, _, admitted, refused = self._row(number, count, total)
            rows.append([worker, admitted, (bar(count / max(1, total), _BAR), "green"), refused])
        worker, _, _, admitted, refused = self._sum(total)
        rows.append([worker, admitted, ("", ""), refused])
        columns = [Column("WORKER"), Column("ADMITTED", right=True), Column("", drop=2)]
        return list(Table([*columns, Column("REFUSED", right=True, drop=1)], rows, width).texts())

    def line(self) -> str:
        """The latest window in one line: for a log."""
        now = self._window()
        return (
            f"{' + '.join(f'{count:,}' for count in now)} = {sum(now):,} of "
            f"{self._limit.amount:,} in the last window, {self._refusals():,} refused/s"
        )

    def _window(self) -> list[int]:
        """Admissions in the latest whole window of the first limit, by worker."""
        latest = self.books[0].latest()
        return [own.in_interval(latest) for own in self._own]

    def _refusals(self) -> int:
        while self._recent and self._recent[0][0] < time.monotonic() - 1:
            self._recent.popleft()
        return sum(refused for _, refused in self._recent)

    def _row(self, number: int, count: int, total: int) -> list[Cell]:
        return [
            (f"{number + 1}  (pid {self._pids[number]})", ""),
            (f"{count:,}", "green"),
            (bar(count / max(1, total), _BAR), "green"),
            (f"{self._admitted[number]:,}", ""),
            (f"{self._refused[number]:,}", "dim"),
        ]

    def _sum(self, count: int) -> list[Cell]:
        share = count / self._limit.amount
        return [
            ("together", "bold"),
            (f"{count:,}", "bold red" if share > 1 else "bold green"),
            (f"of {self._limit.amount:,}", "bold"),
            (f"{sum(self._admitted):,}", "bold"),
            (f"{sum(self._refused):,}", "dim"),
        ]

    def _windows(self) -> list[Text]:
        lines = []
        for book in self.books:
            fullest, most = book.fullest_aligned().amount, book.limit.amount
            line = Text(f"fullest window of {interval(book.limit)} so far: ")
            line.append(f"{fullest:,} of {most:,}  ", style="bold")
            style = "bold red" if fullest > most else "green"
            lines.append(line.append(bar(fullest / most, _BAR), style=style))
        return lines
