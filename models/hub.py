"""A model on the Hugging Face hub: files are fetched when they are asked for. Owns the calls to `huggingface_hub`.

Every file is that of one commit, so a run that names id and commit names the same bytes for ever; the hub tells the
SHA-256 of its large files, so a run's creator need not fetch them to state their digests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-]+)?")


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form `owner/name` or `owner/name@revision`."""
    return _HUB_ID.fullmatch(text) is not None and len(text) <= 200


class Hub:
    """The files of one model at one commit.

    Args:
        hub_id: `owner/name`, optionally with `@revision` (a branch, tag or commit).

    Raises:
        ConfigError: there is no such model, or the hub cannot be reached.
    """

    def __init__(self, hub_id: str) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        repository, _, revision = hub_id.partition("@")
        try:
            info: Any = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
        except Exception as error:  # of several families, some of them the HTTP library's own
            raise ConfigError(f"model {hub_id}: no such directory here, and from the hub: {_one_line(error)}") from None
        self._repository = repository
        self._commit: str = info.sha
        self._files = {file.rfilename: file for file in info.siblings or []}
        #: Names the same bytes for ever.
        self.name = f"{repository}@{self._commit}"

    def path(self, file: str) -> Path | None:
        from huggingface_hub import hf_hub_download

        if file not in self._files:
            return None
        try:
            return Path(hf_hub_download(self._repository, file, revision=self._commit))
        except Exception as error:
            raise ConfigError(f"model {self.name}: {file}: {_one_line(error)}") from None

    def extra_shards(self, known: Iterable[str]) -> list[str]:
        """None: a hub may hold the model in several forms."""
        return []

    def file_digest(self, file: str) -> str | None:
        """SHA-256 of a large file as the hub states it, without fetching it."""
        lfs = getattr(self._files.get(file), "lfs", None)
        return None if lfs is None else str(lfs.sha256)

    def fetch(self, files: Iterable[str]) -> Path | None:
        """Fetch those of `files` that there are, into one directory."""
        found = [path for file in files if (path := self.path(file)) is not None]
        return found[0].parent if found else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
