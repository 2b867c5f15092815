"""JUnit XML of a verdict: one suite a claim, one case a finding; a claim without findings is one skipped or failed case."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from reports.view import View, format_value
from validation.core.types import Finding, Holds, Status

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _clean(text: object) -> str:
    return _NOT_XML.sub("\ufffd", str(text))


def _message(finding: Finding) -> str:
    if finding.limit is None:
        return finding.note or "no limit was applied"
    value = format_value(finding.value, finding.limit.unit)
    bound = format_value(finding.limit.bound, finding.limit.unit)
    return f"{finding.limit.measurement} = {value}, limit {finding.limit.op} {bound}; evidence {finding.evidence or 'none'}. {finding.note}"


def to_xml(view: View) -> bytes:
    root = ET.Element("testsuites", name=view.run.id)
    for claim, result in view.claims:
        suite = ET.SubElement(root, "testsuite", name=_clean(claim.id))
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        if not result.findings:
            case = ET.SubElement(suite, "testcase", classname=_clean(claim.id), name="evidence")
            counts["tests"] = 1
            kind = "failure" if result.required else "skipped"
            counts["failures" if result.required else "skipped"] = 1
            if result.status != Status.PASS:
                ET.SubElement(case, kind, message=_clean(result.note or claim.proven_by))
        for finding in result.findings:
            name = f"{finding.case} {finding.limit.measurement}" if finding.limit else finding.case
            case = ET.SubElement(suite, "testcase", classname=_clean(finding.check), name=_clean(name))
            counts["tests"] += 1
            if finding.holds == Holds.VIOLATED:
                counts["failures"] += 1
                ET.SubElement(case, "failure", message=_clean(_message(finding)))
            elif finding.holds == Holds.NO_EVIDENCE:
                kind = "error" if result.required else "skipped"
                counts["errors" if result.required else "skipped"] += 1
                ET.SubElement(case, kind, message=_clean(_message(finding)))
        suite.attrib.update({key: str(number) for key, number in counts.items()})
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)
