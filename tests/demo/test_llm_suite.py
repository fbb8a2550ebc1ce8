"""The suite `llm`: texts of fake packages, base and experts of a tiny Llama, and (slow) the real thing."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_texts import saved
from transformers import LlamaForCausalLM

from merging.data.tokenizer import text_reader
from merging.demo import SUITES, build
from merging.demo.llm import experts
from merging.demo.llm.base_model import first_blocks
from merging.demo.llm.code import code
from merging.demo.llm.experts import answer_id, expert_job, prompt_ids, train_expert
from merging.demo.llm.language import language
from merging.demo.llm.movie import movie
from merging.demo.llm.suite import CALIBRATION_EXAMPLES, STEPS
from merging.demo.llm.texts import MAX_LENGTH, Task, Text, balanced, part_of, read_texts, write_texts
from merging.demo.packages import Archive

ANSWERS = {"neg": " bad", "pos": " good"}


def ignore(done: int, total: int) -> None:
    """Progress that no test looks at."""


def a_tar(members: Mapping[str, bytes]) -> bytes:
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    return stream.getvalue()


def a_source_distribution(path: Path, members: Mapping[str, bytes]) -> Archive:
    path.write_bytes(a_tar(members))
    return Archive(path)


def a_wheel(path: Path, members: Mapping[str, str]) -> Archive:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return Archive(path)


def parts(task: Task) -> dict[str, set[str]]:
    return {part: {one.text for one in getattr(task, part)} for part in ("train", "calibration", "test")}


def assert_apart(task: Task) -> None:
    train, calibration, test = parts(task).values()
    assert train
    assert calibration
    assert test
    assert len(train | calibration | test) == len(train) + len(calibration) + len(test)


# Texts


def test_a_text_of_several_parts_is_tested_and_never_trained_on() -> None:
    drawn = [
        (Text("A film.", "pos"), "train"),
        (Text("a  film.", "pos"), "test"),
        (Text("Other", "neg"), "train"),
        (Text("other", "neg"), "calibration"),
        (Text("other ", "neg"), "calibration"),
    ]

    task = Task.of("movie", ("pos", "neg"), drawn)  # type: ignore[arg-type]

    assert (len(task.train), len(task.calibration), len(task.test)) == (0, 1, 1)
    assert task.test[0].text == "a  film."
    assert list(task.answers.items()) == [("neg", " neg"), ("pos", " pos")]


def test_the_order_of_what_is_found_does_not_matter() -> None:
    drawn = [(Text(f"text {number}", "pos"), part_of(str(number))) for number in range(40)]

    assert Task.of("a", ("pos",), drawn) == Task.of("a", ("pos",), drawn[::-1])


def test_a_group_lies_in_one_part_and_parts_are_seven_one_and_two_tenths() -> None:
    counts = dict.fromkeys(("train", "calibration", "test"), 0)
    for number in range(2000):
        assert part_of(f"group {number}") == part_of(f"group {number}")
        counts[part_of(f"group {number}")] += 1

    assert counts["train"] == pytest.approx(1400, abs=80)
    assert counts["calibration"] == pytest.approx(200, abs=40)


def test_a_balanced_choice_takes_one_of_each_class_in_turn() -> None:
    texts = [Text(str(number), "ab"[number > 5]) for number in range(8)]

    assert [text.label for text in balanced(texts, 5)] == list("ababa")
    assert len(balanced(texts, 100)) == 8


def test_texts_are_read_back_as_written(tmp_path: Path) -> None:
    texts = [Text("one\u2028line \u00df", "pos"), Text('"quoted"\nand broken', "neg")]
    write_texts(texts, tmp_path / "labelled.jsonl", labelled=True)
    write_texts(texts, tmp_path / "bare.jsonl", labelled=False)

    assert read_texts(tmp_path / "labelled.jsonl") == texts
    assert '"label"' not in (tmp_path / "bare.jsonl").read_text(encoding="utf-8")


def test_movie_keeps_what_people_were_sure_about(tmp_path: Path) -> None:
    clear = [f"{n}\t{(-1) ** n * 2.5}\tSentence number {n}." for n in range(60)]
    ratings = "\n".join([*clear, "99\t0.4\tSo so."]).encode()
    corpus = a_tar({"hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": ratings})
    members = {"vaderSentiment-2.5/additional_resources/hutto_ICWSM_2014.tar.gz": corpus}

    task = movie(a_source_distribution(tmp_path / "vader.tar.gz", members))

    assert_apart(task)
    assert set.union(*parts(task).values()) == {f"Sentence number {n}." for n in range(60)}
    assert {text.label == "positive" for text in task.train if int(text.text[16:-1]) % 2} == {False}


def test_code_holds_out_the_end_of_each_file(tmp_path: Path) -> None:
    lines = "\n".join(f"statement({n});\n}}" for n in range(60)).encode()
    folder = "pygments-2.21.0/tests/examplefiles"
    members = {
        f"{folder}/c/example.c": lines,
        f"{folder}/c/example.c.output": b"tokens that no one reads",
        f"{folder}/brainfuck/example.bf": lines,
        f"{folder}/rb/example.rb": lines.replace(b"statement", b"send_message"),
    }

    task = code(a_source_distribution(tmp_path / "pygments.tar.gz", members))

    assert_apart(task)
    assert {text.label for text in task.test} == {"C", "Ruby"}
    assert "statement(57);\nstatement(58);\nstatement(59);" in parts(task)["test"]
    assert "statement(0);\nstatement(1);\nstatement(2);" in parts(task)["train"]


def test_language_holds_out_a_message_in_every_language(tmp_path: Path) -> None:
    def catalogue(word: str) -> str:
        entries = [
            f'msgid ""\n"Message "\n"{n}"\nmsgstr "{word} <b>%(name)s</b> \\"{n}\\" und so weiter"\n'
            for n in range(80)
        ]
        plural = 'msgid "One"\nmsgid_plural "Many"\nmsgstr[0] "%d {word} ist nur eines"\nmsgstr[1] "x"\n'
        return "\n".join(['msgid ""\nmsgstr ""\n"Language: x, a header line"\n', *entries, plural])

    path = "django/conf/locale/{}/LC_MESSAGES/django.po"
    members = {path.format("de"): catalogue("Nachricht"), path.format("fr"): catalogue("Bonjour")}
    members[path.format("xx")] = catalogue("unknown")

    task = language(a_wheel(tmp_path / "django.whl", members))

    assert_apart(task)
    texts = set.union(*parts(task).values())
    assert 'Nachricht "3" und so weiter' in texts
    assert "ist nur eines" not in texts  # too short
    assert not any("unknown" in text or "header" in text for text in texts)
    for texts_of_part in parts(task).values():
        numbers = [
            {text.split('"')[1] for text in texts_of_part if text.startswith(word)}
            for word in ("Nachricht", "Bonjour")
        ]
        assert numbers[0] == numbers[1]


# Base and experts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("llm")
    saved(folder, "llama").to(torch.bfloat16).save_pretrained(folder / "base")
    return folder / "base"


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return [Text(f"the film was {word}", label) for label, word in (("neg", "dull"), ("pos", "great"))]


def test_the_first_blocks_are_those_of_the_whole_model(base: Path) -> None:
    whole = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)

    cut = first_blocks(whole, 1)

    assert cut.config.num_hidden_layers == len(cut.model.layers) == 1
    ids = torch.tensor([[5, 6, 7]])
    seen = whole.model(ids, output_hidden_states=True).hidden_states[1]
    assert torch.equal(cut(ids).logits, whole.lm_head(whole.model.norm(seen)))


def test_prompts_are_cut_and_keep_their_question(base: Path) -> None:
    reader = text_reader(base, "test")

    ids = prompt_ids(reader, "film " * 200)

    assert len(ids) <= MAX_LENGTH
    assert reader.text(ids).endswith("Answer :")


def test_an_answer_of_several_tokens_is_no_answer(base: Path) -> None:
    reader = text_reader(base, "test")

    assert answer_id(reader, " good") == reader.tokenizer.convert_tokens_to_ids("good")
    with pytest.raises(ValueError, match="too many values"):
        answer_id(reader, " very good")


def test_experts_learn_their_task_and_repeat(base: Path, texts: list[Text], tmp_path: Path) -> None:
    for name, seed in {"first": 0, "again": 0, "other": 1}.items():
        train_expert(base, texts, ANSWERS, tmp_path / name, steps=15, seed=seed, report=ignore)
    before = load_file(base / "model.safetensors")
    first, again, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "again", "other")
    )

    assert all(torch.equal(first[name], again[name]) for name in before)
    assert not all(torch.equal(first[name], other[name]) for name in before)
    changed = {name for name in before if not torch.equal(before[name], first[name])}
    assert changed >= {name for name in before if "_proj" in name}
    assert all(".layers." in name for name in changed)
    assert {weight.dtype for weight in first.values()} == {torch.bfloat16}
    assert (tmp_path / "first" / "tokenizer.json").is_file()
    losses = [answer_loss(folder, texts) for folder in (base, tmp_path / "first")]
    assert losses[1] < losses[0]


def answer_loss(folder: Path, texts: list[Text]) -> float:
    """Mean over the texts, each alone and without padding."""
    reader, model = text_reader(folder, "test"), LlamaForCausalLM.from_pretrained(folder).float()
    total = 0.0
    for text in texts:
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids(reader, text.text)])).logits[0, -1]
        total -= logits.log_softmax(-1)[answer_id(reader, ANSWERS[text.label])].item()
    return total / len(texts)


def test_a_process_makes_the_expert_of_its_job_and_counts_its_steps(
    base: Path,
    texts: list[Text],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = expert_job(
        Task("movie", ANSWERS, tuple(texts), (), ()), base, tmp_path / "movie", tmp_path, steps=2, seed=0
    )
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["experts", *job.arguments])

    experts.main()

    torch.set_num_threads(threads)
    assert (job.name, job.module, job.steps) == ("the expert movie", experts.__name__, 2)
    assert capsys.readouterr().out == ".."
    names = load_file(base / "model.safetensors").keys()
    assert load_file(tmp_path / "movie" / "model.safetensors").keys() == names


@pytest.mark.slow
def test_real_experts_are_merged_and_calibrated(tmp_path: Path) -> None:
    from merging.pipeline import Pipeline

    path = build(tmp_path / "demo", SUITES["llm"])
    report = Pipeline.from_spec(path).run()

    for task in STEPS:
        rows = []
        for part in ("calibration", "test"):
            written = (path.parent / f"data/{task}/{part}.jsonl").read_text(encoding="utf-8")
            rows.append([json.loads(line)["text"] for line in written.splitlines()])
        assert len(rows[0]) == 2 * CALIBRATION_EXAMPLES
        assert not set(rows[0]) & set(rows[1])
        scores = report.tasks[task].scores
        assert None not in (scores.base, scores.expert, scores.calibrated)
        assert scores.expert > scores.base + 0.2  # type: ignore[operator]
        assert scores.calibrated > scores.base + 0.15  # type: ignore[operator]
    means = report.means.scores
    assert means.base < means.merged < means.calibrated  # type: ignore[operator]
    _, loading = LlamaForCausalLM.from_pretrained(report.checkpoint, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
