"""The process above that of a slot: ends all that functions have started, and reaps what they leave behind.

A process whose parent has died is found only by the ancestor that adopts it (in Linux a subreaper). The one that runs
the functions cannot be that ancestor: it may be the one that dies, and a wait for whatever ends would take from a
function the exit codes of its own processes. Left out: what is in a session of its own outlives a reaper that is
killed itself (SIGKILL); the other processes of the slot and programs of models do not.
"""

import ctypes
import os
import resource
import signal

from rltrain.slots.limits import PROGRAMS_FOLDER, descendants, kill_below, remove_folder

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def fork_below(parent: int, channel: int) -> None:
    """Fork, and return in the child. This process stays above it, and ends as it does, after all that is left below.

    parent: the process id of the one that started this one; once the thread that did so ends, or by SIGTERM, all ends.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored, as a parent may have it, never comes
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _end_with(parent, signal.SIGTERM)
    own, child = os.getpid(), os.fork()
    if not child:
        _end_with(own, signal.SIGKILL)  # even inside an endless loop
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(channel)  # its other end is to see when the last process below is gone
    pid, status = -1, 0
    while pid != child and signal.sigwait((signal.SIGTERM, signal.SIGCHLD)) == signal.SIGCHLD:
        pid = -1
        while pid not in (0, child):  # a signal may stand for several that have ended
            pid, status = os.waitpid(-1, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if pid == child else -signal.SIGTERM
    kill_below(own)
    while descendants(own):
        os.wait()
    remove_folder(os.environ.get(PROGRAMS_FOLDER, ""))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its own
        if code != -signal.SIGKILL:  # which has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(own, -code)
    os._exit(code)


def _end_with(parent: int, number: int) -> None:
    """Get a signal when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before prctl took effect, and then no signal comes.
    if os.getppid() != parent:
        os._exit(1)
