"""Readers against honest and hostile files: cubins, fat binaries, PTX, and disassembler output, also cut short or scrambled."""

from __future__ import annotations

import contextlib
import random
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from validation.ordering import pool
from validation.ordering.audit import audit_kernel
from validation.ordering.binaries import load_binaries
from validation.ordering.cfg import build_graph
from validation.ordering.disasm import disassemble_file, disassemble_raw, parse_json, parse_text
from validation.ordering.elf import BinaryError, read_attributes, read_cubin, read_sections
from validation.ordering.model import Instruction, KernelBinary, LaunchFacts, Parameter, Role, RoleEntry, RoleMap
from validation.ordering.operands import parse_operands
from validation.ordering.ptx import PtxError, parse_ptx
from validation.ordering.ptx_lower import lower_ptx
from validation.ordering.tools import run_tool

ROLES = RoleMap(by_index={(index, 0): RoleEntry(role=Role.INPUT, reason="test") for index in range(5)})


def test_cubin_metadata(engine_kernels):
    kernel = engine_kernels.kernels["clean"]
    assert kernel.arch == engine_kernels.arch
    assert [(p.offset, p.size) for p in kernel.parameters] == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 4)]
    assert kernel.param_base == (0x210 if kernel.arch == "sm_90a" else 0x380)
    assert kernel.cta_threads == 128
    assert kernel.one_dimensional
    assert kernel.registers > 0
    assert len(kernel.digest) == len(kernel.code_digest) == 64


def test_raw_batches_equal_the_disassembly_of_the_file(engine_kernels):
    whole = disassemble_file(engine_kernels.cubin)
    for name, kernel in engine_kernels.kernels.items():
        assert [str(i) for i in kernel.instructions] == [str(i) for i in whole[name]]


def test_text_form_equals_json(engine_kernels):
    text = parse_text(run_tool("nvdisasm", "-c", str(engine_kernels.cubin)))
    for name, kernel in engine_kernels.kernels.items():
        mine = [(i.pc, i.opcode, i.pred) for i in kernel.instructions]
        assert [(pc, opcode, pred) for pc, pred, opcode, _ in text[name]] == mine


