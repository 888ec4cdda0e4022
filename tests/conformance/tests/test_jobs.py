"""Several jobs: the same report, nobody's crash or hang hurts others, and what needs quiet has it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from halogen_conformance.catalogue import suite_cases
from halogen_conformance.folder import differences, read_report
from halogen_conformance.shares import Shares, usual_s

PLUGIN = """
from halogen_core.spi import BackendSpec, ConformanceExtras, DeviceInfo, ProbeResult, hookimpl

@hookimpl
def halogen_backends():
    return [BackendSpec(name="many", factory="many.backend:create")]

@hookimpl
def halogen_probe(name, context):
    if name != "many":
        return None
    return ProbeResult(score=1, devices=(DeviceInfo(id="many:0", name="x"),))

@hookimpl
def halogen_conformance():
    return [ConformanceExtras(cases=["many.cases:cases"], declared_gaps={"L1/many/gap": "known"})]
"""
BACKEND = """
from halogen_core.spi import TorchBackend

def create(options):
    return TorchBackend(options, name="many")
"""
CASES = """
import os
import signal
import time
from pathlib import Path

from halogen_conformance.case import Case, Failure

SECONDS = float(os.environ.get("MANY_SECONDS", "0.4"))

def noted(bench, seconds=SECONDS):
    notes = Path(os.environ["MANY_NOTES"])
    began = time.time()
    (notes / f"{os.getpid()}-{time.time_ns()}").write_text(f"{bench.case.id} {began} {began}")
    time.sleep(seconds)
    (notes / f"{os.getpid()}-{time.time_ns()}").write_text(f"{bench.case.id} {began} {time.time()}")

def crash(bench):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def hang(bench):
    time.sleep(1000)

def gap(bench):
    raise Failure("as declared")

def cases():
    runs = {"L1/many/crash": crash, "L1/many/hang": hang, "L1/many/gap": gap}
    runs |= {f"L1/many/beside-{i}": noted for i in range(5)}
    runs |= {"L3/many/beside": noted, "L2/many/alone": noted, "L5/many/alone": noted}
    for case_id, run in runs.items():
        level = {"alone": True} if case_id == "L2/many/alone" else {}
        limit = 1.0 if run is hang else 60.0
        yield Case(
            id=case_id, topic="many", why="a test", run=run, device=False, timeout_s=limit, **level
        )
