"""What a person sees: progress on stderr while it lasts, tables on stdout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

WIDTH_WITHOUT_TERMINAL = 120


def console(stderr: bool = False) -> Console:
    """A console that does not squeeze tables into 80 columns when its output is piped."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = WIDTH_WITHOUT_TERMINAL
    return made


@contextmanager
def progress_on_stderr() -> Iterator[Callable[[int, int, str], None]]:
    """Gives `report(done, total, what)`: a bar a task on a terminal, one line a task elsewhere."""
    out = console(stderr=True)
    if not out.is_terminal:
        seen: set[str] = set()

        def line(done: int, total: int, what: str) -> None:
            if what not in seen:
                seen.add(what)
                out.print(f"{what} ...", markup=False)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bars:
        tasks: dict[str, object] = {}

        def bar(done: int, total: int, what: str) -> None:
            for other, task in tasks.items():
                if other != what:
                    bars.stop_task(task)  # type: ignore[arg-type]
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)  # type: ignore[arg-type]

        yield bar
