"""What a state directory keeps of the run that its peer served: enough to serve it again where nobody answers.

Owns the file. Decides nothing, and asks nobody. Contacts are in a file of their own (`swarm/net/kademlia/contact_file.py`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.base.config import parse_config_bytes, run_id_of
from swarm.base.errors import ConfigError
from swarm.base.ids import RunId
from swarm.base.replace_file import replace_file

KEPT_RUN_FILE = "served.json"
_MAX_FILE_BYTES = 2**24
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """One life of a peer, for the next one."""

    #: The run's configuration, verbatim.
    config: str
    #: What this peer listened at.
    port: int
    #: Address that others saw it come from, as far as it asked anyone; and its own way out then.
    seen_host: str = ""
    way_out: str = ""
    #: That it served first; -1 for a peer of none.
    stage: int = -1

    @property
    def run(self) -> RunId:
        """The run's id."""
        return run_id_of(self.config.encode())

    def save(self, directory: Path) -> None:
        """Replace what was kept before; a disk that refuses costs a start where nobody answers, and no more."""
        try:
            replace_file(directory / KEPT_RUN_FILE, json.dumps(asdict(self)).encode())
        except OSError as error:
            logger.error("%s: the run is not kept for the next start: %s", directory, error.strerror)


def kept_run(directory: Path | None) -> KeptRun | None:
    """What `directory` keeps; None if that is nothing, or of no use, which is told."""
    if directory is None or not (path := directory / KEPT_RUN_FILE).exists():
        return None
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(_MAX_FILE_BYTES))
        kept = KeptRun(
            config=str(fields["config"]),
            port=int(fields["port"]),
            seen_host=str(fields["seen_host"]),
            way_out=str(fields["way_out"]),
            stage=int(fields["stage"]),
        )
        if not 0 <= kept.port < 65536:
            raise ValueError("port")
        parse_config_bytes(kept.config.encode())
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        logger.warning("%s is of no use and not heeded: %s", path, error)
        return None
    return kept