"""
CHOSEN = ("L0/manifest/valid", "L?/many/*", "L2/placement/complete")
GOOD = ("L0/manifest/valid", "L?/many/beside*")


@pytest.fixture(scope="module")
def many(site):
    """A plugin whose own cases crash, hang and note when they ran."""
    files = {
        "__init__.py": "",
        "halogen-backend.toml": 'manifest = 1\nname = "many"\nspi = ">=1.0,<2"\n',
        "plugin.py": PLUGIN,
        "backend.py": BACKEND,
        "cases.py": CASES,
    }
    site.add("many", files, entry="many")
    return site


def arguments(out, jobs, *more, only=CHOSEN):
    chosen = [word for pattern in only for word in ("--only", pattern)]
    return ["--backend", "many", "--level", 5, "--out", out, "--jobs", jobs, *chosen, *more]


def spans(notes):
    """Case id -> when it ran."""
    found = {}
    for note in sorted(notes.iterdir(), key=lambda p: p.name.partition("-")[2]):
        case_id, began, ended = note.read_text().split()
        found[case_id] = (float(began), float(ended))
    return found


@pytest.fixture(scope="module")
def runs(many, tmp_path_factory):
    """The same cases with one job and with three: (report, when each case ran)."""

    def run(jobs):
        folder = tmp_path_factory.mktemp(f"jobs{jobs}")
        (folder / "notes").mkdir()
        done = many.conform(*arguments(folder / "out", jobs), MANY_NOTES=str(folder / "notes"))
        assert done.returncode == 1, done.stdout + done.stderr
        return read_report(folder / "out"), spans(folder / "notes")

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((1, 3), pool.map(run, (1, 3)), strict=True))


def statuses(report):
    return {r["id"]: r["status"] for r in report["results"]}


def test_the_report_is_the_same_with_any_number_of_jobs(runs):
    one, three = runs[1][0], runs[3][0]
    assert (one["jobs"], three["jobs"]) == (1, 3)
    assert list(statuses(one).items()) == list(statuses(three).items())
    assert not any(differences(one, three).values())
    same = ("counts", "shortcomings", "level_certified", "declared_gaps", "complete", "placement")
    assert {k: one[k] for k in same} == {k: three[k] for k in same}
    assert len(one["opened"]) == len(three["opened"]) == 1


def test_a_crash_and_a_hang_end_only_their_own_cases(runs):
    for report, _ in runs.values():
        found = {r["id"]: r for r in report["results"]}
        bad = {i: r["status"] for i, r in found.items() if r["status"] not in ("PASS", "XFAIL")}
        assert bad == {"L1/many/crash": "CRASH", "L1/many/hang": "TIMEOUT"}
        assert found["L1/many/gap"]["status"] == "XFAIL"
        assert "last words" in found["L1/many/crash"]["output"]
        assert "no answer within 1 s" in found["L1/many/hang"]["reason"]
        assert "in hang" in found["L1/many/hang"]["output"], "a hang tells where it is"


def test_cases_run_beside_each_other_but_never_beside_one_that_must_be_alone(runs):
    when = runs[3][1]
    alone = {i for i in when if i.endswith("/alone")}
    assert alone == {"L2/many/alone", "L5/many/alone"}
    overlapping = {
        frozenset((a, b))
        for a, (began, ended) in when.items()
        for b, (other_began, other_ended) in when.items()
        if a != b and began < other_ended and other_began < ended
    }
    assert overlapping, "three jobs never did anything at the same time"
    assert not any(pair & alone for pair in overlapping)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_reports_leaves_nobody_and_goes_on(many, tmp_path, number):
    notes, out = tmp_path / "notes", tmp_path / "out"
    notes.mkdir()
    path = os.pathsep.join([str(many.folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "MANY_NOTES": str(notes)}
    code = "from halogen_core.cli.main import main; main()"
    command = [sys.executable, "-c", code, "conform", *map(str, arguments(out, 2, only=GOOD))]
    with subprocess.Popen(
        command, env={**environment, "MANY_SECONDS": "1.5"}, stdout=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: '"L1/many/beside' in journal(out))
        process.send_signal(number)
        assert process.wait(30) == 130
    report = read_report(out)
    found = statuses(report)
    assert "NOT_RUN" in found.values()
    ended = {i for i, status in found.items() if status != "NOT_RUN"}
    assert "L0/manifest/valid" in ended
    assert any("interrupted" in line for line in report["troubles"])
    wait_for(lambda: not any(map(alive, workers(notes))))

    backend = many.folder / "many/backend.py"
    backend.write_text(f"{BACKEND}# edited meanwhile\n")
    done = many.conform(*arguments(out, 2, "--resume", only=GOOD), MANY_NOTES=str(notes))
    assert done.returncode == 2
    assert "HRT-6010" in done.stderr
    backend.write_text(BACKEND)

    before = spans(notes)
    for note in notes.iterdir():
        note.unlink()
    done = many.conform(*arguments(out, 2, "--resume", only=GOOD), MANY_NOTES=str(notes))
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(out)
    assert report["resumed"] == len(ended)
    assert set(statuses(report).values()) == {"PASS"}
    assert not ended & spans(notes).keys(), "what had ended ran again"
    assert before.keys() | spans(notes).keys() > ended & before.keys()
    assert journal(out) == "", "a run that is whole leaves nothing to go on with"


def wait_for(condition, limit_s=60):
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def journal(out):
    path = out / "journal.jsonl"
    return path.read_text() if path.exists() else ""


def workers(notes):
    return {int(note.name.partition("-")[0]) for note in notes.iterdir()}


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---------------------------------------------------------------- shares


IDS = [case.id for case in suite_cases() if not case.alone]


@pytest.mark.parametrize("workers", [1, 2, 14, 64])
def test_every_case_is_taken_once_whoever_asks(workers):
    shares = Shares(IDS, workers)
    taken, asked = [], 0
    while (case_id := shares.take(asked * asked % workers)) is not None:
        taken.append(case_id)
        asked += 1
    assert sorted(taken) == sorted(IDS)
    assert all(shares.take(n) is None for n in range(workers))


def test_one_worker_keeps_the_order():
    shares = Shares(IDS, 1)
    assert [shares.take(0) for _ in IDS] == IDS


def test_stealing_lets_a_slow_worker_hold_up_nobody():
    """Simulated: one of four workers is ten times slower; the whole takes little longer."""
    shares, clock, ended = Shares(IDS, 4), [0.0] * 4, 0
    while True:
        worker = min(range(4), key=clock.__getitem__)
        case_id = shares.take(worker)
        if case_id is None:
            break
        clock[worker] += usual_s(case_id) * (10 if worker == 3 else 1)
        ended += 1
    assert ended == len(IDS)
    ideal = sum(map(usual_s, IDS)) / 3.1
    longest = max(map(usual_s, IDS)) * 10
    assert max(clock) <= ideal + longest
    assert sorted(clock)[2] <= ideal * 1.3


def test_neighbours_stay_together():
    """They need the same kernels, which each process compiles for itself."""
    shares, order = Shares(IDS, 14), sorted(IDS, key=usual_s, reverse=True)
    for worker in range(14):
        # as many as are surely its own
        mine = [shares.take(worker) for _ in range(len(shares._shares[worker]))]
        assert mine == order[: len(mine)]
        order = order[len(mine) :]
    assert not order


def test_a_level_that_is_given_up_leaves_the_others():
    shares = Shares(IDS, 3)
    dropped = list(shares.drop("1"))
    assert dropped == [i for i in sorted(IDS, key=usual_s, reverse=True) if i[1] == "1"]
    left = list(iter(lambda: shares.take(0), None))
    assert sorted(left) == sorted(i for i in IDS if i[1] != "1")
