"""Tokenizers: ids equal llama.cpp's, bytes equal the text, and streams equal the whole."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty_texts import NASTY
from tiny_files import TOKENS, write_hf, write_llama

from halogen_core.engine.protocol import TokenOutput
from halogen_core.engine.text import TextStream
from halogen_core.errors import ModelError
from halogen_core.loader import load_tokenizer, open_model
from halogen_core.loader.gguf_tokenizer import gguf_tokenizer
from halogen_core.loader.pretokenizers import PRE_TOKENIZERS

REFERENCE = json.loads((Path(__file__).parents[2] / "data/reference.json").read_text("utf-8"))
RUNS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1", "gemma3": "gemma-3-270m-q4_k_m"}


@pytest.fixture(scope="module")
def paths(smollm2_path, gemma3_path):
    return {"smollm2": smollm2_path, "gemma3": gemma3_path}


@pytest.fixture(scope="module")
def real(smollm2, gemma3):
    return {"smollm2": smollm2, "gemma3": gemma3}


@pytest.mark.parametrize("name", RUNS)
def test_reference_prompts_have_the_reference_ids(real, name):
    runs = REFERENCE["runs"][RUNS[name]]
    assert len(runs) == 5
    for run in runs.values():
        assert real[name].encode_prompt(run["prompt"]) == run["prompt_ids"]
        assert real[name].encode(run["prompt"], special=True) == run["prompt_ids_no_special"]
        text = real[name].decode(run["greedy_ids"])
        assert text.rstrip("\ufffd") == run["greedy_text"].rstrip("\ufffd")


@pytest.mark.parametrize("name", RUNS)
def test_nasty_texts_have_the_ids_of_llama_cpp(real, paths, llama_cpp, name):
    """Plain text; a control token spelt in it is text for us, and for llama.cpp but in Gemma."""
    client, wrong = llama_cpp(paths[name]), []
    for text in NASTY:
        if name == "gemma3" and list(real[name].split_control(text)) not in ([text], []):
            continue  # llama.cpp's SentencePiece merges `<eos>` into the control token
        answer = client.post("/tokenize", json={"content": text, "parse_special": False})
        if real[name].encode(text) != answer.json()["tokens"]:
            wrong.append(text)
    assert wrong == []


@pytest.mark.parametrize("name", RUNS)
def test_control_tokens_count_only_when_asked(real, paths, llama_cpp, name):
    tokenizer = real[name]
    for text in ("<|im_start|>user\nhi<|im_end|>", "<bos>a<end_of_turn><eos>", "<|endoftext|>x"):
        assert not any(map(tokenizer.is_control, tokenizer.encode(text)))
        body = {"content": text, "parse_special": True}
        theirs = llama_cpp(paths[name]).post("/tokenize", json=body).json()["tokens"]
        assert tokenizer.encode(text, special=True) == theirs


def spelt(text, tokenizer):
    """What can come back: SentencePiece writes spaces as `▁` and so cannot tell the two apart."""
    return text if tokenizer.byte_level else text.replace("▁", " ")


@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_the_text(real, name):
    tokenizer = real[name]
    table = tokenizer.vocabulary_bytes()
    assert len(table) == tokenizer.vocab_size
    for text in NASTY:
        ids = tokenizer.encode(text)
        due = spelt(text, tokenizer)
        assert b"".join(table[i] for i in ids) == due.encode()
        assert tokenizer.decode(ids) == due


@pytest.mark.parametrize("name", RUNS)
def test_streams_equal_the_whole_text_cut_at_any_token(real, name):
    tokenizer = real[name]
    for text in NASTY:
        ids, stream, shown = tokenizer.encode(text), TextStream(tokenizer), ""
        for at, token in enumerate(ids):
            reason = "length" if at == len(ids) - 1 else None
            output = TokenOutput(request_id="r", token_ids=[token], finish_reason=reason)
            delta = stream.push(output).text
            shown += delta
            if "\ufffd" not in text:
                assert "\ufffd" not in delta
        assert shown == spelt(text, tokenizer)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_streams_of_random_tokens_equal_the_whole(real, data):
    """Any tokens, cut anywhere: U+FFFD only where the bytes are no UTF-8."""
    tokenizer = real[data.draw(st.sampled_from(sorted(RUNS)))]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 9), min_size=1, max_size=30))
    stream = TextStream(tokenizer)
    shown = ""
    for at, token in enumerate(ids):
        reason = "length" if at == len(ids) - 1 else None
        shown += stream.push(
            TokenOutput(request_id="r", token_ids=[token], finish_reason=reason)
        ).text
    assert shown == tokenizer.decode(ids)


def test_what_ends_an_answer(real):
    named = {n: {t.pieces[i] for i in t.end_token_ids} for n, t in real.items()}
    assert named == {
        "smollm2": {"<|im_end|>", "<|endoftext|>"},
        "gemma3": {"<eos>", "<end_of_turn>", "</s>"},
    }


def test_bos_is_added_once_and_only_where_wanted(real):
    smollm2, gemma3 = real["smollm2"], real["gemma3"]
    assert smollm2.encode_prompt("hi") == smollm2.encode("hi")
    assert gemma3.encode_prompt("hi") == [2, *gemma3.encode("hi")]
    assert gemma3.encode_prompt("<bos>hi") == [2, *gemma3.encode("hi")]
    assert gemma3.encode_prompt("") == [2]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83c\udf55 pair", "x\ud800\ud800"])
def test_half_surrogates_become_replacement_characters(real, text):
    """JSON may spell them; UTF-8 has no bytes for them."""
    due = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for tokenizer in real.values():
        assert tokenizer.decode(tokenizer.encode(text)) == due


def test_ids_beyond_the_vocabulary_are_silent(real):
    for tokenizer in real.values():
        for token in (-1, tokenizer.vocab_size, 10**9):
            assert tokenizer.token_bytes(token) == b""
            assert tokenizer.is_control(token)


# ---------------------------------------------------------------- metadata


def metadata(**changes):
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": list(TOKENS), "merges": ["a b"]}
    return {f"tokenizer.ggml.{k}": v for k, v in (values | changes).items() if v is not None}


REFUSED = {
    "no model": ({"model": None}, "HRT-2103"),
    "bert": ({"model": "bert"}, "HRT-2103"),
    "model a number": ({"model": 7}, "HRT-2103"),
    "no tokens": ({"tokens": None}, "HRT-2103"),
    "empty tokens": ({"tokens": []}, "HRT-2103"),
    "unknown pre": ({"pre": "frobnicate"}, "HRT-2102"),
    "types of another length": (
        {"token_type": np.zeros(3, np.int32)},
        "HRT-2103",
    ),
    "no scores": ({"model": "llama", "merges": None}, "HRT-2103"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_vocabularies_are_refused(name):
    changes, code = REFUSED[name]
    with pytest.raises(ModelError) as failure:
        gguf_tokenizer(metadata(**changes), "some.gguf")
    assert failure.value.code == code
    assert "some.gguf" in failure.value.message


def test_a_vocabulary_is_told_before_it_can_encode_and_merges_are_let_go():
    tokenizer = gguf_tokenizer(metadata(eos_token_id=1), "some.gguf")
    recipe = tokenizer._build
    assert 1 in tokenizer.end_token_ids
    assert recipe.metadata.values, "nothing is built yet"
    assert tokenizer.prepare() is tokenizer
    assert not recipe.metadata.values
    assert tokenizer.encode("ab") == tokenizer.prepare().encode("ab")


def test_every_known_rule_builds():
    assert len(PRE_TOKENIZERS) > 40
    for name in PRE_TOKENIZERS:
        assert gguf_tokenizer(metadata(pre=name), "x").encode("ab")


def test_damaged_merges_and_ids_are_harmless():
    values = metadata(merges=["", " ", "a", "a  b", "zz yy", "a b"], bos_token_id=10**6)
    tokenizer = gguf_tokenizer(values, "x")
    assert tokenizer.encode("ab") == [TOKENS.index("ab")]
    assert tokenizer.bos_token_id is None


# ---------------------------------------------------------------- tokenizer.json


@pytest.fixture
def hf_directory(tmp_path):
    """A directory whose tokenizer.json has the tiny vocabulary, `<s>` and `</s>` special."""
    directory = write_hf(tmp_path / "hf", eos_token_id=2)
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b"), ("Ġ", "a")]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    core.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ 1 }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_tokenizer_json_and_gguf_agree(hf_directory, tmp_path):
    ours = load_tokenizer(open_model(hf_directory))
    theirs = load_tokenizer(open_model(write_llama(tmp_path / "m.gguf")))
    for text in ("ab a", "ba ab", "<s>ab</s>", "zz"):
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text, special=True)
        assert ids == theirs.encode(text, special=True)
        assert ours.decode(ids, control=True) == theirs.decode(ids, control=True) == text
    assert ours.end_token_ids == theirs.end_token_ids == {2}
    assert (ours.bos_token_id, ours.add_bos) == (1, True)
    assert ours.encode_prompt("ab") == [1, *ours.encode("ab")]
    assert ours.chat_templates == {"default": "{{ 1 }}"}


def test_control_tokens_that_the_file_takes_for_text_stay_out_of_reach(hf_directory):
    file = hf_directory / "tokenizer.json"
    core = tokenizers.Tokenizer.from_file(str(file))
    core.add_tokens(["<|user|>", "<think>"])
    core.save(str(file))
    tokenizer = load_tokenizer(open_model(hf_directory))
    user, think = len(TOKENS), len(TOKENS) + 1
    assert tokenizer.encode("<|user|>ab", special=True) == [user, *tokenizer.encode("ab")]
    assert user not in tokenizer.encode("<|user|>ab")
    assert tokenizer.is_control(user)
    assert tokenizer.encode("<think>") == [think]
    assert tokenizer.token_bytes(think) == b"<think>"


@pytest.mark.parametrize("name", RUNS)
def test_the_same_vocabulary_from_tokenizer_json_gives_the_same(real, tmp_path, name):
    directory = write_hf(tmp_path / "hf")
    real[name]._core.save(str(directory / "tokenizer.json"))
    again = load_tokenizer(open_model(directory))
    assert again.vocab_size == real[name].vocab_size
    for text in NASTY:
        ids = real[name].encode(text)
        assert again.encode(text) == ids
        assert again.decode(ids) == real[name].decode(ids)


def test_generation_config_and_named_templates_count(hf_directory):
    (hf_directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (hf_directory / "chat_template.jinja").write_text("{{ 2 }}")
    tokenizer = load_tokenizer(open_model(hf_directory))
    assert tokenizer.end_token_ids == {2, 5}
    assert tokenizer.is_control(5)
    assert tokenizer.chat_templates["default"] == "{{ 2 }}"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (hf_directory / "chat_template.jinja").unlink()
    (hf_directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    templates = load_tokenizer(open_model(hf_directory)).chat_templates
    assert templates == {"default": "d", "tool_use": "t"}


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"model": 7}'])
def test_a_missing_or_damaged_tokenizer_json_is_refused(hf_directory, content):
    file = hf_directory / "tokenizer.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError) as failure:
        load_tokenizer(open_model(hf_directory))
    assert failure.value.code == "HRT-2103"
    assert str(hf_directory) in failure.value.message
