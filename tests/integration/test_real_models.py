"""Whole models, from file to distribution, against llama.cpp and recorded reference outputs.

llama.cpp rounds activations to 8 bits before quantised weights, so on those files distributions
agree, not texts; on float16 weights log-probabilities do.
"""

import json
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import torch

from halogen_core.loader import load_tokenizer, open_model
from halogen_core.loader.gguf import read_gguf
from halogen_core.models import Decoder, config_of, kv_spec
from halogen_core.spi import TorchBackend
from halogen_core.spi.testing import Share, step_batch

REFERENCE = json.loads((Path(__file__).parents[1] / "data/reference.json").read_text("utf-8"))
POSITIONS = 504
TOP = 100
PASSAGES = [
    "The lighthouse stood at the end of a long spit of sand, and in winter the sea came over the road so "
    "often that the keeper kept a boat tied to his own front door. He had learned to read the colour of the "
    "water in the morning, and by noon he could say, without looking at the barometer, what kind of night it would be.",
    "def merge_sort(items):\n    if len(items) <= 1:\n        return items\n    middle = len(items) // 2\n"
    "    left = merge_sort(items[:middle])\n    right = merge_sort(items[middle:])\n    result = []\n"
    "    while left and right:\n        result.append(left.pop(0) if left[0] <= right[0] else right.pop(0))\n    return result + left + right\n",
    "Photosynthesis is the process by which plants, algae and some bacteria convert light energy into chemical "
    "energy. In the first stage, chlorophyll absorbs light and water is split into oxygen, protons and electrons. "
    "In the second stage, carbon dioxide is reduced to sugar. The overall equation is 6 CO2 + 6 H2O -> C6H12O6 + 6 O2.",
    '{"orders": [{"id": 1001, "status": "shipped", "items": 3, "total": 48.50}, {"id": 1002, "status": "pending", "items": 1, '
    '"total": 12.00}, {"id": 1003, "status": "shipped", "items": 2, "total": 30.25}], "page": 1, "pages": 7}\n\nThe days of the week '
    "are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday. The first months are January, February and March.",
    "Q: What is the capital of Australia?\nA: Canberra.\nQ: Who wrote Pride and Prejudice?\nA: Jane Austen.\n"
    "Q: How many sides does a hexagon have?\nA: Six.\nQ: What is the boiling point of water at sea level?\nA: 100 degrees Celsius.\n"
    "Q: Which planet is known as the red planet?\nA: Mars.\nQ: What gas do plants breathe in?\nA: Carbon dioxide.",
    "In mathematics, a prime number is a natural number greater than 1 that is not a product of two smaller natural "
    "numbers. For example, 5 is prime because the only ways of writing it as a product, 1 × 5 or 5 × 1, involve 5 itself. "
    "There are infinitely many primes, as demonstrated by Euclid around 300 BC. No known simple formula separates prime numbers from composite numbers.",
    "Preheat the oven to 180 degrees. Beat the butter and sugar until pale, then add the eggs one at a time. Fold in the "
    "flour, baking powder and a pinch of salt, and loosen the batter with a little milk. Pour it into a lined tin and bake "
    "for thirty-five minutes, until a skewer comes out clean. Let it cool before you cut it, or it will crumble.",
    "La ville était encore endormie quand le train entra en gare. Sur le quai, une femme attendait avec une valise "
    "verte. 今天天气很好，我们一起去公园散步，然后在湖边喝茶。Der Zug fuhr pünktlich ab, und niemand sah ihm nach.",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


class Model:
    """A file on the reference backend: log-probabilities [T, V] after each token of a sequence."""

    def __init__(self, path):
        checkpoint = open_model(path)
        self.tokenizer = load_tokenizer(checkpoint)
        self.backend, config = TorchBackend(), config_of(checkpoint)
        self.decoder = Decoder.load(config, checkpoint, self.backend)
        layout = self.backend.kv_layout(kv_spec(config, dtype="f32", block_size=16))
        self.kv = self.backend.kv_alloc(layout, 8)

    def logprobs(self, ids):
        share = Share(tokens=tuple(ids), blocks=tuple(range(-(-len(ids) // 16))), all_logits=True)
        meta = self.backend.upload_step(step_batch([share], 16))
        logits = self.backend.download(self.decoder.logits(self.backend.ops, meta, self.kv))
        logits = logits.astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Model(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path):
    return Model(gemma3_path)


# ---------------------------------------------------------------- recorded outputs


def forced(model, run):
    """Our log-probabilities for each token of a recorded greedy continuation."""
    ids = [*run["prompt_ids"], *run["greedy_ids"]]
    return model.logprobs(ids[:-1])[len(run["prompt_ids"]) - 1 :]


def test_equals_transformers_on_the_same_weights(smollm2):
    """Recorded by transformers in float32 over the dequantised file: the same arithmetic."""
    runs = REFERENCE["runs"]["hf-transformers-5.24.0-fp32 (dequantized Q4_1)"]
    prompts = REFERENCE["runs"]["SmolLM2-135M-Instruct.Q4_1"]
    for name, run in runs.items():
        ours = forced(smollm2, {**run, "prompt_ids": prompts[name]["prompt_ids"]})
        assert ours.argmax(axis=1).tolist() == run["greedy_ids"]
        for entry in run["first_top10"]:
            assert ours[0, entry["id"]] == pytest.approx(entry["logprob"], abs=2e-3)


@pytest.mark.parametrize(
    ("fixture", "run"),
    [("smollm2", "SmolLM2-135M-Instruct.Q4_1"), ("gemma3", "gemma-3-270m-q4_k_m")],
)
def test_agrees_with_recorded_llama_cpp(request, fixture, run):
    """The same first choices wherever llama.cpp's margin is above its own rounding."""
    model, clear, agreed = request.getfixturevalue(fixture), 0, 0
    for recorded in REFERENCE["runs"][run].values():
        ours = forced(model, recorded)
        for row, ((first, top), (_, second)) in zip(
            ours, recorded["teacher_forced_top2"], strict=True
        ):
            if top - second > 0.5:
                clear += 1
                agreed += row.argmax() == first
    assert clear > 50
    assert agreed >= 0.99 * clear


# ---------------------------------------------------------------- llama.cpp, live


def sequences(tokenizer):
    """The passages' tokens in pieces of 63, `POSITIONS` in all."""
    ids = tokenizer.encode("\n\n".join(PASSAGES))
    assert len(ids) >= POSITIONS
    return [tokenizer.with_bos(ids[at : at + 63]) for at in range(0, POSITIONS, 63)]


def llama_cpp_rows(client, ids):
    """Its `TOP` most likely tokens after each prefix of `ids`: (token ids, log-probabilities).

    The bias keeps the server from hiding tokens that end inside a character; what it reports is
    from before the bias.
    """
    for end in range(1, len(ids) + 1):
        body = {"prompt": ids[:end], "n_predict": 1, "n_probs": TOP, "temperature": 0}
        answer = client.post("/completion", json=body | {"logit_bias": [[260, 1000]]})
        entries = answer.json()["completion_probabilities"][0]["top_logprobs"]
        yield np.array([e["id"] for e in entries]), np.array([e["logprob"] for e in entries])


def divergence(ids, theirs, ours):
    """KL(theirs ‖ ours) over their top tokens and one bucket for all the rest."""
    mine = ours[ids]
    rest, my_rest = 1 - np.exp(theirs).sum(), 1 - np.exp(mine).sum()
    tail = rest * np.log(rest / max(my_rest, 1e-12)) if rest > 1e-9 else 0.0
    return float((np.exp(theirs) * (theirs - mine)).sum() + tail)


@attrs.frozen(kw_only=True)
class Comparison:
    """Arrays over all positions."""

    kl: Any
    agree: Any
    """Whether the first choice is the same."""
    margin: Any
    """By how much llama.cpp prefers its first choice to its second."""
    first: Any
    """Difference of the first choice's log-probability."""
    likely: Any
    """The same of every token with at least one chance in 1,000, position after position."""


def compare(model, client):
    rows, likely = [], []
    for ids in sequences(model.tokenizer):
        ours = model.logprobs(ids)
        for row, (top, theirs) in zip(ours, llama_cpp_rows(client, ids), strict=True):
            difference = np.abs(row[top] - theirs)
            likely.append(difference[theirs >= np.log(1e-3)])
            agrees = row.argmax() == top[0]
            rows.append(
                (divergence(top, theirs, row), agrees, theirs[0] - theirs[1], difference[0])
            )
    assert len(rows) >= 500
    kl, agree, margin, first = map(np.array, zip(*rows, strict=True))
    return Comparison(kl=kl, agree=agree, margin=margin, first=first, likely=np.concatenate(likely))


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes on a busy machine, one on an idle one
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_distributions_agree_with_llama_cpp(request, llama_cpp, name):
    path = request.getfixturevalue(f"{name}_path")
    found = compare(request.getfixturevalue(name), llama_cpp(path))
    print(f"{name}: mean KL {found.kl.mean():.5f}, top-1 {found.agree.mean():.4f}")
    assert found.kl.mean() <= 0.01
    assert found.agree.mean() >= 0.95
    assert found.agree[found.margin > 0.5].all()


def write_float16(source, target):
    """The same model with every matrix dequantised and stored as float16."""
    file, reader = read_gguf(source), gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, file.metadata["general.architecture"])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes on a busy machine, one on an idle one
def test_log_probabilities_agree_with_llama_cpp_on_float16(smollm2_path, llama_cpp, tmp_path):
    path = write_float16(smollm2_path, tmp_path / "smollm2-f16.gguf")
    found = compare(Model(path), llama_cpp(path))
    print(
        f"float16: mean KL {found.kl.mean():.1e}, top-1 {found.agree.mean():.4f}, differences: "
        f"first choice {found.first.max():.4f}, likely {np.quantile(found.likely, 0.999):.4f} "
        f"(99.9 %) {found.likely.max():.4f} (worst of {len(found.likely)})"
    )
    # llama.cpp rounds activations to float16 here, and a rare token shows it most
    assert found.first.max() <= 0.03
    assert np.quantile(found.likely, 0.999) <= 0.03
    assert found.likely.max() <= 0.06
    assert found.agree.mean() >= 0.99
    assert found.kl.mean() <= 1e-4
