"""A program on a terminal: what it shows on a pseudo-terminal of a given width."""

import fcntl
import os
import pty
import struct
import subprocess
import termios


def run_on_terminal(command, columns=80, **settings):
    """Run a command whose standard output and error are a terminal; returns its exit status and what it showed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, **settings)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 1 << 16):
            shown += part
    except OSError:  # EIO: the program has ended
        pass
    os.close(master)
    return process.wait(), shown.decode()
