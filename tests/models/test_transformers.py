"""transformers: nine architectures with random weights, caches, generation, checkpointing, and both ways in."""

from __future__ import annotations

import copy
import functools
import io
import sys

import pytest
import torch

pytestmark = pytest.mark.models
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers (extra models)")

import smartattn  # noqa: E402 - after the check above
import smartattn.integrations.transformers as integration  # noqa: E402 - as above
from smartattn import compare, replace_attention, restore_attention  # noqa: E402 - as above
from smartattn.masks import CausalLowerRight, Window  # noqa: E402 - as above
from tests.models import configs  # noqa: E402 - as above
from tests.models.checks import check_model, check_same, num_calls, run  # noqa: E402 - as above


@pytest.mark.parametrize("name", configs.TRANSFORMERS)
def test_architecture(name: str):
    """Outputs, losses and gradients equal stock's, every place is reached, and restoring leaves no trace."""
    report = check_model(*configs.TRANSFORMERS[name]())
    assert report.left == ()


@pytest.mark.parametrize("name", configs.TRANSFORMERS)
def test_registered_name(name: str):
    """``set_attn_implementation("smartattn")`` gives stock's outputs and gradients, and reaches smartattn."""
    model, batch = configs.TRANSFORMERS[name]()
    model.eval()
    expected = {training: run(model, batch, training=training) for training in (False, True)}
    model.set_attn_implementation("smartattn")
    for training in (False, True):
        check_same(run(model, batch, training=training), expected[training])
    assert num_calls() > 0
    report = replace_attention(model)
    assert report.replaced == ()
    assert {place.reason for place in report.left} == {"its attn_implementation is 'smartattn' already"}


