"""Where settings come from, who wins, and what is refused."""

import itertools
from types import SimpleNamespace

import attrs
import pytest

from halogen_core.cli.assembly import engine_options
from halogen_core.config import SECTIONS, SETTINGS, resolve
from halogen_core.config.values import size
from halogen_core.engine.options import EngineOptions
from halogen_core.errors import ConfigError
from halogen_core.spi import MemoryRequest

TOML = "[server]\nport = 1003\n"
YAML = "server:\n  port: 1003\n"
NO_TOKENIZER = SimpleNamespace(end_token_ids=())
FLAT = "port = 1003\n"


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("given", list(itertools.product([True, False], repeat=3)))
def test_flag_beats_environment_beats_file_beats_default(tmp_path, given):
    flag, variable, file = given
    path = written(tmp_path, "halogen.toml", TOML)
    config = resolve(
        {"port": 1001 if flag else None},
        file=path if file else None,
        environment={"HALOGEN_PORT": "1002"} if variable else {},
    )
    expected = 1001 if flag else 1002 if variable else 1003 if file else 8000
    assert config.server.port == expected
    source = config.sources["port"]
    words = (
        "flag --port" if flag else "HALOGEN_PORT" if variable else str(path) if file else "default"
    )
    assert words in source


def test_toml_yaml_and_flat_keys_mean_the_same(tmp_path):
    files = [
        written(tmp_path, n, t) for n, t in (("a.toml", TOML), ("b.yaml", YAML), ("c.toml", FLAT))
    ]
    configs = [resolve(file=f, environment={}) for f in files]
    assert {c.server.port for c in configs} == {1003}
    assert len({repr(attrs.evolve(c, sources={})) for c in configs}) == 1


def test_the_file_is_found_by_variable_then_in_the_users_folder(tmp_path):
    path = written(tmp_path, "x.toml", TOML)
    assert resolve(environment={"HALOGEN_CONFIG": str(path)}).server.port == 1003
    folder = tmp_path / "halogen"
    folder.mkdir()
    written(folder, "halogen.yaml", YAML)
    assert resolve(environment={"XDG_CONFIG_HOME": str(tmp_path)}).server.port == 1003


def test_a_config_is_frozen_and_shows_no_secret():
    config = resolve(environment={"HALOGEN_API_KEY": "very-secret"})
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.server.port = 1
    assert config.server.api_key == ("very-secret",)
    assert "very-secret" not in repr(config) + str(config.describe())


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("[server]\nprot = 1", "HRT-1001", ["prot", "`port`"]),
        ("max_batch_size = 4", "HRT-1005", ["max_batch_size", "max_batch"]),
        ("[engine]\nmax_batch = 'many'", "HRT-1002", ["many", "whole number"]),
        ("port = 70000", "HRT-1002", ["70000", "65535"]),
        ("port = true", "HRT-1002", ["True"]),
        ("kv_cache_ratio = 1.5", "HRT-1002", ["1.5", "at most 1"]),
        ("kv_cache_ratio = nan", "HRT-1002", ["nan"]),
        ("kv_dtype = 'f8'", "HRT-1002", ["f8", "q8_0"]),
        ("pool_size = '4X'", "HRT-1002", ["4X", "GiB"]),
        ("pool_size = '4G'\nkv_cache_ratio = 0.5", "HRT-1003", ["pool_size", "kv_cache_ratio"]),
        ("kv_cache_pool_gb = 4.0\ngpu_memory_utilization = 0.5", "HRT-1003", ["kv_cache_pool_gb"]),
        ("kv_cache_pool_gb = 4.0\npool_size = '4G'", "HRT-1003", ["kv_cache_pool_gb"]),
        ("kv_cache_ratio = 0.5\ngpu_memory_utilization = 0.5", "HRT-1003", ["`gpu_memory"]),
        ("gpu_memory_utilization = 0", "HRT-1002", ["at least 0.01"]),
        ("min_batch_window_ms = 9\nmax_batch_window_ms = 3", "HRT-1003", ["min_batch_window_ms"]),
        ("max_prompt_len = 9\nmax_context = 3", "HRT-1003", ["max_prompt_len"]),
        ("port = 1\nunix_socket = '/tmp/x'", "HRT-1003", ["unix_socket"]),
        ("disk_pool_dir = '/x'", "HRT-1003", ["disk_pool_dir", "disk_pool_size", "x.toml"]),
        ("port = ", "HRT-1004", ["x.toml"]),
    ],
)
def test_bad_files_are_refused_with_code_and_reason(tmp_path, text, code, words):
    with pytest.raises(ConfigError) as caught:
        resolve(file=written(tmp_path, "x.toml", text), environment={})
    assert caught.value.code == code
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [", "\x00"])
def test_a_yaml_file_must_be_a_table(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        resolve(file=written(tmp_path, "x.yaml", text), environment={})
    assert caught.value.code == "HRT-1004"


def test_missing_file_and_misspelt_variable():
    with pytest.raises(ConfigError, match=r"HRT-1004.*cannot be opened: No such file"):
        resolve(environment={"HALOGEN_CONFIG": "/nowhere.toml"})
    with pytest.raises(ConfigError, match="HALOGEN_PORT"):
        resolve(environment={"HALOGEN_PROT": "1"})
    resolve(environment={"HALOGEN_SOME_VENDOR_SWITCH": "1"})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (None, 0.85)),
        ({"pool_size": "4G"}, (4 << 30, 0.85)),
        ({"kv_cache_pool_gb": "1.5"}, (3 << 29, 0.85)),
        ({"kv_cache_ratio": "0.5"}, (None, 0.5)),
        ({"gpu_memory_utilization": "0.6"}, (None, 0.6)),
    ],
)
def test_four_names_of_the_pool_size_reach_the_engine(tmp_path, flags, expected):
    options = engine_options(resolve(flags, environment={}), tmp_path / "x.gguf", NO_TOKENIZER)
    assert (options.kv_bytes, options.kv_ratio) == expected


