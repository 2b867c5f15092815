"""What a change touches: the difference between two revisions of a git repository, read through the git command."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from validation.core.types import HarnessError

WORKTREE = "WORKTREE"  # as `head`: the files on disk, untracked ones included
_HUNK = re.compile(r"@@ -\d{1,12}(?:,\d{1,12})? \+(\d{1,12})(?:,\d{1,12})? @@")
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # as `base`: git's name of the tree without files, so everything is the change


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """One changed file. `added` are (line number in the new file, text) pairs; `old_path` differs after a rename."""

    path: str
    old_path: str
    added: tuple[tuple[int, str], ...]
    removed_lines: int
    binary: bool


@dataclass(frozen=True, kw_only=True)
class Change:
    repository: Path
    base: str  # full commit of the merge base
    head: str  # full commit, or WORKTREE
    files: tuple[FileChange, ...]

    def paths_at(self, side: str) -> tuple[str, ...]:
        """All file paths at "base" or "head"."""
        if side == "head" and self.head == WORKTREE:
            return tuple(_git(self.repository, "ls-files", "--cached", "--others", "--exclude-standard").splitlines())
        return tuple(_git(self.repository, "ls-tree", "-r", "--name-only", self.base if side == "base" else self.head).splitlines())

    def text_at(self, side: str, path: str) -> str | None:
        """The file's text at "base" or "head"; None when it does not exist there or is not UTF-8."""
        if side == "head" and self.head == WORKTREE:
            try:
                return (self.repository / path).read_text()
            except (OSError, UnicodeDecodeError):
                return None
        try:
            return _git(self.repository, "show", f"{self.base if side == 'base' else self.head}:{path}")
        except (HarnessError, UnicodeDecodeError):
            return None


def _git(repository: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotepath=off", "-C", str(repository), *arguments], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"git {arguments[0]}: got {error}, needs a working git; install it or check the repository") from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().splitlines()
        what = message[-1] if message else "got nothing by that name; check the revision"
        raise HarnessError(f"git {' '.join(arguments)} in {repository}: {what}")
    return done.stdout.decode()


def read_change(repository: Path, base: str, head: str = WORKTREE) -> Change:
    """The change from the merge base of `base` and `head` to `head`.

    Raises:
        HarnessError: not a git repository, an unknown revision, or no common ancestor.
    """
    tip = _commit(repository, "HEAD" if head == WORKTREE else head)
    merge_base = base if base == EMPTY_TREE else _git(repository, "merge-base", _commit(repository, base), tip).strip()
    span = [merge_base] if head == WORKTREE else [merge_base, tip]
    options = ["--no-color", "--no-ext-diff", "--unified=0", "--find-renames", "--src-prefix=a/", "--dst-prefix=b/"]
    files = list(_parse(_git(repository, "diff", *options, *span)))
    if head == WORKTREE:
        files += _untracked(repository)
    return Change(repository=repository, base=merge_base, head=WORKTREE if head == WORKTREE else tip, files=tuple(files))


def _commit(repository: Path, revision: str) -> str:
    """The full commit a revision names; a name that looks like an option is never passed on as one."""
    if revision.startswith("-"):
        raise HarnessError(f"git rev-parse: got the revision {revision!r}, needs a branch, tag or commit")
    return _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()


def _untracked(repository: Path) -> list[FileChange]:
    found = []
    for path in _git(repository, "ls-files", "--others", "--exclude-standard").splitlines():
        try:
            lines = (repository / path).read_text().splitlines()
            added, binary = tuple(enumerate(lines, start=1)), False
        except (OSError, UnicodeDecodeError):
            added, binary = (), True
        found.append(FileChange(path=path, old_path=path, added=added, removed_lines=0, binary=binary))
    return found


def _unquote(path: str) -> str:
    """Git quotes a path that holds control characters or quotes in C style."""
    if path.startswith('"') and path.endswith('"'):
        try:
            return path[1:-1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
        except UnicodeError:  # no quoting of git's: the name as it stands is as good as any
            return path
    return path


def _parse(diff: str) -> list[FileChange]:
    files: list[FileChange] = []
    state: dict = {}

    def close() -> None:
        if state:
            files.append(
                FileChange(
                    path=state["new"] or state["old"],
                    old_path=state["old"] or state["new"],
                    added=tuple(state["added"]),
                    removed_lines=state["removed"],
                    binary=state["binary"],
                )
            )

    in_hunk = False
    for line in diff.split("\n"):
        if line.startswith("diff --git "):
            close()
            half = line[len("diff --git ") :]
            middle = len(half) // 2  # "a/X b/X": equal halves unless renamed, when the rename lines below say both
            state = {
                "old": _unquote(half[:middle])[2:],
                "new": _unquote(half[middle + 1 :])[2:],
                "added": [],
                "removed": 0,
                "binary": False,
            }
            in_hunk = False
        elif not state:
            continue  # nothing of git's stands before the first file
        elif line.startswith("@@ "):
            hunk = _HUNK.match(line)
            if hunk is None:
                raise HarnessError(f"git diff: got the hunk header {line[:60]!r}, needs @@ -N,N +N,N @@; use a plain git")
            in_hunk = True
            state["next"] = int(hunk.group(1))
        elif in_hunk and line.startswith("+"):
            state["added"].append((state["next"], line[1:]))
            state["next"] += 1
        elif in_hunk and line.startswith("-"):
            state["removed"] += 1
        elif line.startswith("rename from "):
            state["old"] = _unquote(line[len("rename from ") :])
        elif line.startswith("rename to "):
            state["new"] = _unquote(line[len("rename to ") :])
        elif line.startswith(("Binary files ", "GIT binary patch")):
            state["binary"] = True
    close()
    return files