GENERATED = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma", "t5", "whisper"])
def test_generate(name: str, cache: str):
    """Generation with left padding gives stock's tokens with growing, static and sliding caches."""
    model, batch = configs.TRANSFORMERS[name]()
    model.eval()
    given = {name: tensor for name, tensor in batch.items() if name in ("input_ids", "input_features")}
    if name in ("llama", "mistral", "gpt2", "gemma"):
        given["attention_mask"] = configs.padding(side="left")
    options = {
        **GENERATED,
        **({"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}),
    }
    expected = model.generate(**given, **options)
    replace_attention(model)
    assert torch.equal(model.generate(**given, **options), expected)
    restore_attention(model)
    before = num_calls()
    assert before > 0
    if name in ("llama", "mistral"):
        model.set_attn_implementation("smartattn")
        assert torch.equal(model.generate(**given, **options), expected)
        assert num_calls() > before


def test_sliding_masks_are_classes(monkeypatch: pytest.MonkeyPatch):
    """A sliding-window prefill builds no mask tensor, and attention gets the window as a class."""
    model, batch = configs.mistral()
    seen = []
    real = integration.attend
    monkeypatch.setattr(integration, "attend", lambda *args: seen.append(args[4]) or real(*args))
    monkeypatch.setattr(integration._library, "stock_mask", lambda **given: pytest.fail("a tensor was built"))
    replace_attention(model)
    model.eval()(input_ids=batch["input_ids"])
    assert seen == [Window(3, 0)] * 2


def test_mask_classes_hold_exactly_what_their_tensors_hold():
    """For every kind of mask and place in a cache, the class and the tensor that stock builds are equal."""
    from transformers import masking_utils as masking

    stock = masking.sdpa_mask
    functions = {
        "causal": (masking.causal_mask_function, None),
        "sliding": (masking.sliding_window_causal_mask_function(4), 4),
        "wide": (masking.sliding_window_causal_mask_function(64), 64),
        "both ways": (masking.sliding_window_bidirectional_mask_function(3), 3),
        "all": (masking.bidirectional_mask_function, None),
    }
    num_classes = 0
    for name, (function, local_size) in functions.items():
        for q_length, kv_length, q_offset, kv_offset in (
            (6, 6, 0, 0),
            (3, 9, 6, 0),
            (3, 6, 6, 3),
            (1, 6, 5, 0),
            (6, 8, 0, 0),
        ):
            for padding in (None, torch.ones(2, 9, dtype=torch.bool), configs.padding(2, 9, side="left").bool()):
                given = {
                    "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
                    "mask_function": function, "attention_mask": padding, "local_size": local_size,
                    "allow_is_causal_skip": name not in ("both ways", "all"),
                    "allow_is_bidirectional_skip": name in ("both ways", "all"),
                }  # fmt: skip
                full = stock(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
                found = integration.class_mask(**given)
                if isinstance(found, CausalLowerRight | Window):
                    num_classes += 1
                    dense = found.dense(q_length, kv_length).expand(2, 1, -1, -1)
                    assert torch.equal(dense, full), (name, given)
                    tensor = integration.registered_mask(**given)
                    assert torch.equal(tensor, full), (name, given)
                elif found is None:
                    assert stock(**given) is None or (name == "wide" and q_length == kv_length), (name, given)
                else:
                    assert torch.equal(found, full), (name, given)
    assert num_classes >= 10


def test_shared_configuration_stays_as_it_is():
    """Two models with one configuration object: replacing one leaves the other and the configuration alone."""
    model, batch = configs.llama()
    other = type(model)(model.config).eval()
    replace_attention(model)
    assert model.config._attn_implementation == "sdpa"
    other(**batch)
    assert num_calls() == 0


def test_explicit_choices_are_left_alone():
    """A model told to use eager attention is left with the reason, and a switch to eager after replacing is obeyed."""
    model, batch = configs.llama()
    model.eval()
    model.set_attn_implementation("eager")
    report = replace_attention(model)
    assert report.replaced == ()
    assert "attn_implementation is 'eager'" in report.left[0].reason
    assert "eager" in str(report)
    model.set_attn_implementation("sdpa")
    replace_attention(model)
    model.set_attn_implementation("eager")
    model(**batch)
    assert num_calls() == 0


def test_what_sdpa_cannot_express_is_refused():
    """Softcaps and attention sinks raise instead of being dropped."""
    q = torch.randn(1, 2, 4, 8)
    for name in ("softcap", "s_aux"):
        with pytest.raises(ValueError, match="cannot express"):
            integration.registered_attention(torch.nn.Identity(), q, q, q, None, **{name: torch.ones(2)})


def test_gradient_checkpointing():
    """With recomputation in the backward pass, gradients equal stock's without it."""
    model, batch = configs.llama()
    model.train()
    expected = run(model, batch, training=True)
    replace_attention(model)
    model.gradient_checkpointing_enable()
    check_same(run(model, batch, training=True), expected)
    assert num_calls() >= 4, "forward and recompute"


def test_saved_whole_and_loaded():
    """A model saved as a whole comes back replaced, with equal outputs, and can be restored."""
    model, batch = configs.mistral()
    model.eval()
    replace_attention(model, dynamic=True)
    expected = run(model, batch, training=False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    before = num_calls()
    check_same(run(loaded, batch, training=False), expected)
    assert num_calls() > before
    assert len(restore_attention(loaded).replaced) > 0


def test_saved_configuration_does_not_name_smartattn(tmp_path):
    """``save_pretrained`` of a replaced model writes what stock writes, and it loads as stock."""
    model, batch = configs.llama()
    model.eval()
    expected = run(model, batch, training=False)
    replace_attention(model)
    model.save_pretrained(tmp_path)
    assert "smartattn" not in (tmp_path / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path).eval()
    before = num_calls()
    check_same(run(loaded, batch, training=False), expected)
    assert num_calls() == before


@pytest.mark.parametrize("is_before", [True, False])
def test_lora(is_before: bool):
    """Adapters put in before or after replacing train alike, and the merged model is as stock's."""
    peft = pytest.importorskip("peft", reason="needs peft (extra models)")
    model, batch = configs.llama()
    model.eval()
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    stock = peft.get_peft_model(copy.deepcopy(model), adapters)
    expected = run(stock, batch, training=True)
    if is_before:
        replace_attention(model)
    torch.manual_seed(1)
    smart = peft.get_peft_model(model, adapters)
    if not is_before:
        assert len(replace_attention(smart).replaced) == 2
    check_same(run(smart, batch, training=True), expected)
    assert num_calls() >= 2
    check_same(
        run(smart.merge_and_unload(), batch, training=False), run(stock.merge_and_unload(), batch, training=False)
    )


@pytest.mark.parametrize("is_before", [True, False])
def test_compiled(is_before: bool):
    """Compiled before or after replacing, outputs equal stock's."""
    torch.compiler.reset()
    model, batch = configs.llama()
    model.eval()
    expected = run(model, batch, training=False)
    if is_before:
        replace_attention(model)
    compiled = torch.compile(model, backend="eager")
    check_same(run(compiled, batch, training=False), expected)
    if not is_before:
        replace_attention(compiled)
        check_same(run(compiled, batch, training=False), expected)
    restore_attention(compiled)
    check_same(run(compiled, batch, training=False), expected)


def test_hooks_of_accelerate():
    """A forward that accelerate's hooks call is reached through them, and their removal ends nothing."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate (comes with peft)")
    model, batch = configs.llama()
    model.eval()
    expected = run(model, batch, training=False)
    for layer in model.model.layers:
        accelerate.hooks.add_hook_to_module(layer.self_attn, accelerate.hooks.ModelHook())
    assert len(replace_attention(model).replaced) == 2
    check_same(run(model, batch, training=False), expected)
    before = num_calls()
    assert before >= 2
    restore_attention(model)
    check_same(run(model, batch, training=False), expected)
    assert num_calls() == before


def test_other_wrappers_are_respected():
    """A forward replaced on the instance by others is left with a reason; one put over ours is switched off under it."""
    model, batch = configs.llama()
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    report = replace_attention(model)
    assert [place.name for place in report.left] == ["model.layers.0.self_attn"]
    assert "already replaced on this instance" in report.left[0].reason
    del attention.forward
    replace_attention(model)
    ours = attention.forward

    @functools.wraps(ours.__wrapped__)
    def outer(*args, **kwargs):
        return ours(*args, **kwargs)

    outer.__wrapped__ = attention.forward
    attention.forward = outer
    restore_attention(model)
    model.eval()(**batch)
    assert num_calls() == 0


def test_too_old_library_names_the_version(monkeypatch: pytest.MonkeyPatch):
    """With a version that lacks both interfaces the report names the version needed."""
    model, _ = configs.llama()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.40.0")
    report = replace_attention(model)
    assert report.replaced == ()
    assert {place.reason for place in report.left} == {"transformers 4.40.0 is too old; 4.53 or newer is needed"}


def test_wishes_reach_every_place():
    """The wishes of ``replace_attention`` hold for the model's calls: an explicit backend answers all."""
    from smartattn.wishes import all_bindings

    model, batch = configs.llama()
    replace_attention(model, backend="math")
    model.eval()(**batch)
    assert {binding.route.rpartition("+")[2] for binding in all_bindings()} == {"math"}


@pytest.mark.parametrize("name", ["bert", "mistral", "t5"])
def test_prewarm(name: str):
    """After ``prewarm`` of a replaced model its first real call measures nothing."""
    model, batch = configs.TRANSFORMERS[name]()
    model.eval()
    replace_attention(model)
    smartattn.prewarm(model, kwargs=batch, progress=False)
    tuned = smartattn.stats().tunings
    assert tuned > 0
    run(model, batch, training=False)
    assert smartattn.stats().tunings == tuned
    assert num_calls() > 0


def test_models_are_freed():
    """A replaced model is freed when its last name goes, without waiting for the garbage collector."""
    import gc
    import weakref

    model, batch = configs.llama()
    replace_attention(model)
    model.eval()(**batch)
    attention = weakref.ref(model.model.layers[0].self_attn)
    gc.collect()
    gc.disable()
    try:
        del model
        assert attention() is None
    finally:
        gc.enable()


def test_compare():
    """``compare`` reports both times and agreement, for calls and ``generate``, and leaves the model as it was."""
    model, batch = configs.llama()
    model.eval()
    given = {"input_ids": batch["input_ids"]}
    times = iter(range(10_000))
    result = compare(model, kwargs=given, repeats=3, warmup=1, now_s=lambda: float(next(times)))
    assert result.agrees
    assert (result.stock_ms, result.replaced_ms, result.ratio) == (1000.0, 1000.0, 1.0)
    assert len(result.report.replaced) == 2
    assert "agree" in str(result)
    assert num_calls() > 0
    before = num_calls()
    model(**given)
    assert num_calls() == before
    generated = compare(model, kwargs={**given, **GENERATED}, repeats=1, warmup=0, method="generate")
    assert generated.max_error == 0


def test_import_needs_no_library():
    """Replacing attention in a model of PyTorch's own imports none of the libraries."""
    import subprocess

    code = (
        "import sys, torch, smartattn\n"
        "print(len(smartattn.replace_attention(torch.nn.Transformer(8, 2, 1, 1, 8)).replaced))\n"
        "print(sorted(set(sys.modules) & {'transformers', 'timm', 'diffusers', 'torchvision', 'peft'}))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["3", "[]"]
