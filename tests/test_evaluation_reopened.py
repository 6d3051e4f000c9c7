"""Saved weights opened by transformers and PEFT alone: clean ones pass, planted faults are found."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from published_models import published_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from sft_play.evaluation import plain, reopened
from sft_play.evaluation.reference import Reference
from sft_play.evaluation.reopened import FROM_FLOAT8, ROUNDED, Folder, reopen


@pytest.fixture
def copied(finished, tmp_path) -> tuple[Path, Reference]:
    """A copy of an adapter, to change, and what its run said of the test rows."""
    folder = finished("lora")
    weights = shutil.copytree(folder.weights("lora"), tmp_path / "adapter")
    return weights, Reference.read(folder.evaluation)


def opened(weights: Path, reference: Reference):
    return reopen(Folder(weights, "float32", {"": "cpu"}), reference)


@pytest.mark.parametrize("mode", ["full", "qlora"])
def test_a_clean_folder_passes(finished, opens_here, mode):
    folder = finished(mode)
    quantization = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "float32",
    }
    weights = Folder(folder.weights(mode), "float32", {"": "cpu"})
    if mode == "qlora":
        weights = replace(weights, quantization=quantization)
    found = reopen(weights, Reference.read(folder.evaluation))
    assert found.faults() == [] and found.kl < 1e-9 and found.top1_agreement == 1


def test_weights_that_changed_are_found(copied, opens_here):
    weights, reference = copied
    file = weights / "adapter_model.safetensors"
    tensors = load_file(file)
    scaled = {name: tensor * (2 if "lora_B" in name else 1) for name, tensor in tensors.items()}
    save_file(scaled, file, metadata={"format": "pt"})
    found = opened(weights, reference)
    assert found.kl > 1e-4 and found.faults()[0].startswith("KL=")
    assert found.faults() == found.differences()


@pytest.mark.parametrize("fault", ["a name", "a value", "a tensor"])
def test_an_adapter_that_is_not_loaded_as_it_was_saved_is_refused(fault, tmp_path):
    # PEFT loads the adapters of DeepSeek-OCR 2 into no layer, and its own names stay as they were
    model_type = "deepseek_ocr2" if fault == "a name" else "mistral3"
    adapters = LoraConfig(target_modules=r".*language_model.*q_proj")
    get_peft_model(published_model(model_type), adapters).save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(published_model(model_type, seed=1), tmp_path)
    if fault != "a name":
        plain.refuse_unread_tensors(loaded, str(tmp_path))
        file = tmp_path / "adapter_model.safetensors"
        tensors = load_file(file)
        name, tensor = tensors.popitem()
        if fault == "a value":
            tensors[name] = tensor + 1e-6
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"PEFT does not load \d+ adapter tensors"):
        plain.refuse_unread_tensors(loaded, str(tmp_path))


def test_a_loss_or_an_agreement_that_no_rounding_explains_is_of_another_model(finished, opens_here):
    weights, reference = finished("lora").weights("lora"), finished("lora").evaluation
    found = opened(weights, Reference.read(reference))
    assert not found.is_another_model
    assert not replace(found, eval_loss=found.run_eval_loss + 0.04, bound=ROUNDED).is_another_model
    assert replace(found, eval_loss=found.run_eval_loss - 0.06, bound=ROUNDED).is_another_model
    assert replace(found, top1_agreement=0.89, bound=ROUNDED).is_another_model
    from_float8 = replace(
        found, eval_loss=found.run_eval_loss + 0.1, top1_agreement=0.8, bound=FROM_FLOAT8
    )
    assert not from_float8.is_another_model


def test_the_eos_of_the_base_and_a_template_that_changed_are_found(copied, opens_here):
    weights, reference = copied
    path = weights / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 3}))
    path = weights / "chat_template.jinja"
    path.write_text("Answer now. " + path.read_text())
    found = opened(weights, reference)
    assert found.faults() == [
        "generation continues after the trained stop in 6 rows",
        "the chat template writes 2 prompts otherwise",
    ]
    assert found.differences() == []


def test_the_divergence_is_that_of_the_whole_vocabulary_where_all_tokens_are_kept():
    torch.manual_seed(0)
    one, other = torch.randn(5, 40), torch.randn(5, 40)
    labels = torch.arange(5)
    run = plain.outputs_of(one, labels)
    found = reopened.divergence(run, plain.outputs_of(other, labels, run.tokens))
    p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
    assert found == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-9)


def test_of_a_large_vocabulary_the_divergence_of_equal_logits_is_zero():
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    run = plain.outputs_of(logits, torch.arange(3))
    assert reopened.divergence(run, plain.outputs_of(logits, torch.arange(3), run.tokens)) == 0


def test_soft_caps_of_attention_scores_are_computed_in_the_opened_model():
    ids = torch.arange(2, 34)[None]
    model = tiny_model("gemma2").eval()
    model.config._attn_implementation = (
        "sdpa"  # the default of older versions; newer ones have none
    )
    opened_model = plain.with_soft_caps(model)
    assert opened_model.config._attn_implementation == "eager"
    with torch.no_grad():
        capped = opened_model(input_ids=ids).logits
        for module in opened_model.modules():
            if hasattr(module, "attn_logit_softcapping"):
                module.attn_logit_softcapping = None
        without = opened_model(input_ids=ids).logits
    assert (capped - without).abs().max() > 0.1, "a cap that changes nothing proves nothing"
    assert plain.with_soft_caps(tiny_model("llama")).config._attn_implementation == "sdpa"