def test_the_default_share_is_the_same_everywhere(tmp_path):
    told = engine_options(resolve(environment={}), tmp_path / "x.gguf", NO_TOKENIZER)
    untold = EngineOptions(model_path="", model_id="", end_token_ids=[])
    assert told.kv_ratio == untold.kv_ratio == attrs.fields(MemoryRequest).kv_ratio.default == 0.85


SCHEDULING = {
    "queue_timeout_s": 1.5,
    "prefill_timeout_ms": 40.0,
    "fail_on_prefill_timeout": True,
    "long_lane_share": 0.25,
    "max_preemptions": 7,
}
CACHING = {"host_pool_size": 1 << 20, "disk_pool_size": 2 << 20, "pin_quota": 0.25}


def test_settings_of_scheduler_and_cache_reach_the_engine(tmp_path):
    flags = {name: str(value) for name, value in (SCHEDULING | CACHING).items()}
    config = resolve({**flags, "disk_pool_dir": str(tmp_path)}, environment={})
    options = engine_options(config, tmp_path / "x.gguf", NO_TOKENIZER)
    assert {name: getattr(options, name) for name in SCHEDULING} == SCHEDULING
    assert (options.host_kv_bytes, options.disk_kv_bytes) == (1 << 20, 2 << 20)
    assert (options.disk_kv_dir, options.pin_quota) == (str(tmp_path), 0.25)
    config = resolve({"cache_dir": "/somewhere"}, environment={})
    options = engine_options(config, tmp_path / "x.gguf", NO_TOKENIZER)
    assert options.disk_kv_dir == "/somewhere"


def test_a_conflict_across_sources_names_both(tmp_path):
    path = written(tmp_path, "x.toml", "kv_cache_ratio = 0.5")
    with pytest.raises(ConfigError) as caught:
        resolve({"pool_size": "1G"}, file=path, environment={})
    assert "--pool-size" in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("96G", 96 << 30),
        ("96GiB", 96 << 30),
        ("1.5 MiB", 3 << 19),
        ("2GB", 2 * 10**9),
        ("512", 512),
        (512, 512),
        ("1k", 1024),
    ],
)
def test_sizes(text, expected):
    assert size(text) == expected


def test_lists_and_pairs():
    config = resolve(
        {"backend_option": ("a=1", "b=2"), "no_plugin": ("x,y", "z")},
        environment={"HALOGEN_PLUGINS": "one, two"},
    )
    assert config.engine.backend_option == {"a": "1", "b": "2"}
    assert config.engine.no_plugin == ("x", "y", "z")
    assert config.engine.plugins == ("one", "two")


@pytest.mark.parametrize("flag", [("buckets=1,2,4", "dtype=f16"), "buckets=1,2,4,dtype=f16"])
def test_a_pairs_value_may_hold_commas(tmp_path, flag):
    """As the options of GPU backends are written: `--backend-option buckets=1,2,4`."""
    wanted = {"buckets": "1,2,4", "dtype": "f16"}
    assert resolve({"backend_option": flag}, environment={}).engine.backend_option == wanted
    table = written(
        tmp_path, "o.toml", "[engine.backend_option]\nbuckets = [1, 2, 4]\ndtype = 'f16'\n"
    )
    assert resolve(file=table, environment={}).engine.backend_option == wanted


@pytest.mark.parametrize("flag", ["buckets", "1,buckets=2", "=3", 7])
def test_what_is_no_pair_is_refused(flag):
    with pytest.raises(ConfigError) as caught:
        resolve({"backend_option": flag}, environment={})
    assert caught.value.code == "HRT-1002"


def test_setting_names_are_unique_and_documented():
    names = [f.name for fields in SECTIONS.values() for f in attrs.fields(fields)]
    assert len(names) == len(set(names)) == len(SETTINGS)
    assert not {a for s in SETTINGS.values() for a in s.aliases} & set(names)
    assert all(s.doc for s in SETTINGS.values())
