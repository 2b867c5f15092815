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
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
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
