"""The small models of the reports, experts of them on disk, and word tokenizers that lie beside them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from merging.pipeline import Pipeline

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURE = {"image_size": 32, "patch_size": 8}
WORDS = tuple(f"w{number}" for number in range(64))


def llama(*, tied: bool = False, rows: int = 64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = hf.LlamaConfig(**SIZE, num_key_value_heads=2, vocab_size=rows, tie_word_embeddings=tied)
    return hf.LlamaForCausalLM(config).eval()


def clip_tower(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZE, **PICTURE)).eval()


def vit_classifier(classes: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZE, **PICTURE, num_labels=classes)).eval()


def expert(model: nn.Module, seed: int, noise: float = 0.02) -> nn.Module:
    """A copy with noise on every floating tensor; ties stay."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return other


def saved(model: nn.Module, folder: Path, words: Sequence[str] | None = None, **special: str) -> Path:
    """The model's folder, with a tokenizer of these words."""
    model.save_pretrained(folder)
    if words is not None:
        write_words(folder, words, **special)
    return folder


def write_words(folder: Path, words: Sequence[str], added: Sequence[str] = ()) -> None:
    """A tokenizer that splits at spaces; `added` tokens come after the words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    table = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(word, special=word.startswith("<")) for word in added])
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(folder)


def resized(model: nn.Module, rows: int, seed: int = 7) -> nn.Module:
    """A copy with more rows in embedding and head, drawn anew."""
    other = copy.deepcopy(model)
    before = other.get_input_embeddings().num_embeddings
    other.resize_token_embeddings(rows, mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in {
            id(one): one for one in (other.get_input_embeddings(), other.get_output_embeddings())
        }.values():
            new = layer.weight[before:]
            new.copy_(torch.randn(new.shape, generator=generator))
    return other


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder with one safetensors file."""
    return load_file(folder / "model.safetensors")


def rewritten(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """The folder's weights replaced."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def spec_of(base: Path, experts: Mapping[str, Any], merge: Any = None, **changes: Any) -> dict[str, Any]:
    named = {name: str(one) if isinstance(one, Path) else one for name, one in experts.items()}
    rule = merge or {"type": "task_arithmetic", "scale": 0.3}
    return {"base": str(base), "experts": named, "merge": rule, "device": "cpu", **changes}


def run(out: Path, spec: Mapping[str, Any]) -> Path:
    """The folder of the merged model."""
    return Path(Pipeline.from_spec(dict(spec)).run(out).checkpoint)


def added_up(
    base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]], scale: float
) -> dict[str, Tensor]:
    """Task arithmetic in float64."""
    return {
        name: start.double() + scale * sum(one[name].double() - start.double() for one in experts)
        for name, start in base.items()
    }
