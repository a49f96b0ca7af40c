"""Items of an iterator, made on a thread before they are asked for."""

from __future__ import annotations

from collections.abc import Generator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")

# How long a side waits before it looks whether the other one is still there.
WAIT_SECONDS = 0.1
# How long leaving waits for an item that is being made; a camera that hangs shall not hold the program.
GRACE_SECONDS = 30.0


class _End(NamedTuple):
    """The last thing that the thread hands over: why it ended, None where the items did."""

    error: BaseException | None


def read_ahead(items: Generator[Item, None, None], ahead: int) -> Generator[Item, None, None]:
    """Give the items in their order while a thread makes up to `ahead` more.

    An error of the thread is raised where the item would have come. However the caller leaves, by the end, a break, an
    error or Ctrl-C, the thread stops and closes `items` before this iterator is closed.
    """
    waiting: Queue[Any] = Queue(maxsize=ahead)
    left = Event()

    def put(value: Any) -> bool:
        while not left.is_set():
            try:
                waiting.put(value, timeout=WAIT_SECONDS)
                return True
            except Full:
                continue
        return False

    def make() -> None:
        end = _End(None)
        try:
            for item in items:
                if not put(item):
                    break
        except BaseException as error:
            end = _End(error)
        finally:
            items.close()
        put(end)

    # A daemon, so that Python can end even where an item never comes.
    thread = Thread(target=make, name="read_ahead", daemon=True)
    thread.start()
    try:
        while True:
            try:
                # Waiting in pieces lets Ctrl-C in on every system.
                item = waiting.get(timeout=WAIT_SECONDS)
            except Empty:
                continue
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        left.set()
        thread.join(GRACE_SECONDS)
