"""The readers of the text suites, on tiny archives that look as the packages do, and the splits."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmarks.suites.registries import Members
from benchmarks.suites.text import brown, fortunes, from_demo, spam, vader, wordnet
from benchmarks.suites.text.splits import MOST, PARTS, Part, apart, assert_apart, part_of, write_splits
from benchmarks.suites.text_llama.suite import RECIPE as LLAMA
from benchmarks.suites.text_t5.suite import RECIPE as T5
from merging.demo.llm.texts import Text, read_texts
from merging.demo.packages import Archive


def a_tar(members: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def a_package(path: Path, members: Mapping[str, bytes]) -> Archive:
    """As npm's and Debian's are read."""
    path.write_bytes(a_tar(members))
    return Members(path, lambda path: tarfile.open(path, mode="r:gz"))


def labels(drawn: Iterable[tuple[Text, Part]]) -> dict[str, str]:
    return {text.text: text.label for text, _ in drawn}


# Readers


def test_sentences_that_people_were_sure_about_are_rated_by_their_sign(tmp_path: Path) -> None:
    ratings = b"1\t2.1\tA fine film. \n2\t-0.9\tDull.\n3\t0.5\tSo so.\nnot a row\n"
    corpus = a_tar(
        {"hutto/tweets_GroundTruth.txt": ratings, "hutto/movieReviewSnippets_GroundTruth.txt": b""}
    )
    path = tmp_path / "vader.tar.gz"
    path.write_bytes(a_tar({"v/additional_resources/hutto_ICWSM_2014.tar.gz": corpus}))

    found = labels(vader.tweets(Archive(path)))

    assert found == {"A fine film.": "positive", "Dull.": "negative"}
    assert labels(vader.movie(Archive(path))) == {}


def test_a_mail_is_its_subject_and_the_beginning_of_its_first_part(tmp_path: Path) -> None:
    plain = b"Subject: Re: Exmh &amp; speed\nFrom: a@b\n\n<b>Is it</b>  slower?\n" + b"x" * 400
    parted = (
        b'Subject: Buy\nContent-Type: multipart/mixed; boundary="E"\n\n--E\n'
        b"Content-Type: text/plain\nContent-Transfer-Encoding: base64\n\nTm93IQ==\n\n--E\n\nlater\n--E--\n"
    )
    members = {"package/data/easy-ham-1/1.txt": plain, "package/data/spam-2/2.txt": parted}
    members["package/data/spam-2/2.json"] = b"{}"

    found = labels(spam.spam(a_package(tmp_path / "mails.tgz", members)))

    assert list(found.values()) == ["ham", "spam"]
    ham, junk = found
    assert ham.startswith("Re: Exmh & speed . Is it slower? xxx")
    assert len(ham) == spam.MOST_CHARACTERS
    assert junk == "Buy . Now!"


def test_mails_of_one_thread_are_in_one_part(tmp_path: Path) -> None:
    members = {
        f"package/data/easy-ham-1/{number}-{reply}.txt": f"Subject: {start}topic {number}\n\n{reply}".encode()
        for number in range(20)
        for reply, start in enumerate(("", "Re: ", "RE: Fwd: "))
    }

    drawn = list(spam.spam(a_package(tmp_path / "mails.tgz", members)))

    parts: dict[str, set[Part]] = {}
    for text, part in drawn:
        parts.setdefault(text.text.split(" . ")[0].split("topic ")[1], set()).add(part)
    assert len(parts) == 20
    assert all(len(its) == 1 for its in parts.values())
    assert len(set.union(*parts.values())) > 1


BROWN = {
    "package/ca01": b"\n\n\tThe/at jury/nn met/vbd today/nr again/rb ./.\n\n"
    b"\tIt/pps said/vbd so/rb at/in once/rb ./.\n",
    "package/cd02": b"\tHe/pps prayed/vbd in/in the/at old/jj church/nn ./.\n\tShort/jj ./.\n"
    b"\tThey/ppss all/abn sang/vbd of/in the/at day/nn ./.\n",
    "package/cg03": b"\tBelles/fw lettres/fw are/ber no/at genre/nn here/rb ./.\n",
    "package/README": b"\tNo/at document/nn at/in all/abn ,/, this/dt one/nn ./.\n",
}


def test_genre_reads_two_sentences_in_a_row(tmp_path: Path) -> None:
    found = labels(brown.genre(a_package(tmp_path / "brown.tgz", BROWN)))

    assert found == {
        "The jury met today again . It said so at once .": "news",
        "He prayed in the old church . They all sang of the day .": "religion",
    }


def test_tense_is_told_by_the_tags_of_verbs(tmp_path: Path) -> None:
    lines = (
        "\tThe/at-hl jury/nn-hl met/vbd-hl today/nr-hl ./.-hl\n"
        "\tIt/pps isn't/bez* so/rb at/in once/rb ./.\n"
        "\tThey're/ppss+ber all/abn here/rb at/in once/rb ./.\n"
        "\tHe/pps said/vbd it/ppo is/bez so/rb ./.\n"
        "\tNo/at verb/nn at/in all/abn ./.\n"
        "\tHe/pps came/vbd ./.\n"
    )

    found = labels(brown.tense(a_package(tmp_path / "brown.tgz", {"package/cj05": lines.encode()})))

    assert found == {
        "The jury met today .": "past",
        "It isn't so at once .": "present",
        "They're all here at once .": "present",
    }


WORDNET = {
    "noun": "  1 This is the licence | of it\n"
    '00000001 05 n 01 cat 0 001 @ 1 n 0000 | feline mammal; "a cat"; "two cats"  \n'
    "00000002 03 n 01 thing 0 000 | a thing that is of no listed kind  \n",
    "verb": "00000001 29 v 01 purr 0 000 | make a soft sound  \n",
    "adj": "00000003 00 s 01 furry 0 000 | covered with fur  \n00000004 00 a 01 x 0 000 | brief  \n",
    "adv": "00000005 02 r 01 softly 0 000 | in a soft manner  \n",
}


@pytest.fixture
def glosses(tmp_path: Path) -> Archive:
    members = {f"usr/share/wordnet/data.{file}": text.encode() for file, text in WORDNET.items()}
    return a_package(tmp_path / "wordnet.deb", members)


def test_supersense_keeps_the_listed_kinds_of_nouns(glosses: Archive) -> None:
    assert labels(wordnet.supersense(glosses)) == {"feline mammal": "animal"}


def test_pos_knows_every_gloss_by_the_file_that_it_is_in(glosses: Archive) -> None:
    assert labels(wordnet.pos(glosses)) == {
        "feline mammal": "noun",
        "a thing that is of no listed kind": "noun",
        "make a soft sound": "verb",
        "covered with fur": "adjective",
        "in a soft manner": "adverb",
    }


def test_what_one_task_on_wordnet_tests_the_other_does_not_train_on(tmp_path: Path) -> None:
    lines = "".join(f"{n:08} 05 n 01 cat 0 000 | gloss number {n}\n" for n in range(60))
    members = {f"usr/share/wordnet/data.{file}": b"" for file in wordnet.PARTS_OF_SPEECH}
    archive = a_package(tmp_path / "deb", {**members, "usr/share/wordnet/data.noun": lines.encode()})

    kinds, parts = (
        {text.text: part for text, part in read(archive)} for read in (wordnet.supersense, wordnet.pos)
    )

    assert kinds == parts
    assert set(kinds.values()) == set(PARTS)


def test_fortunes_are_by_file_and_short_ones_are_left_out(tmp_path: Path) -> None:
    quotation = "A program is never less than\n\t90% complete."
    members = {f"usr/share/games/fortunes/{file}": b"" for file in fortunes.TOPICS}
    members["usr/share/games/fortunes/songs-poems"] = f"{quotation}\n%\nBrief.\n%\n".encode()

    found = labels(fortunes.fortune(a_package(tmp_path / "fortunes.deb", members)))

    assert found == {"A program is never less than 90% complete.": "poetry"}


def test_the_demos_tasks_keep_their_test_and_share_their_calibration(tmp_path: Path) -> None:
    entry = 'msgid "Message {0}"\nmsgstr "Nachricht {0} und so weiter"\n'
    path = tmp_path / "django.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        catalogue = "\n".join(entry.format(number) for number in range(200))
        wheel.writestr("django/conf/locale/de/LC_MESSAGES/django.po", catalogue)

    drawn = list(from_demo.language(Archive(path)))

    counts = {part: sum(its == part for _, its in drawn) for part in PARTS}
    assert sum(counts.values()) == len(labels(drawn)) == 200
    assert counts["train"] > counts["test"] > counts["validation"] > 0 < counts["calibration"]


# Splits


def test_a_group_is_in_one_part_and_parts_have_their_shares() -> None:
    counts = dict.fromkeys(PARTS, 0)
    for number in range(2000):
        assert part_of(f"group {number}") == part_of(f"group {number}")
        counts[part_of(f"group {number}")] += 1

    assert counts["train"] == pytest.approx(1200, abs=90)
    assert counts["validation"] == pytest.approx(200, abs=50)


def test_a_text_that_one_task_tests_is_in_no_other_part_of_any_task() -> None:
    drawn: dict[str, list[tuple[Text, Part]]] = {
        "first": [
            (Text("A film.", "pos"), "test"),
            (Text("b", "pos"), "train"),
            (Text("b ", "pos"), "train"),
        ],
        "other": [
            (Text("a  FILM.", "x"), "train"),
            (Text("B", "x"), "calibration"),
            (Text("c", "x"), "train"),
        ],
    }

    splits = apart(drawn)

    assert [text.text for text in splits["first"]["test"]] == ["A film."]
    assert splits["first"]["train"] == []
    assert [text.text for text in splits["other"]["train"]] == ["c"]
    assert [text.text for text in splits["other"]["calibration"]] == ["B"]


def test_texts_that_are_not_apart_are_found() -> None:
    empty: dict[Part, list[Text]] = {part: [] for part in PARTS}
    one, same = Text("A film.", "pos"), Text("a film. ", "neg")

    with pytest.raises(AssertionError, match=r"in test and in train.*a film\."):
        assert_apart({"first": {**empty, "test": [one]}, "other": {**empty, "train": [same]}})
    with pytest.raises(AssertionError, match="first: a text is twice in its test part"):
        assert_apart({"first": {**empty, "test": [one, same]}})


def test_parts_are_balanced_and_capped() -> None:
    drawn = [(Text(f"{label} {number}", label), "test") for label in "ab" for number in range(300)]

    test = apart({"task": drawn})["task"]["test"]  # type: ignore[arg-type, dict-item]

    assert len(test) == MOST["test"]
    assert sum(text.label == "a" for text in test) == MOST["test"] // 2


def test_calibration_texts_are_written_without_labels(tmp_path: Path) -> None:
    splits = {part: [Text(f"{part} text", "pos")] for part in PARTS}

    write_splits(splits, tmp_path)

    assert (tmp_path / "calibration.jsonl").read_text() == '{"text": "calibration text"}\n'
    assert read_texts(tmp_path / "test.jsonl") == [Text("test text", "pos")]
    assert read_texts(tmp_path / "validation.jsonl") == [Text("validation text", "pos")]


def test_the_t5_warms_up_on_none_of_its_tasks_and_on_none_of_their_texts() -> None:
    tasks, others = {task.name for task in T5.tasks}, {task.name for task in T5.warm_up}

    assert len(tasks) == 8
    assert others
    assert not tasks & others
    assert LLAMA.warm_up == ()
    used = {package.name for package in T5.packages}
    assert {task.package.name for task in (*T5.tasks, *T5.warm_up)} <= used


@pytest.mark.parametrize("recipe", [T5, LLAMA], ids=lambda recipe: recipe.name)
def test_every_task_has_steps_and_a_licence(recipe: object) -> None:
    assert recipe.steps.keys() == {task.name for task in recipe.tasks}  # type: ignore[attr-defined]
    assert all(package.licence for package in recipe.packages)  # type: ignore[attr-defined]
