"""Ctrl-C while PyTorch and transformers load, some seconds: one sentence and status 2, as later.

    early.stops("train.py")      # before the imports that take their time
    early.raises()               # from here on Ctrl-C is KeyboardInterrupt again
"""
import os
import signal
import threading


def stops(program):
    """Until raises() is called, Ctrl-C ends the process at once: nothing has been begun."""
    def stop(*_):
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(2)
    signal.signal(signal.SIGINT, stop)


def raises():
    """Python's own way."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
