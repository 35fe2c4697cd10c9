"""Finds the pods that a file lists, and reads it again when it changes.

The file may be replaced atomically, written in place, or be a mounted ConfigMap, whose folder is a link that Kubernetes
replaces. A file that is missing or wrong changes nothing: its last pods stay in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from router.config.load import Document, plain, read_document
from router.config.mistakes import Location, explain_mistakes
from router.config.pod_schema import PodConfig, TargetFile, TargetGroup
from router.config.watched_file import Sleep, WatchedFile, stamp_of
from router.errors import ConfigError
from router.feeds.discovery.membership import ListedPod, SourceStatus
from router.feeds.discovery.pod_facts import Facts, label_facts, pod_at

INTERVAL_S = 1.0
"""Time between checks."""
MAX_FILE_BYTES = 1024 * 1024


class FilePods:
    def __init__(self, entry: TargetFile, status: SourceStatus, sleep: Sleep = asyncio.sleep) -> None:
        self._file = WatchedFile(partial(read_targets, entry), partial(stamp_of, entry.path), sleep=sleep)
        self.status = status
        self._sleep = sleep

    async def __aiter__(self) -> AsyncGenerator[Sequence[ListedPod], None]:
        while True:
            is_read, error = await self._file.check(), self._file.error
            if not error:
                self.status.confirm()
            elif is_read:
                self.status.fail(error)
            if is_read and not error:
                yield self._file.value
            await self._sleep(INTERVAL_S)


def read_targets(entry: TargetFile) -> list[ListedPod]:
    """The pods in the file. Raises `ConfigError` with file, line and key of every mistake."""
    path = Path(entry.path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if size > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; split it into several files")
    document = read_document(path, is_watched=True)
    data = plain(document.data)
    if not isinstance(data, list):
        raise ConfigError(f"{path}:1: must be a list such as `- targets: [10.0.0.7:8000]`; write [] for no pods")
    pods, mistakes = [], []
    for number, given in enumerate(data):
        try:
            group = TargetGroup.model_validate(given)
        except ValidationError as error:
            where = partial(_place, document, number)
            mistakes.append(explain_mistakes(error, TargetGroup, given, where))
            continue
        hints = label_facts(group.labels)
        if hints is None:
            continue
        facts = {name: getattr(group, name) for name in group.model_fields_set - {"targets", "labels"}}
        pods += [ListedPod(_pod(target, entry, facts, hints)) for target in group.targets]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return pods


def _place(document: Document, number: int, keys: Location) -> tuple[str, int]:
    return document.place_of((number, *keys))


def _pod(target: str, entry: TargetFile, facts: Facts, hints: Facts) -> PodConfig:
    scheme = "https" if entry.pod.tls else "http"
    url = target if "://" in target else f"{scheme}://{target}"
    return pod_at(url, entry.pod, facts, hints)
