"""All hostile models, data and tasks, which a user may give by mistake or get from a stranger."""

from collections.abc import Iterator
from pathlib import Path

from hostile import Input
from hostile_data import datasets, rows, texts
from hostile_models import models
from hostile_tasks import tasks


def inputs(model: Path) -> Iterator[Input]:
    """Yield all inputs; `model` is a directory that can be loaded."""
    yield from models(model)
    yield from datasets()
    yield from tasks()
    yield from texts()
    yield from rows()
