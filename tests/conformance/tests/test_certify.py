"""A whole run on `cpu_reference`, and what can be done with its report."""

import datetime
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import attrs
import pytest

from halogen_conformance.case import Measurement, Result, Status
from halogen_conformance.catalogue import must_pass, suite_cases
from halogen_conformance.certify import accounted
from halogen_conformance.commands import repro
from halogen_conformance.folder import differences, objections, read_report, write_folder
from halogen_conformance.verdict import certified_level, shortcomings
from halogen_conformance.waivers import Waiver, read_waivers
from halogen_core.errors import ConfigError

TODAY = datetime.date(2030, 1, 1)


@pytest.fixture(scope="module")
def certified(site, tmp_path_factory):
    """The folder of a run to level 2, and the finished process."""
    out = tmp_path_factory.mktemp("report")
    arguments = ("--backend", "cpu_reference", "--threads", 1, "--level", 2, "--out", out)
    return out, site.conform(*arguments, "--jobs", 2)


def test_cpu_reference_is_certified_and_the_report_verifies(certified):
    out, done = certified
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert objections(out) == []
    report = read_report(out)
    assert report["level_certified"] == 2
    assert report["placement"]["native"] > 500
    assert not report["troubles"]
    assert json.loads((out / "badge.json").read_text())["message"] == "L2, native 13/13"


def test_junit_counts_what_the_report_counts(certified):
    report = read_report(certified[0])
    root = ET.parse(certified[0] / "junit.xml").getroot()
    assert sum(int(s.get("tests")) for s in root) == len(report["results"])
    assert sum(int(s.get("failures")) + int(s.get("errors")) for s in root) == 0


def test_the_html_report_loads_nothing_and_names_every_op(certified):
    text = (certified[0] / "report.html").read_text()
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "").partition("<h2>")[0]
    seen = []
    parser = HTMLParser()
    parser.handle_data = seen.append
    parser.feed(text)
    for op in ("attention", "qkv_rope_store", "sample", "moe"):
        assert op in seen


def tampered(certified, tmp_path, change):
    report = json.loads((certified[0] / "report.json").read_text())
    change(report)
    write_folder(tmp_path, report)
    return objections(tmp_path)


def test_verify_finds_a_case_left_out(certified, tmp_path):
    def change(report):
        gone = report["results"].pop()
        report["counts"]["L2"][gone["status"]] -= 1

    found = tampered(certified, tmp_path, change)
    assert any("left out" in line for line in found)
    assert any("claims L2" in line for line in found)


def test_verify_finds_a_failure_painted_over(certified, tmp_path):
    def change(report):
        measured = next(r for r in report["results"] if r["measurements"])
        measured["measurements"][0]["error"] = 99.0

    assert any("passes with error" in line for line in tampered(certified, tmp_path, change))


def test_verify_finds_other_lists_selections_and_old_waivers(certified, tmp_path):
    def change(report):
        report["suite"]["mustpass_sha256"] = "0" * 64
        report["complete"] = False
        report["waivers"] = [
            {"id": "L1/*", "reason": "r", "link": "https://x", "expires": "2020-01-01"}
        ]

    found = " ".join(tampered(certified, tmp_path, change))
    assert "made by suite" in found
    assert "selection" in found
    assert "expired" in found


