"""Signals that end a run between two steps."""
import os
import signal
import sys
import threading

from training import ranks

HANG_UP = getattr(signal, "SIGHUP", 0)  # the terminal was closed; Windows has no such signal


class Stop:
    """Let Ctrl-C, SIGTERM and SIGHUP (unless nohup ignores it) end a run between two steps.

    `number` is the signal's number, once all ranks agree on it.  A second signal exits at once; the
    checkpoint on disk is always complete.  Several ranks may get the same signal twice, from the
    cluster and from torchrun, so they ignore the second, as one rank does a second SIGHUP.
    """

    def __enter__(self):
        self.received = self.number = 0
        self.terminals = [name for n, name in ((1, "stdout"), (2, "stderr")) if os.isatty(n)]
        numbers = (signal.SIGINT, signal.SIGTERM, HANG_UP)
        if threading.current_thread() is not threading.main_thread():  # as in a web server
            numbers = ()  # only the main thread may set handlers
        self.handlers = {number: signal.signal(number, self.handle) for number in numbers if number}
        if self.handlers.get(HANG_UP) == signal.SIG_IGN:  # as under nohup
            signal.signal(HANG_UP, signal.SIG_IGN)
        return self

    def handle(self, signal_number, frame):
        """Record a signal; exit at the second."""
        if signal_number == HANG_UP:
            for name in self.terminals:  # writing to a closed terminal would raise OSError
                setattr(sys, name, open(os.devnull, "w"))
        elif self.received and ranks.COUNT == 1:
            os._exit(128 + signal_number)
        elif ranks.RANK == 0:  # print could be interrupted while it writes, and would fail
            os.write(2, b"\nstopping after this step or validation; again: at once\n")
        self.received = self.received or signal_number

    def agree(self):
        """Record a signal that any rank has received."""
        self.number = int(ranks.largest(self.received))

    def __exit__(self, *exception):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.received and not self.number:  # it came after the last agreement
            signal.raise_signal(self.received)
