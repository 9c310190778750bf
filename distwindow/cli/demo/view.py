"""What the demo shows: admissions and refusals by worker, and how full the windows were."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from rich.text import Text

from distwindow import Limit

from ..render import bar
from ..table import Cell, Column, Table
from .verify import AdmissionLog
from .workers import Report

_BAR_WIDTH = 16


def interval_text(limit: Limit) -> str:
    """Return the interval in the words of the limit: `1 second`, `5 minutes`."""
    _, _, text = str(Limit(1, limit.per)).partition("/")
    return text if text[0].isdigit() else f"1 {text}"


class DemoView:
    """The counts of all workers, and the tables that show them."""

    def __init__(self, limits: Sequence[Limit], pids: Sequence[int]) -> None:
        self.logs = [AdmissionLog(limit) for limit in limits]
        self.failed, self.last_error = 0, ""
        self._limit = limits[0]
        self._pids = pids
        self._admitted = [0] * len(pids)
        self._refused = [0] * len(pids)
        self._worker_logs = [AdmissionLog(limits[0]) for _ in pids]
        self._recent_refusals: deque[tuple[float, int]] = deque()

    def add(self, worker: int, report: Report) -> None:
        """Add a report of the worker of this number."""
        self._admitted[worker] += len(report.admitted_ms)
        self._refused[worker] += report.refused
        self.failed += report.failed
        self.last_error = report.error or self.last_error
        for log in [*self.logs, self._worker_logs[worker]]:
            log.add(report.admitted_ms)
        self._recent_refusals.append((time.monotonic(), report.refused))

    def live_lines(self, width: int) -> list[Text]:
        """Return the last window and the totals by worker, for a terminal."""
        counts = self._last_window()
        rows = [self._worker_row(worker, count, sum(counts)) for worker, count in enumerate(counts)]
        rows.append(self._sum_row(sum(counts)))
        columns = [
            Column("WORKER"),
            Column("LAST WINDOW", align_right=True),
            Column("", omit_order=1),
            Column("ADMITTED", align_right=True, omit_order=2),
            Column("REFUSED", align_right=True, omit_order=3),
        ]
        return [*Table(columns, rows, width).styled_lines(), Text(), *self._fullest_lines()]

    def total_lines(self, width: int) -> list[Text]:
        """Return the totals by worker, for the end."""
        total = sum(self._admitted)
        rows = []
        for number, count in enumerate(self._admitted):
            worker, _, _, admitted, refused = self._worker_row(number, count, total)
            share = (bar(count / max(1, total), _BAR_WIDTH), "green")
            rows.append([worker, admitted, share, refused])
        worker, _, _, admitted, refused = self._sum_row(total)
        rows.append([worker, admitted, ("", ""), refused])
        columns = [
            Column("WORKER"),
            Column("ADMITTED", align_right=True),
            Column("", omit_order=2),
            Column("REFUSED", align_right=True, omit_order=1),
        ]
        return list(Table(columns, rows, width).styled_lines())

    def log_line(self) -> str:
        """Return the last window in one line, for a log."""
        counts = self._last_window()
        return (
            f"{' + '.join(f'{count:,}' for count in counts)} = {sum(counts):,} of "
            f"{self._limit.amount:,} in the last window, {self._refusals_per_second():,} refused/s"
        )

    def _last_window(self) -> list[int]:
        """Return the admissions by worker in the last complete interval of the first limit."""
        number = self.logs[0].last_complete_interval()
        return [log.in_interval(number) for log in self._worker_logs]

    def _refusals_per_second(self) -> int:
        recent = self._recent_refusals
        while recent and recent[0][0] < time.monotonic() - 1:
            recent.popleft()
        return sum(refused for _, refused in recent)

    def _worker_row(self, worker: int, count: int, total: int) -> list[Cell]:
        return [
            (f"{worker + 1}  (pid {self._pids[worker]})", ""),
            (f"{count:,}", "green"),
            (bar(count / max(1, total), _BAR_WIDTH), "green"),
            (f"{self._admitted[worker]:,}", ""),
            (f"{self._refused[worker]:,}", "dim"),
        ]

    def _sum_row(self, count: int) -> list[Cell]:
        share = count / self._limit.amount
        return [
            ("together", "bold"),
            (f"{count:,}", "bold red" if share > 1 else "bold green"),
            (f"of {self._limit.amount:,}", "bold"),
            (f"{sum(self._admitted):,}", "bold"),
            (f"{sum(self._refused):,}", "dim"),
        ]

    def _fullest_lines(self) -> list[Text]:
        lines = []
        for log in self.logs:
            fullest, amount = log.fullest_aligned().admitted, log.limit.amount
            line = Text(f"fullest window of {interval_text(log.limit)} so far: ")
            line.append(f"{fullest:,} of {amount:,}  ", style="bold")
            style = "bold red" if fullest > amount else "green"
            lines.append(line.append(bar(fullest / amount, _BAR_WIDTH), style=style))
        return lines
