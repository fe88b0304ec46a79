"""Complete files: a path holds its new content or its old one, never half of it."""
import os
from pathlib import Path


def write_atomically(path, fill, mode="xb", backup=None):
    """Write the content, by fill(file), into a temporary file, flush it to the disk and rename it
    to `path`, whose folder is created if it is missing.

    The old `path` is renamed to `backup`, if that is given (for a moment only the backup exists).
    Raises OSError, as for a link or a device, or what fill raises, and leaves no temporary file.
    """
    temporary = Path(f"{path}.part")
    if path.is_symlink() or path.exists() > path.is_file():
        raise OSError(f"{path} is not a regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.unlink(missing_ok=True)  # it may be a link
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before the name is
        if backup and path.exists():
            os.replace(path, backup)
        os.replace(temporary, path)
        if os.name != "nt":  # before its folder is flushed a rename is not on the disk
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)  # whatever went wrong, Ctrl-C included
