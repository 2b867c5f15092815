"""What keeps a candidate's code in its place: limits, no secrets in the environment, no writing outside its scratch folder, no network.

Candidates are untrusted code. Each of these is applied inside the worker before any of that code is imported. The first group works
everywhere (own process group, resource limits, a clean environment, death with the parent); the second where the kernel offers it
(Landlock for writing, a network namespace). `isolate` reports what it achieved, and the run records it. Where Landlock is missing, the
store still notices any change to the evidence file, because it knows the size it left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

PASSED_VARIABLES = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "K3_EVAL_DATA",
)

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_PRIVATE = 1 << 18 | 1 << 14  # with everything below
_EXIT_STATUS_BYTES = 4
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
# remove_dir, remove_file, make_char, make_dir, make_reg, make_sock, make_fifo, make_block, make_sym (linux/landlock.h)
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13  # since ABI 2
_TRUNCATE = 1 << 14  # since ABI 3


def worker_environment(scratch: Path, python_path: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The whole environment a worker sees: an allow-list, plus a home and a temporary folder inside `scratch`."""
    kept = {name: environment[name] for name in PASSED_VARIABLES if name in environment}
    return {
        "OMP_NUM_THREADS": "1",
        **kept,
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "FASTTRACK_SCRATCH": str(scratch),
        "PYTHONPATH": python_path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(scratch / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
        "MPLCONFIGDIR": str(scratch / "mpl"),
    }


def confine_children() -> bool:
    """Continue in a process namespace of its own, in which nothing outlives this worker: a daemon it leaves behind ends with it.

    Returns in a grandchild; the process that was started waits for it and ends the way it ended. Between them stands the first process of
    the namespace, which reaps. False (and no other process) where the kernel does not allow it. Call before other threads exist.
    """
    if platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS) != 0:
        return False
    reading, writing = os.pipe()
    first = os.fork()
    if first:
        os.close(writing)
        _end_like(reading, first)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(reading)
    libc.mount(None, b"/", None, _MS_PRIVATE, None)
    libc.mount(b"proc", b"/proc", b"proc", 0, None)  # so that /proc and os.getpid() speak of the same processes
    worker = os.fork()
    if worker:
        _reap_until(worker, writing)
    os.close(writing)
    return True


def _reap_until(worker: int, writing: int) -> NoReturn:
    """The namespace's first process: collect whatever ends, pass the worker's status on, and take the rest down by ending."""
    status = 0
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == worker:
            break
    os.write(writing, status.to_bytes(_EXIT_STATUS_BYTES, "little"))
    os._exit(0)


def _end_like(reading: int, first: int) -> NoReturn:
    """The process that was started: end with the worker's exit code, or by the signal that ended it."""
    for fd in range(3, 256):  # the answers' pipe above all: its end must be seen when the worker ends
        if fd != reading:
            with contextlib.suppress(OSError):
                os.close(fd)
    data = os.read(reading, _EXIT_STATUS_BYTES)
    os.waitpid(first, 0)
    status = int.from_bytes(data, "little") if len(data) == _EXIT_STATUS_BYTES else signal.SIGKILL
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


def isolate(*, scratch: Path, memory_bytes: int, file_bytes: int, network: bool) -> list[str]:
    """Restrict this process for good; returns what holds, in words. Call first thing in a worker, before other threads exist."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = ["own process group"]
    if platform.system() == "Linux" and libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0:
        held.append("ends with its parent")
    # Data, not address space: torch maps far more than it touches.
    _limit(resource.RLIMIT_DATA, memory_bytes, held, f"memory limit {memory_bytes} bytes")
    _limit(resource.RLIMIT_FSIZE, file_bytes, held, f"file size limit {file_bytes} bytes")
    _limit(resource.RLIMIT_CORE, 0, held, "no core dumps")
    if not network and _leave_network(libc):
        held.append("no network")
    if _restrict_writing(libc, [scratch, Path("/dev")]):
        held.append("writes only to its scratch folder")
    return held


def _limit(kind: int, value: int, held: list[str], words: str) -> None:
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))
        held.append(words)


def _leave_network(libc: ctypes.CDLL) -> bool:
    if libc.unshare(_CLONE_NEWNET) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _restrict_writing(libc: ctypes.CDLL, writable: Sequence[Path]) -> bool:
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return False
    handled = _WRITE_FILE | _CHANGE_FOLDER | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    rules = _Ruleset(handled)
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    try:
        for folder in writable:
            fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            beneath = _PathBeneath(handled, fd)
            failed = libc.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(beneath), 0)
            os.close(fd)
            if failed:
                return False
        return libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    finally:
        os.close(ruleset)
