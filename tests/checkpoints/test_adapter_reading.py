"""Adapters that are damaged or hostile: nothing hangs, nothing is dropped in silence, errors stay short."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merging.checkpoints.lora import open_adapter
from merging.checkpoints.lora_config import checked, read_config
from merging.checkpoints.lora_keys import sorted_keys
from merging.checkpoints.lora_sink import LoraSink
from merging.checkpoints.module_patterns import ModulePatterns
from merging.checkpoints.outline import Outline
from merging.checkpoints.rounding import rounded
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError, NumericalError

FACTORS = ("X.lora_A.weight", "X.lora_B.weight")


def as_peft(patterns, module):
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return None


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("[a-z0-9_.]?" * 40 + "#", "leaves too many choices"),
        ("(a|a)" * 60 + "#", "leaves too many choices"),
        ("((a|a)|(a|b))" * 30 + "#", "leaves too many choices"),
        ("a|" * 200_000 + "a", "400001 characters, expected at most 500"),
        ("(" * 5000 + "a" + ")" * 5000, "10001 characters"),
        (".*.*.*.*#", "more than 3 repetitions"),
        ("(a+)+#", "repeats a group"),
        ("(?i)query", "cannot be read"),
        ("query(", "cannot be read"),
        ("a{99999999999999}", "cannot be read"),
    ],
)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_is_damaged_or_endless_is_refused_at_once(field, pattern, words):
    start = time.thread_time()
    with pytest.raises(CheckpointError) as caught:
        checked({"r": 4, field: {pattern: 4}}, "expert", "folder/adapter_config.json")

    text = str(caught.value)
    assert all(
        word in text for word in ["folder/adapter_config.json", field, words, "Name the modules in full"]
    )
    assert len(text) < 500
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("module", ["model.layers.0.self_attn.q_proj", "a.b", "b", "axb", "a.b.c", "^b"])
def test_the_first_pattern_that_matches_counts_as_in_peft(module):
    patterns = [
        "^b", "b", r"a\.b", "a.b", "b.c", r"^model\.layers\.0\.self_attn\.q_proj",
        r".*layers\.[0-9]+\..*q_proj", "q_proj", r"\^b", "self_attn.(q|k)_proj", "(a|b)?", "c$",
    ]  # fmt: skip
    for shift in range(len(patterns)):
        for order in (patterns[shift:], patterns[: shift + 1][::-1]):
            values = {pattern: index for index, pattern in enumerate(order)}

            assert ModulePatterns(values, "rank_pattern").value(module, None) == as_peft(values, module)


def test_ten_thousand_modules_with_a_rank_each_are_found_at_once():
    names = [f"model.layers.{layer}.experts.{expert}.up" for layer in range(40) for expert in range(250)]
    patterns = ModulePatterns(
        {f"^{re.escape(name)}": index for index, name in enumerate(names)}, "rank_pattern"
    )

    start = time.thread_time()
    assert [patterns.value(name, None) for name in names] == list(range(len(names)))
    assert time.thread_time() - start < 5


def test_matching_ends_for_a_name_of_any_length():
    patterns = ModulePatterns({".*.*.*#": 4}, "rank_pattern")

    with pytest.raises(CheckpointError, match=r"rank_pattern.*too many ways to match"):
        patterns.value("a." * 50_000, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"X": 0}},
        {"rank_pattern": {"X": -1}},
        {"r": 10**400},
        {"lora_alpha": 10**400},
        {"rank_pattern": {f"m{index}": 10**400 for index in range(1000)}},
        {"alpha_pattern": {"m" * 10_000: "x" * 10_000}},
    ],
)
def test_numbers_that_cannot_be_are_refused_in_a_few_short_lines(fields):
    with pytest.raises(CheckpointError) as caught:
        checked({"r": 4, **fields}, "expert", "folder/adapter_config.json")

    text = str(caught.value)
    assert "folder/adapter_config.json is damaged" in text
    assert next(iter(fields)) in text
    assert "Download or copy it again" in text
    assert len(text) < 3000
    assert max(map(len, text.splitlines())) < 300


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_alpha": None}, "lora_alpha: .*number, found null"),
        ({"r": None}, "r: .*integer, found null"),
        ({"bias": None}, "bias: .*found null"),
        ({"rank_pattern": None}, "rank_pattern: .*dictionary, found null"),
        ({"r": "4"}, "r: .*integer, found '4'"),
        ({"r": 4.0}, "r: .*integer, found 4.0"),
        ({"lora_alpha": "8"}, "lora_alpha: .*number, found '8'"),
        ({"lora_alpha": True}, "lora_alpha: .*number, found True"),
        ({"fan_in_fan_out": "yes"}, "fan_in_fan_out: .*boolean, found 'yes'"),
        ({"rank_pattern": {"X": "4"}}, "rank_pattern.X: .*integer, found '4'"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name_and_never_guessed(fields, words):
    with pytest.raises(CheckpointError, match=words):
        checked({"r": 4, **fields}, "expert")


def test_a_flag_that_is_null_is_off_as_in_peft():
    flags = dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "init_lora_weights"))

    assert checked({"r": 4, **flags}, "expert").scale("X") == 2.0


def test_nan_in_an_adapters_config_is_told_of_that_file(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": NaN}')

    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not valid JSON: NaN") as caught:
        read_config(tmp_path, "expert")

    assert "spec" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"), [(None, 'is null, expected "LORA"'), (3, 'is 3, expected "LORA"')]
)
def test_a_kind_of_adapter_that_is_no_text_is_told_as_it_stands(kind, words):
    with pytest.raises(CheckpointError, match=words):
        checked({"peft_type": kind}, "expert")


def test_an_adapter_without_tensors_is_refused(tmp_path):
    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')

    with pytest.raises(
        CheckpointError, match=r"adapter_model\.safetensors holds no tensors[\s\S]*save_pretrained"
    ):
        open_adapter(tmp_path, StateDictSource({"X.weight": torch.ones(4, 4)}), None, 'expert "a"')


def test_a_config_with_a_key_given_twice_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "r": 8}')

    with pytest.raises(CheckpointError, match=r'adapter_config\.json.*"r" is given twice[\s\S]*correct it'):
        read_config(tmp_path, "expert")


@pytest.mark.parametrize("named", ["b" * 100_000, "b\0b"])
def test_a_base_name_that_no_file_can_have_is_a_short_note(tmp_path, named):
    save_file(
        {FACTORS[0]: torch.ones(1, 4), FACTORS[1]: torch.ones(4, 1)}, tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1, "base_model_name_or_path": named}))
    base = StateDictSource({"X.weight": torch.ones(4, 4)})

    source = open_adapter(tmp_path, base, None, "expert", base_name="org/base", base_folder=tmp_path)

    (note,) = source.notes
    assert "was trained on" in note
    assert len(note) < 400


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["X.lora_A.default.weight"], ["X.lora_A.weight", "X.lora_A.default.weight", "both given"]),
        (["X.lora_B.default.weight"], ["X.lora_B.weight", "X.lora_B.default.weight", "both given"]),
        (["X.lora_B.bias", "X.lora_B.default.bias"], ["X.lora_B.default.bias", "both given"]),
        (["X.lora_magnitude_vector", "X.lora_magnitude_vector.weight"], ["vector.weight", "both given"]),
        (["base_model.model.X.lora_A.weight"], ["base_model.model.X.lora_A.weight", "both given"]),
        (["n.bias", "n.base_layer.bias"], ["n.base_layer.bias", "both given"]),
        (["n.weight", "base_model.model.n.weight"], ["base_model.model.n.weight", "both given"]),
        (["x.original_module.nonsense"], ["x.original_module.nonsense", 'no "x.nonsense"']),
        (["X.lora_A.bias"], ["X.lora_A.bias", "unknown kind"]),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_no_tensor_of_an_adapter_is_dropped_in_silence(more, words, turned):
    names = [*FACTORS, *more]

    with pytest.raises(CheckpointError) as caught:
        sorted_keys(names[::-1] if turned else names, 'expert "math"')

    text = str(caught.value)
    assert all(word in text for word in ['expert "math"', *words, "save_pretrained"])


@pytest.mark.parametrize("same", [True, False])
def test_a_saved_tensor_that_is_stored_under_two_names_must_be_one(same, tmp_path):
    factors = {FACTORS[0]: torch.ones(1, 4), FACTORS[1]: torch.ones(4, 1)}
    saved = {
        "n.weight": torch.ones(4),
        "n.modules_to_save.default.weight": torch.full((4,), 1.0 if same else 2.0),
    }
    save_file({**factors, **saved}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 1}')
    base = StateDictSource({"X.weight": torch.ones(4, 4), "n.weight": torch.zeros(4)})

    if same:
        assert open_adapter(tmp_path, base, None, "expert").read("n.weight").tolist() == [1.0] * 4
    else:
        with pytest.raises(CheckpointError, match=r'are both given for "n\.weight", expected one'):
            open_adapter(tmp_path, base, None, "expert")


def test_the_original_of_a_saved_module_is_passed_over_in_either_order():
    names = [*FACTORS, "n.original_module.weight", "n.modules_to_save.weight"]

    for order in (names, names[::-1]):
        assert sorted_keys(order, "expert").whole == {"n.weight": "n.modules_to_save.weight"}


def test_many_misfits_are_told_by_the_first_ones(tmp_path):
    modules = [f"m{index}" for index in range(50)]
    factors = {f"{module}.lora_A.weight": torch.ones(1, 4) for module in modules}
    factors |= {f"{module}.lora_B.weight": torch.ones(4, 1) for module in modules}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2**30}))
    base = StateDictSource({f"{module}.weight": torch.ones(4, 4) for module in modules})

    with pytest.raises(
        CheckpointError, match=r"lora_A has 1 rows[\s\S]*and 40 more\n.*of one training"
    ) as caught:
        open_adapter(tmp_path, base, None, "expert")
    assert len(str(caught.value).splitlines()) == 13


@pytest.mark.parametrize("kind", ["memory", "adapter"])
@pytest.mark.parametrize(
    "writes", [[(0, 2), (0, 2)], [(0, 3), (2, 4)], [(0, 4), (1, 2)], [(0, 4), (0, 4)]], ids=str
)
def test_rows_that_are_written_twice_do_not_pass_for_others(kind, writes, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False))
    base = StateDictSource(model.state_dict())
    if kind == "memory":
        sink = StateDictSink(base)
    else:
        sink = LoraSink(tmp_path / "out", base, Outline.of(model, base.names()), rank=2)

    (first, last), (again, end) = writes
    sink.write("0.weight", torch.ones(last - first, 3), slice(first, last))
    with pytest.raises(CheckpointError, match=r'"0\.weight" are written twice\n.*each row once'):
        sink.write("0.weight", torch.ones(end - again, 3), slice(again, end))
    sink.abort()


def test_rows_in_any_order_are_complete():
    base = StateDictSource({"w": torch.zeros(4, 3)})
    with StateDictSink(base) as sink:
        sink.write("w", torch.ones(2, 3), slice(2, 4))
        sink.write("w", torch.full((2, 3), 2.0), slice(0, 2))

    assert sink.tensors["w"][:, 0].tolist() == [2, 2, 1, 1]


def test_values_that_are_not_finite_come_with_a_remedy():
    with pytest.raises(
        NumericalError, match=r"1 of 2 values that are not finite\n.*check the experts' files"
    ):
        rounded(torch.tensor([1.0, float("inf")]), torch.float32, name="w")


def test_the_folder_of_a_named_adapter_inside_is_told(tmp_path: Path) -> None:
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "adapter_config.json").write_text('{"r": 4}')

    with pytest.raises(CheckpointError, match="it has no adapter_config") as caught:
        read_config(tmp_path, "expert")

    assert caught.value.remedy == "Name the folder of one in it: math."