def test_large_parameter_block(tmp_path):
    (tmp_path / "k.ptx").write_text(
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .align 8 .b8 p_big[8000], .param .u64 p_y)\n"
        "{ .reg .b64 %rd<4>; .reg .f32 %f<3>; ld.param.u64 %rd1,[p_big+6400]; ld.param.u64 %rd2,[p_y];"
        " ld.global.f32 %f1,[%rd1]; st.global.f32 [%rd2],%f1; ret; }"
    )
    run_tool("ptxas", "-arch=sm_90a", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.ptx"))
    (kernel,) = load_binaries(tmp_path / "k.cubin").kernels
    assert [(p.offset, p.size) for p in kernel.parameters] == [(0, 8000), (8000, 8)]
    accesses = audit_kernel(kernel, ROLES).accesses
    assert [str(ref) for access in accesses for ref in access.bases] == ["p0+6400", "p1"]


def test_every_kind_of_unreadable_input_is_a_file_error(tmp_path, engine_kernels):
    data = engine_kernels.cubin.read_bytes()
    (tmp_path / "truncated.cubin").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.cubin").write_bytes(b"")
    (tmp_path / "text.cubin").write_bytes(b"not a cubin at all")
    (tmp_path / "header.cubin").write_bytes(data[:40])
    host = bytearray(data)
    struct.pack_into("<H", host, 18, 62)
    (tmp_path / "host.so").write_bytes(bytes(host))
    foreign = bytearray(data)
    struct.pack_into("<I", foreign, 48, 0)
    (tmp_path / "foreign.cubin").write_bytes(bytes(foreign))
    with zipfile.ZipFile(tmp_path / "nothing.whl", "w") as archive:
        archive.writestr("package/__init__.py", "")
    (tmp_path / "broken.whl").write_bytes(b"PK\x03\x04 cut")
    (tmp_path / "good.cubin").write_bytes(data)
    loaded = load_binaries(tmp_path)
    assert {kernel.name for kernel in loaded.kernels} == set(engine_kernels.kernels), "the good file is still read"
    named = {error.path.rsplit("/", 1)[-1] for error in loaded.errors}
    assert named == {p.name for p in tmp_path.iterdir()} - {"good.cubin"}
    assert all(error.reason for error in loaded.errors)
    assert load_binaries(tmp_path / "missing.cubin").errors
    (tmp_path / "hollow").mkdir()
    assert load_binaries(tmp_path / "hollow").errors


def test_stripped_cubin_is_read_with_a_note(tmp_path, engine_kernels):
    data = bytearray(engine_kernels.cubin.read_bytes())
    sections = read_sections(bytes(data))
    table = struct.unpack_from("<Q", data, 40)[0]
    for index, section in enumerate(sections):
        if section.name.startswith(".nv.info."):
            struct.pack_into("<I", data, table + 64 * index, 1)  # another name: the reader no longer finds it
    (tmp_path / "stripped.cubin").write_bytes(bytes(data))
    loaded = load_binaries(tmp_path / "stripped.cubin")
    assert loaded.kernels
    assert all(any("stripped" in note for note in kernel.notes) for kernel in loaded.kernels)
    by_name = {kernel.name: kernel for kernel in loaded.kernels}
    assert audit_kernel(by_name["early_read"], ROLES, None, LaunchFacts(pdl=True)).findings, "the layout is the architecture's default"


def test_wheel_with_a_cubin(tmp_path, engine_kernels):
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as archive:
        archive.write(engine_kernels.cubin, "package/k.cubin")
    loaded = load_binaries(tmp_path / "p.whl")
    assert not loaded.errors
    assert {kernel.name for kernel in loaded.kernels} == set(engine_kernels.kernels)
    assert all("!package/k.cubin" in kernel.path for kernel in loaded.kernels)


def test_architecture_filter_reports_what_it_leaves_out(engine_kernels):
    loaded = load_binaries(engine_kernels.cubin, arch="sm_120")
    assert not loaded.kernels
    assert "needs sm_120" in loaded.errors[0].reason


def test_unknown_instruction_is_noted_and_taints():
    rows = ["LDC.64 R2,c[0x0][0x210]", "FROBNICATE.X R2,R2,R3", "LDG.E R4,desc[UR4][R2.64]", "ACQBULK", "EXIT"]
    kernel = handmade(rows)
    result = audit_kernel(kernel, ROLES, None, LaunchFacts(pdl=True))
    assert result.unknown_instructions == ("FROBNICATE",)
    assert any("unknown instruction FROBNICATE" in note for note in result.notes)
    assert result.accesses[0].unknown_base
    assert [finding.rule for finding in result.findings] == ["MO013"]


def test_generic_load_of_another_blocks_shared_memory_is_no_global_access():
    rows = ["S2UR UR5,SR_SWINHI", "S2UR UR4,SR_CgaCtaId", "UPRMT UR4,UR4,0x654,URZ", "LD.E R4[RZ.U32+UR4]", "ACQBULK", "EXIT"]
    result = audit_kernel(handmade(rows), ROLES, None, LaunchFacts(pdl=True))
    assert result.accesses == ()
    assert result.findings == ()


def test_kernel_without_instructions_is_never_clean():
    result = audit_kernel(handmade([]), ROLES)
    assert not result.complete
    assert result.notes


def handmade(rows: list[str]) -> KernelBinary:
    made = []
    for index, row in enumerate(rows):
        pred, _, rest = row.partition(" ") if row.startswith("@") else ("", "", row)
        opcode, _, operands = rest.partition(" ")
        made.append(Instruction(pc=16 * index, opcode=opcode, operands=operands, pred=pred))
    parameters = tuple(Parameter(index=i, offset=8 * i, size=8) for i in range(4))
    return KernelBinary(
        name="k", arch="sm_90a", digest="", path="", parameters=parameters, param_base=0x210, instructions=tuple(made), cta_threads=128
    )


# ---------------------------------------------------------------------------------------------------- fuzzing
def test_mutated_cubins_never_crash(tmp_path, engine_kernels):
    """Random bytes, cuts and swaps: a BinaryError or a readable result, for 400 mutants; nothing else may come out."""
    data, chance = engine_kernels.cubin.read_bytes(), random.Random(7)
    refused = 0
    for _ in range(400):
        mutant = bytearray(data)
        for _ in range(chance.choice((1, 4, 32))):
            mutant[chance.randrange(len(mutant))] = chance.randrange(256)
        if chance.random() < 0.3:
            del mutant[chance.randrange(len(mutant)) :]
        try:
            cubin = read_cubin(bytes(mutant))
        except BinaryError:
            refused += 1
            continue
        for kernel in cubin.kernels:
            assert len(kernel.code) % 16 == 0
    assert 0 < refused < 400


def test_mutated_code_sections_end_in_results_or_errors(tmp_path, engine_kernels):
    data, chance = engine_kernels.cubin.read_bytes(), random.Random(11)
    texts = [section for section in read_sections(data) if section.name.startswith(".text.")]
    seen_errors = seen_results = 0
    for number in range(2):
        mutant = bytearray(data)
        for _ in range(3):
            section = chance.choice(texts)
            mutant[section.offset + chance.randrange(section.size)] ^= 1 << chance.randrange(8)
        (tmp_path / f"{number}.cubin").write_bytes(bytes(mutant))
        loaded = load_binaries(tmp_path / f"{number}.cubin")
        seen_errors += len(loaded.errors)
        accounted = {k.name for k in loaded.kernels} | {e.path.rpartition("#")[2] for e in loaded.errors}
        assert loaded.kernels or loaded.errors
        assert set(engine_kernels.kernels) <= accounted or any("#" not in e.path for e in loaded.errors)
        for kernel in loaded.kernels:
            audit_kernel(kernel, ROLES, None, LaunchFacts(pdl=True))
            seen_results += 1
    assert seen_results > 0


OPCODES = [
    "LDG.E",
    "STG.E",
    "IADD3",
    "IMAD.WIDE",
    "BRA",
    "BSSY",
    "BSYNC",
    "ISETP.NE.AND",
    "SEL",
    "LEA.HI.X",
    "UTMALDG.2D",
    "UBLKCP.S.G",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT",
]
OPCODES += [
    "ACQBULK",
    "BAR.SYNC",
    "EXIT",
    "CALL.REL.NOINC",
    "RET.REL.NODEC",
    "BRX",
    "LDL",
    "STL",
    "LDS",
    "STS",
    "SHFL.IDX",
    "LOP3.LUT",
    "PLOP3.LUT",
    "R2UR",
    "WARPSYNC.COLLECTIVE",
]
PIECES = [
    "R1",
    "R2",
    "R255",
    "RZ",
    "UR4",
    "URZ",
    "P0",
    "!P1",
    "PT",
    "UP0",
    "0x10",
    "-0x20",
    "0x0",
    "0xffffffff",
    "c[0x0][0x210]",
    "c[0x0][R2+0x210]",
    "B0",
    "desc[UR4][R2.64]",
]
PIECES += [
    "[R2]",
    "[UR4]",
    "[R2.64+-0x8]",
    "1.5",
    "-INF ",
    "SR_TID.X",
    "",
    "`(.L_x)",
    "][",
    "c[0x0]",
    "R2.H0_H0",
    "desc[",
    "{1,2}",
    "gdesc[UR4]",
    "999999999999999999999",
]


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "@P0 ", "@!P1 ", "@UP0 "]), st.sampled_from(OPCODES), st.lists(st.sampled_from(PIECES), max_size=6)),
        max_size=25,
    )
)
def test_scrambled_sass_never_crashes(rows):
    """Any opcodes with any operands: a complete or an incomplete result, never an exception, and accesses never vanish silently."""
    kernel = handmade([f"{pred}{opcode} {','.join(operands)}" for pred, opcode, operands in rows])
    result = audit_kernel(kernel, ROLES, None, LaunchFacts(pdl=True))
    assert result.instructions == len(rows)
    build_graph(kernel)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="RUPZ0123456789[]+-.,xc!~|{}() desc", max_size=60))
