"""Files that are whole: a path holds its new content or its old one, never half of it."""
import os
from pathlib import Path


def write_atomically(path, fill, mode="wb", backup=None):
    """Write `path`, whose folder is made if need be: a temporary file beside it, which is flushed
    to the disk and then renamed.

    fill(file) writes the content.  What `path` held is renamed to `backup`, if that is given (so
    for a moment only the backup exists).  Raises OSError or what fill raises, and then leaves no
    temporary file.
    """
    temporary = Path(f"{path}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, mode) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before the name is
        if backup and path.exists():
            os.replace(path, backup)
        os.replace(temporary, path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)  # whatever went wrong, Ctrl-C included


def flush_folder(folder):
    """Flush a folder: before that a rename is not on the disk (Windows does not offer it)."""
    if os.name != "nt":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
