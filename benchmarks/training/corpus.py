"""Text that every Python ships, more of it than a short training sees: the sources of the standard library's modules.

Which release of Python decides what the text is, to the byte.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

#: Directories below the library's own that hold other packages, or what a distribution may leave out.
_LEFT_OUT = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}


def write_parts(directory: Path, num: int) -> list[Path]:
    """Write `num` files of about the same size (12 MB in all), no module in two of them.

    Args:
        directory: there they are called `part-0.txt` and so on.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(path for path in library.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(library).parts))
    parts = [directory / f"part-{index}.txt" for index in range(num)]
    for index, part in enumerate(parts):
        part.write_text("\n".join(module.read_text(errors="replace") for module in modules[index::num]))
    return parts
