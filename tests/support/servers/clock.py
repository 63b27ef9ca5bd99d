"""A redis-server whose clock a test can set: a preloaded library adds an offset to the time of day."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset; /* seconds to add, and a time in nanoseconds that stands still if it is not 0 */

__attribute__((constructor)) static void map_offset(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    if (file < 0) abort();
    offset = mmap(0, 2 * sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    long result = syscall(SYS_clock_gettime, id, now);
    if (result == 0 && id == CLOCK_REALTIME) {
        long still = offset[1];
        now->tv_sec += offset[0];
        if (still) {
            now->tv_sec = still / 1000000000;
            now->tv_nsec = still % 1000000000;
        }
    }
    return (int)result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (result) *result = precise.tv_sec;
    return precise.tv_sec;
}
"""


class SettableClock:
    """Time of day of one server. `environment` is for its process."""

    def __init__(self, folder: Path) -> None:
        """Build the library in a folder. Needs a C compiler: see `compiler`."""
        program = compiler()
        assert program is not None
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(_SOURCE)
        subprocess.run([program, "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=60)
        self._offset = folder / "offset"
        self.set(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}

    def set(self, seconds: int) -> None:
        """Set the clock by so many seconds forward of the true time, or back."""
        self._write(seconds, 0)

    def hold(self, at: float) -> None:
        """Let the clock show this time, in seconds since 1970, until it is set again."""
        self._write(0, round(at * 1e6) * 1000)

    def _write(self, seconds: int, still: int) -> None:
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("@ll", seconds, still))


def compiler() -> str | None:
    """Return the path of the C compiler, or None if it is missing."""
    return shutil.which("cc")