def test_a_folder_that_is_no_report_is_an_error(tmp_path):
    (tmp_path / "report.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigError) as caught:
        read_report(tmp_path)
    assert caught.value.code == "HRT-6005"


def test_diff_tells_regressions_repairs_and_worse_numbers(certified):
    old, new = read_report(certified[0]), read_report(certified[0])
    assert not any(differences(old, new).values())
    results = {r["id"]: r for r in new["results"]}
    results["L1/add/T1-H100@f32"]["status"] = "CRASH"
    linear = results["L1/linear/bias@f32"]["measurements"][0]
    linear["ratio"] = 0.9
    {r["id"]: r for r in old["results"]}["L1/add/T17-H100@f32"]["status"] = "FAIL"
    changes = differences(old, new)
    assert [line.split(":")[0] for line in changes["regressions"]] == ["L1/add/T1-H100@f32"]
    assert [line.split(":")[0] for line in changes["repairs"]] == ["L1/add/T17-H100@f32"]
    assert [line.split(":")[0] for line in changes["worse"]] == ["L1/linear/bias@f32"]


def test_repro_runs_one_case_and_shows_its_numbers(site):
    done = site.conform("repro", "--backend", "cpu_reference", "L1/attention/window16@f32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ratio" in done.stdout
    assert "window" in done.stdout


def test_a_case_that_is_not_there_cannot_be_run_again():
    with pytest.raises(ConfigError) as caught:
        repro(case_id="L9/nothing", backend="cpu_reference", device=None, threads=1, options=())
    assert caught.value.code == "HRT-6006"


def test_pytest_runs_the_suite_of_an_installed_distribution(site, tmp_path):
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "halogen_conformance"]
    chosen = ["--backend", "cpu_reference", "--level", 1, "--conform-only", "L1/add/*@f32"]
    done = site.run(*command, *chosen, "--rootdir", tmp_path)
    assert "5 passed" in done.stdout, done.stdout[-2000:] + done.stderr[-1000:]
    without = site.run(*command, "--rootdir", tmp_path)
    assert "no tests ran" in without.stdout


# ---------------------------------------------------------------- accounting


def good():
    return {i: Status.PASS for level in (0, 1) for i in must_pass(level)}


def test_nothing_missing_nothing_failing_certifies():
    assert certified_level(good(), {}) == 1


@pytest.mark.parametrize(
    "status", [Status.FAIL, Status.CRASH, Status.TIMEOUT, Status.XPASS, Status.NOT_RUN]
)
def test_any_bad_status_ends_the_certificate(status):
    assert certified_level(good() | {"L1/linear/bias@f32": status}, {}) == 0


def test_a_missing_case_ends_the_certificate():
    statuses = good()
    del statuses["L0/discovery/quick"]
    assert certified_level(statuses, {}) == -1
    assert "NOT_RUN" in shortcomings(0, statuses, {})[0]


def test_required_cases_may_be_filtered_but_not_unsupported():
    case = "L1/linear/Q5_1-T1-K256@f32"
    assert certified_level(good() | {case: Status.FILTERED}, {}) == 1
    assert certified_level(good() | {case: Status.UNSUPPORTED}, {}) == 0
    assert certified_level(good() | {"L1/moe/k-above-experts@f32": Status.UNSUPPORTED}, {}) == 1


def test_filtering_everything_certifies_nothing():
    filtered = dict.fromkeys(must_pass(1), Status.FILTERED)
    assert any("no dtype" in line for line in shortcomings(1, filtered, {}))


def result(status, case="L1/add/T1-H100@f32"):
    return Result(id=case, status=status, reason="because")


def test_declared_gaps_must_really_fail():
    gaps = {"L1/add/T1-H100@f32": "no adder"}
    assert accounted(result(Status.FAIL), gaps, ()).status is Status.XFAIL
    assert accounted(result(Status.PASS), gaps, ()).status is Status.XPASS
    assert accounted(result(Status.FILTERED), gaps, ()).status is Status.FILTERED


def test_waivers_turn_failures_and_only_failures():
    waiver = Waiver(id="L1/add/*", reason="r", link="https://x/1", expires=TODAY)
    waived = accounted(result(Status.CRASH), {}, (waiver,))
    assert waived.status is Status.WAIVED
    assert "https://x/1" in waived.reason
    assert accounted(result(Status.PASS), {}, (waiver,)).status is Status.PASS
    assert accounted(result(Status.FAIL, "L1/mlp/x"), {}, (waiver,)).status is Status.FAIL


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('id="a"\nreason="r"\nlink="https://x"', "needs exactly"),
        ('id="a"\nreason=""\nlink="https://x"\nexpires=2030-02-01', "needs exactly"),
        ('id="a"\nreason="r"\nlink="x"\nexpires=2030-02-01', "URL"),
        ('id="a"\nreason="r"\nlink="https://x"\nexpires=2029-12-31', "expired"),
        ('id="a"\nreason="r"\nlink="https://x"\nexpires=2031-06-01', "more than a year"),
        ('id="a"\nreason="r"\nlink="https://x"\nexpires="2030-02-01"', "TOML date"),
    ],
)
def test_waivers_need_a_reason_a_link_and_an_expiry(tmp_path, text, complaint):
    path = tmp_path / "waivers.toml"
    path.write_text(f"[[waiver]]\n{text}\n")
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_waivers(path, TODAY)
    assert caught.value.code == "HRT-6002"


def test_a_measurement_without_room_fails_only_when_there_is_an_error():
    exact = Measurement(what="x", error=0.0, reference=0.0, allowed=0.0)
    assert exact.ratio == 0
    assert attrs.evolve(exact, error=1e-9).ratio > 1


def test_every_level_has_cases():
    assert {case.level for case in suite_cases()} == {0, 1, 2, 3, 4, 5}