def test_operand_parser_takes_anything(text):
    parse_operands(text)


def test_mutated_ptx_never_crashes():
    chance = random.Random(3)
    lines = Path(__file__).with_name("engine_kernels.ptx").read_text().splitlines()
    parsed = 0
    for _ in range(120):
        mutant = list(lines)
        for _ in range(4):
            at = chance.randrange(len(mutant))
            line = mutant[at]
            if not line:
                continue
            cut = chance.randrange(len(line))
            mutant[at] = chance.choice([line[:cut], line[cut:], line[:cut] + chance.choice("{}[];,@%.") + line[cut:], ""])
        try:
            kernels = parse_ptx("\n".join(mutant))
        except PtxError:
            continue
        for kernel in kernels[:6]:
            lowered = lower_ptx(kernel)
            audit_kernel(lowered.kernel, ROLES, None, LaunchFacts(pdl=True))
            parsed += 1
    assert parsed > 20


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[1,2]", '[{},[{"function-name":1}]]', '[{},[{"function-name":"k","start":0,"sass-instructions":[{}]}]]', "[[[["],
)
def test_foreign_disassembler_output_is_an_error_or_nothing(text):
    with contextlib.suppress(BinaryError):
        assert parse_json(text, "x") == []


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_attributes_of_any_bytes(body):
    with contextlib.suppress(BinaryError):
        for attribute, payload in read_attributes(body):
            assert 0 <= attribute < 256
            assert len(payload) <= len(body)


def test_architecture_that_nvdisasm_does_not_know():
    with pytest.raises(BinaryError, match="architecture"):
        disassemble_raw([b"\0" * 16], "sm_999")
    with pytest.raises(BinaryError, match="architecture"):
        disassemble_raw([b"\0" * 16], "gfx942")


def test_engine_digest_covers_what_an_answer_passes_through_and_nothing_else():
    modules = set(pool.engine_modules())
    assert {"audit", "binaries", "disasm", "flow", "lift", "ptx_lower", "rules", "rules_sync", "units", "values"} <= modules
    assert not modules & {"cli", "text", "sarif", "checks", "corpus_run", "lint", "observe", "benchmark", "driver"}
