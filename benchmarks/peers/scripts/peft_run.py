"""peft's add_weighted_adapter on our adapters: `peft_run.py COMBINATION --inputs DIR --out DIR --adapters N`.

Does what its user does: loads the base and the adapters, combines them, saves the new one."""

from __future__ import annotations

import argparse
from pathlib import Path

from peft import PeftModel
from transformers import LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("combination", choices=("linear", "cat", "svd"))
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--adapters", type=int, required=True)
    asked = parser.parse_args()
    names = [f"a{number}" for number in range(asked.adapters)]
    base = LlamaForCausalLM.from_pretrained(asked.inputs / "base")
    model = PeftModel.from_pretrained(base, str(asked.inputs / names[0]), adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(str(asked.inputs / name), adapter_name=name)
    weights = [1 / len(names)] * len(names)
    model.add_weighted_adapter(names, weights, "merged", combination_type=asked.combination)
    model.save_pretrained(asked.out, selected_adapters=["merged"])


if __name__ == "__main__":
    main()
