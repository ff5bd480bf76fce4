"""How other processes of this machine have ended, for those who are not their parents."""

from __future__ import annotations

import fcntl
import os
import select
import struct

# include/uapi/linux/pidfd.h, since Linux 6.15: struct pidfd_info (its first 64 bytes), PIDFD_INFO_EXIT.
_SIZE, _INFO_EXIT = 64, 1 << 3
_GET_INFO = 3 << 30 | _SIZE << 16 | 0xFF << 8 | 11


class Watched:
    """A process, held so that its number cannot become another's."""

    def __init__(self, pid: int):
        self._fd = os.pidfd_open(pid)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it ends within `timeout_s`. Its parent may not have noticed yet."""
        waiter = select.poll()  # takes descriptors of any number
        waiter.register(self._fd, select.POLLIN)
        return bool(waiter.poll(max(0.0, timeout_s) * 1000))

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """As `subprocess.Popen.returncode`: the status, or minus the signal. None while it lives, after
        waiting for `timeout_s`, and where the kernel does not tell."""
        if not self.has_ended(timeout_s):
            return None
        info = bytearray(_SIZE)
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(self._fd, _GET_INFO, info)
        except OSError:
            return None
        (known,) = struct.unpack_from("Q", info)
        (status,) = struct.unpack_from("i", info, _SIZE - 4)
        return os.waitstatus_to_exitcode(status) if known & _INFO_EXIT else None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
