"""Which compiler there is, told from its files alone: an installed one, one that is only unpacked on the path, and none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3_decode import toolchain

PIN = f'"{toolchain.PACKAGE}[{toolchain.FLAVOUR}]==4.8.1"'
ASK = """
import json
from pathlib import Path
from kimi_k3_decode import toolchain
toolchain.driver_release = lambda: DRIVER
answers = []
for ask in (lambda: toolchain.identity(Path(ROOT)), toolchain.require):
    try:
        answers.append(ask())
    except toolchain.ToolchainError as error:
        answers.append(f"refused: {error}")
print(json.dumps(answers))
"""


def unpacked(site: Path, *releases: int, version: str | None = None) -> Path:
    """A compiler as the bundle for GPU machines unpacks it; with `version` its libraries carry metadata."""
    folder = site / "cutlass" / "_mlir" / "_mlir_libs"
    folder.mkdir(parents=True)
    (site / "cutlass" / "__init__.py").write_text("raise SystemExit('imported')\n")
    for release in releases:
        (folder / f"_cutlass_ir.cu{release}.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
        (folder / f"_cutlass_ir_version_cu{release}.py").write_text("")
        if version is not None:
            metadata = site / f"nvidia_cutlass_dsl_libs_cu{release}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: nvidia-cutlass-dsl-libs-cu{release}\nVersion: {version}\n")
    return site


def ask(root: Path, site: Path | None = None, driver: int | None = None) -> tuple[str, str | None]:
    """(identity, what require answers) of a Python that sees `site` and no installed package."""
    (root / "pyproject.toml").write_text(f"dependencies = [{PIN}]\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(toolchain.ROOT), *([str(site)] if site else [])])}
    program = ASK.replace("DRIVER", repr(driver)).replace("ROOT", repr(str(root)))
    done = subprocess.run([sys.executable, "-S", "-c", program], env=environment, cwd=root, capture_output=True, text=True, check=True)
    identity, refusal = json.loads(done.stdout)
    return identity, refusal


def test_unpacked_libraries_tell_their_flavour_without_metadata(tmp_path) -> None:
    ours = ask(tmp_path, unpacked(tmp_path / "13", 13))
    assert ours == ("nvidia-cutlass-dsl 4.8.1 cu13", None)
    other, refusal = ask(tmp_path, unpacked(tmp_path / "12", 12))
    assert other == "nvidia-cutlass-dsl 4.8.1 cu12"
    assert refusal is not None
    assert "got cu12, needs the libraries of cu13" in refusal
    assert "nvidia-cutlass-dsl[cu13]" in refusal


def test_metadata_of_the_libraries_count_more_than_the_pin(tmp_path) -> None:
    assert ask(tmp_path, unpacked(tmp_path / "site", 13, version="4.9.0"))[0] == "nvidia-cutlass-dsl 4.9.0 cu13"


@pytest.mark.parametrize("driver", [None, 13, 14])
def test_of_two_flavours_the_newest_counts_where_the_compiler_loads_it(tmp_path, driver) -> None:
    assert ask(tmp_path, unpacked(tmp_path / "site", 12, 13), driver) == ("nvidia-cutlass-dsl 4.8.1 cu13", None)


def test_two_flavours_and_an_older_driver_are_refused(tmp_path) -> None:
    """The compiler would load the older one there, and a run without the driver the newer one."""
    for answer in ask(tmp_path, unpacked(tmp_path / "site", 12, 13), driver=12):
        assert answer is not None
        assert "got the libraries of cu12 and cu13 beside a driver of CUDA 12" in answer
        assert "needs a driver of CUDA 13, or none" in answer


def test_a_compiler_without_libraries_is_refused_and_none_is_the_pinned_one(tmp_path) -> None:
    for answer in ask(tmp_path, unpacked(tmp_path / "site")):
        assert answer is not None
        assert re.search(r"got no libraries in \S+_mlir_libs, needs those of cu13", answer)
    identity, refusal = ask(tmp_path)
    assert identity == "nvidia-cutlass-dsl 4.8.1 cu13"
    assert refusal is not None
    assert "got no compiler, needs the libraries of cu13" in refusal


def test_this_environment_loads_the_flavour_that_is_pinned() -> None:
    """What the files say is what is loaded; the pin, the constant and the installed libraries are one."""
    program = "import kimi_k3_decode.toolchain as t; said = t.identity(); import cutlass; t.require(); print(t.identity() == said, said)"
    done = subprocess.run([sys.executable, "-c", program], cwd=toolchain.ROOT, capture_output=True, text=True, check=True)
    same, said = done.stdout.strip().split(" ", 1)
    assert (same, said.rsplit(" ", 1)[1]) == ("True", toolchain.FLAVOUR)
    assert f'"{toolchain.PACKAGE}[{toolchain.FLAVOUR}]==' in (toolchain.ROOT / "pyproject.toml").read_text()
