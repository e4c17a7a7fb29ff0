"""Parent of a slot's process, which ends all processes that functions have started, and reaps orphans. Only the
ancestor that adopts a process whose parent has died can find it (a subreaper in Linux). The process that runs the
functions cannot be that ancestor, because it may die itself, and waiting for any child would take away exit codes of a
function's processes. If the subreaper itself is killed (SIGKILL), processes in another session survive. The other
processes of the slot and programs of models do not.
"""

import ctypes
import os
import resource
import signal

from rltrain.runtime.slots.limits import PROGRAMS_FOLDER, descendants, kill_below, remove_folder

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def fork_below(parent: int, channel: int) -> None:
    """Fork, and return in the child. The parent (this process) ends all remaining descendants, and then itself like the
    child.

    parent: process id of the parent. When its thread that started this process ends, or on SIGTERM, everything ends.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored signal, which a parent may have set, would never arrive
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _end_with(parent, signal.SIGTERM)
    own, child = os.getpid(), os.fork()
    if not child:
        _end_with(own, signal.SIGKILL)  # even inside an endless loop
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(channel)  # the other end must notice when the last descendant is gone
    pid, status = -1, 0
    while pid != child and signal.sigwait((signal.SIGTERM, signal.SIGCHLD)) == signal.SIGCHLD:
        pid = -1
        while pid not in (0, child):  # one signal may represent several ended processes
            pid, status = os.waitpid(-1, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if pid == child else -signal.SIGTERM
    kill_below(own)
    while descendants(own):
        os.wait()
    remove_folder(os.environ.get(PROGRAMS_FOLDER, ""))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has already written its core dump
        if code != -signal.SIGKILL:  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(own, -code)
    os._exit(code)


def _end_with(parent: int, number: int) -> None:
    """Request a signal for when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before prctl took effect, and then no signal is sent.
    if os.getppid() != parent:
        os._exit(1)
